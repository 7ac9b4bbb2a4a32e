// The PTX instructions of lstm/tensor_cores.cu as the PTX manual defines them, for the emulation.
static void look(bool wanted, const word *p, words &x) {
  if (wanted) memcpy(&x, p, sizeof x);
}
static void publish(word *p, packed x) { memcpy(p, &x, sizeof x); }

#ifdef TF32
// Rounds to 10 bits of mantissa, to nearest, ties away from zero.
static word rounded_word(float x) {
  word bits = of_bits<float, word>(x);
  return std::isnan(x) ? 0x7fffe000u : std::isinf(x) ? bits : (bits + 0x1000u) & 0xffffe000u;
}
static packed pack(two x) { return packed{rounded_word(x.e[0]), rounded_word(x.e[1])}; }
static float number(word x, int) { return of_bits<word, float>(x); }
#else
// Rounds to bfloat16, to nearest, ties to even.
static word rounded_half(float x) {
  word bits = of_bits<float, word>(x);
  return std::isnan(x) ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
}
static packed pack(two x) { return rounded_half(x.e[0]) | rounded_half(x.e[1]) << 16; }
static float number(word x, int i) { return of_bits<word, float>(i ? x & 0xffff0000u : x << 16); }
static two unpack(packed x) { return two{number(x, 0), number(x, 1)}; }
#endif

// The fragments of mma.m16n8k16 and, for TF32, m16n8k8; k counts words.
static words of_a[2048];
static word of_b[2048][2];
static void multiply(float (&c)[4], const words &a, word b0, word b1) {
  int lane = threadIdx.x % 32, warp = self() - lane;
  of_a[self()] = a, of_b[self()][0] = b0, of_b[self()][1] = b1;
  wait_at(1);
  for (int i = 0; i < 4; i++) {
    int row = lane / 4 + (i < 2 ? 0 : 8), column = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 8; k++) {
      word x = of_a[warp + row % 8 * 4 + k % 4].e[(k < 4 ? 0 : 2) + row / 8];
      word y = of_b[warp + column * 4 + k % 4][k / 4];
      for (int part = 0; part < PACKED; part++) c[i] += number(x, part) * number(y, part);
    }
  }
  wait_at(1);
}
