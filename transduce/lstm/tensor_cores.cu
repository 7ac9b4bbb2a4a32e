// The peephole LSTM on tensor cores (Eqs. 4-8): products of float16, bfloat16 or TF32 numbers,
// everything else in float32. H, the number of units, is a multiple of 32; the host pads with zeros.
//
// A group of blocks takes R sequences through all frames of one direction, CHUNK at a time. Each
// block has UNITS of the H units and keeps their recurrent weights: those of RESIDENT steps of the sums
// in registers, the others in shared memory. What a block computes at a frame, all blocks of its group
// need at the next. They read it from the tensor that the host filled with EMPTY words, NaNs that no
// conversion produces: a word has arrived as soon as it is not EMPTY, and no arrivals are counted. All blocks
// must run at once; a cooperative launch ensures it.
//
// A product is weights [ROWS, SUM] by numbers [SUM, CHUNK]. Each warp adds up a part of the SUM
// terms for all rows; its numbers come from the cache as the tensor cores take them, since the order
// of the terms is free. The warps' parts are added in shared memory, always in the same order. A
// thread then computes two neighbouring units of a sequence.

typedef long long integer;
typedef unsigned int word;  // PACKED numbers that are multiplied
#ifdef TF32
#define PACKED 1
#else
#define PACKED 2
#endif
#define WARPS 8
#define THREADS (32 * WARPS)
#define BLOCKS (H / UNITS)
#define SUM (PARTS * H)
#define ROWS (PARTS == 1 ? 4 * UNITS : UNITS)
#define TILES (ROWS / 16)
#define COLUMNS (CHUNK / 8)
#define STEPS (SUM / PACKED / 16)
#define SHARE ((STEPS + WARPS - 1) / WARPS)
#define LOADS (SHARE * COLUMNS)
#define BATCHES ((LOADS + AHEAD - 1) / AHEAD)
// A row of a warp's sums; with this stride neither writes nor reads of a warp meet in a bank.
#define STRIDE (CHUNK % 16 == 0 ? CHUNK + 8 : CHUNK)
#define SUMS (WARPS * ROWS * STRIDE)
// Pairs of units of a chunk that the threads take; some have none if UNITS is not a multiple of 8.
#define PAIRS ((UNITS + 7) / 8 * 4 * CHUNK)
#define TURNS ((PAIRS + THREADS - 1) / THREADS)
#define EMPTY 0xffffffffu

struct __align__(16) words {
  word e[4];
};
struct __align__(8) two {
  float e[2];
};

// Two neighbouring numbers, rounded to the type of the products.
#ifdef TF32
struct __align__(8) packed {
  word e[2];
};
#else
typedef word packed;
#endif

// --- PTX instructions; tests/emulated_instructions.h has their meaning in C++ ---
// A predicate, not a branch: several loads shall be in flight.
__device__ __forceinline__ void look(bool wanted, const word* p, words& x) {
  asm volatile("{.reg .pred p; setp.ne.s32 p, %5, 0; @p ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];}"
               : "+r"(x.e[0]), "+r"(x.e[1]), "+r"(x.e[2]), "+r"(x.e[3])
               : "l"(p), "r"((int)wanted)
               : "memory");
}
#ifdef TF32
#define INSTRUCTION "m16n8k8"
#define TYPE "tf32"
// The mask clears the bits that a conversion may leave, and so a NaN is never EMPTY.
__device__ __forceinline__ word rounded_word(float x) {
  word y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y & 0xffffe000u;
}
__device__ __forceinline__ packed pack(two x) { return packed{rounded_word(x.e[0]), rounded_word(x.e[1])}; }
__device__ __forceinline__ void publish(word* p, packed x) {
  asm volatile("st.relaxed.gpu.global.v2.b32 [%0], {%1, %2};" ::"l"(p), "r"(x.e[0]), "r"(x.e[1]) : "memory");
}
#else
#define INSTRUCTION "m16n8k16"
#ifdef BFLOAT16
#define TYPE "bf16"
#else
#define TYPE "f16"
#endif
__device__ __forceinline__ packed pack(two x) {
  packed y;
  asm("cvt.rn." TYPE "x2.f32 %0, %1, %2;" : "=r"(y) : "f"(x.e[1]), "f"(x.e[0]));
  return y;
}
__device__ __forceinline__ two unpack(packed x) {
#ifdef BFLOAT16
  return two{__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)};
#else
  two y;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"
      : "=f"(y.e[0]), "=f"(y.e[1])
      : "r"(x));
  return y;
#endif
}
__device__ __forceinline__ void publish(word* p, packed x) {
  asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}
#endif
// Counted in words, the matrices of both instructions lie in the lanes' registers alike.
__device__ __forceinline__ void multiply(float (&c)[4], const words& a, word b0, word b1) {
  asm("mma.sync.aligned." INSTRUCTION ".row.col.f32." TYPE "." TYPE
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.e[0]), "r"(a.e[1]), "r"(a.e[2]), "r"(a.e[3]), "r"(b0), "r"(b1));
}
// --- End of the PTX instructions ---

__device__ __forceinline__ bool missing(const words& x) {
  return x.e[0] == EMPTY || x.e[1] == EMPTY || x.e[2] == EMPTY || x.e[3] == EMPTY;
}
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }
__device__ __forceinline__ float squash(float x) {  // tanh
  return 1.0f - __fdividef(2.0f, 1.0f + __expf(2.0f * x));
}

// The output and its gradient are float32, or of a half type if the weights are.
#ifdef HALF_OUTPUT
typedef packed pair;
__device__ __forceinline__ pair rounded(two x) { return pack(x); }
#else
typedef two pair;
__device__ __forceinline__ pair rounded(two x) { return x; }
__device__ __forceinline__ two unpack(pair x) { return x; }
#endif

// The position of a block, its shared memory and its weights.
struct block {
  int d, first, member, warp, lane, rows, longest;
  integer B, N, D;
  float* sums;  // two buffers
  int *lengths, *ends;  // of the sequences, -1 for those past the last; the longest of each chunk
  words kept[RESIDENT > 0 ? RESIDENT : 1][2][TILES];  // the weights of the first steps
  words* stored;                                      // those of the other steps

  __device__ block(const integer* all_lengths, const word* weights, integer B, integer N, integer D,
                   integer R, integer groups, integer first_direction)
      : B(B), N(N), D(D) {
    extern __shared__ __align__(16) char shared[];
    int group = blockIdx.x / BLOCKS;
    member = blockIdx.x % BLOCKS;
    d = (int)(first_direction + group / groups);
    first = (int)(group % groups * R);
    warp = threadIdx.x / 32;
    lane = threadIdx.x % 32;
    rows = (int)((R + CHUNK - 1) / CHUNK * CHUNK);
    sums = (float*)shared;
    stored = (words*)(sums + 2 * SUMS);
    lengths = (int*)(stored + WARPS * (SHARE - RESIDENT) * 2 * TILES * 32);
    ends = lengths + rows;
    for (int row = threadIdx.x; row < rows; row += THREADS) {
      integer b = first + row, length = -1;
      if (row < R && b < B) {
        length = all_lengths ? all_lengths[b] : N;
        length = length > N ? N : length < 0 ? 0 : length;
      }
      lengths[row] = (int)length;
    }
    __syncthreads();
    longest = 0;
    for (int row = 0; row < rows; row++) longest = max(longest, lengths[row]);
    for (int chunk = threadIdx.x; chunk < rows / CHUNK; chunk += THREADS) {
      int end = 0;
      for (int row = 0; row < CHUNK; row++) end = max(end, lengths[chunk * CHUNK + row]);
      ends[chunk] = end;
    }
#pragma unroll
    for (int step = 0; step < SHARE; step++)
#pragma unroll
      for (int tile = 0; tile < TILES; tile++) {
        words upper = load(weights, step, 16 * tile + lane / 4);
        words lower = load(weights, step, 16 * tile + lane / 4 + 8);
#pragma unroll
        for (int half = 0; half < 2; half++) {
          words a = {upper.e[2 * half], lower.e[2 * half], upper.e[2 * half + 1], lower.e[2 * half + 1]};
          if (step < RESIDENT) kept[step][half][tile] = a;
          else stored[place_of(step, half, tile)] = a;
        }
      }
    __syncthreads();
  }
  // The weights of a row of the product for the terms of a step that this lane has: four words.
  __device__ __forceinline__ words load(const word* weights, int step, int row) const {
    step += warp * SHARE;
    words none = {0, 0, 0, 0};
    if (step >= STEPS) return none;
    int part = row / UNITS, even_first = row % UNITS;  // the even units first, then the odd ones
    int unit = member * UNITS + even_first % (UNITS / 2) * 2 + even_first / (UNITS / 2);
    integer at = PARTS == 1 ? ((integer)d * 4 + part) * H + unit : (integer)d * H + unit;
    words found = *(const words*)(weights + at * (SUM / PACKED) + step * 16 + lane % 4 * 4);
#ifdef TF32
#pragma unroll
    for (int i = 0; i < 4; i++) found.e[i] = rounded_word(__uint_as_float(found.e[i]));
#endif
    return found;
  }
  __device__ __forceinline__ int place_of(int step, int half, int tile) const {
    return ((warp * (SHARE - RESIDENT) + step - RESIDENT) * 2 + half) * TILES * 32 + tile * 32 + lane;
  }
  __device__ __forceinline__ words weight(int step, int half, int tile) const {
    return step < RESIDENT ? kept[step][half][tile] : stored[place_of(step, half, tile)];
  }
  // The index of a row's frame n among all frames; the second direction runs backwards.
  __device__ __forceinline__ integer frame(int row, int n) const {
    integer t = d == 0 ? n : lengths[row] - 1 - n;
    return ((integer)(first + row) * N + t) * D + d;
  }

  // Issue the loads of a batch: each is four words of a sequence.
  __device__ __forceinline__ void issue(int batch, words (&x)[AHEAD], const word* const (&from)[COLUMNS]) const {
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      int load = batch * AHEAD + i, step = load / COLUMNS, column = load % COLUMNS;
      if (load >= LOADS) break;
      x[i].e[0] = x[i].e[1] = x[i].e[2] = x[i].e[3] = 0;
      look(from[column] && warp * SHARE + step < STEPS, from[column] + step * 16, x[i]);
    }
  }
  // Multiply the weights by the numbers of a chunk; write this warp's part of the sums to `to`.
  // `from` has the lane's terms of each of its rows, null for zeros; wait until they have arrived.
  __device__ __forceinline__ void product(float* to, const word* const (&from)[COLUMNS]) const {
    float c[TILES][COLUMNS][4];
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
      for (int column = 0; column < COLUMNS; column++)
#pragma unroll
        for (int i = 0; i < 4; i++) c[tile][column][i] = 0;
    words x[2][AHEAD];
#if PATIENT
    // Poll for a few numbers before the rest: many polls delay what they wait for.
    words few = {0, 0, 0, 0};
    bool wanted = from[0] && warp * SHARE < STEPS;
    do {
      __nanosleep(40);
      look(wanted, from[0], few);
      wanted = missing(few);
    } while (__any_sync(0xffffffff, wanted));
#endif
    issue(0, x[0], from);
#pragma unroll
    for (int batch = 0; batch < BATCHES; batch++) {
      if (batch + 1 < BATCHES) issue(batch + 1, x[(batch + 1) % 2], from);
      bool again = true;
      while (__any_sync(0xffffffff, again)) {
        again = false;
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
          int load = batch * AHEAD + i, step = load / COLUMNS, column = load % COLUMNS;
          if (load >= LOADS) break;
          bool lacking = missing(x[batch % 2][i]);
          look(lacking, from[column] + step * 16, x[batch % 2][i]);
          again |= lacking;
        }
      }
#pragma unroll
      for (int i = 0; i < AHEAD; i++) {
        int load = batch * AHEAD + i, step = load / COLUMNS, column = load % COLUMNS;
        if (load < LOADS)
#pragma unroll
          for (int half = 0; half < 2; half++)
#pragma unroll
            for (int tile = 0; tile < TILES; tile++)
              multiply(c[tile][column], weight(step, half, tile), x[batch % 2][i].e[2 * half],
                       x[batch % 2][i].e[2 * half + 1]);
      }
    }
    to += (warp * ROWS + lane / 4) * STRIDE + lane % 4 * 2;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
      for (int column = 0; column < COLUMNS; column++) {
        float* at = to + 16 * tile * STRIDE + 8 * column;
        *(two*)at = two{c[tile][column][0], c[tile][column][1]};
        *(two*)(at + 8 * STRIDE) = two{c[tile][column][2], c[tile][column][3]};
      }
  }
};

// The two neighbouring units of a sequence that a thread has in one of its turns.
struct place {
  int row, couple;  // of the chunk, of the block
  bool inside;
  __device__ __forceinline__ place(int turn) {
    int i = turn * THREADS + threadIdx.x;
    row = i / 4 % CHUNK;
    couple = i / 4 / CHUNK * 4 + i % 4;
    inside = i < PAIRS && couple < UNITS / 2;
  }
  // The sums of one part (a gate, or all of them) over the warps.
  __device__ __forceinline__ two total(const float* sums, int part) const {
    const float* even = sums + (part * UNITS + couple) * STRIDE + row;
    two sum = two{0, 0};
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) {
      sum.e[0] += even[warp * ROWS * STRIDE];
      sum.e[1] += even[warp * ROWS * STRIDE + UNITS / 2 * STRIDE];
    }
    return sum;
  }
};

__device__ __forceinline__ two get(const float* p) { return *(const two*)p; }
__device__ __forceinline__ two get_or_zero(const float* p, integer at) {
  return p ? *(const two*)(p + at) : two{0, 0};
}
__device__ __forceinline__ void put(float* p, two x) { *(two*)p = x; }

#if PARTS == 1

// The forward pass. `gates` [B, N, D, 4, H] holds the inputs' part of the four sums on entry, without
// biases if those are given, and the gates on return. `before` [B, N, D, H], EMPTY on entry, gets
// h(n-1). Null lengths mean N, null first_h and first_s mean zero. Null states mean that there is no
// backward pass: states and gates are not kept.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    tensor_core_forward(float* gates, const word* hidden_weights, const float* peepholes,
                        const float* biases, const integer* all_lengths, const float* first_h,
                        const float* first_s, pair* output, word* before, float* states,
                        float* last_h, float* last_s, integer B, integer N, integer D, integer R,
                        integer groups, integer first_direction) {
  block my(all_lengths, hidden_weights, B, N, D, R, groups, first_direction);
  two bias[TURNS][4], peep[TURNS][3];
#pragma unroll
  for (int turn = 0; turn < TURNS; turn++) {
    place at(turn);
    int unit = my.member * UNITS + 2 * at.couple;
#pragma unroll
    for (int i = 0; i < 4; i++)
      bias[turn][i] = get_or_zero(at.inside ? biases : 0, ((integer)my.d * 4 + i) * H + unit);
#pragma unroll
    for (int i = 0; i < 3; i++)
      peep[turn][i] = get_or_zero(at.inside ? peepholes : 0, ((integer)my.d * 3 + i) * H + unit);
    for (int row = at.row; at.inside && row < my.rows; row += CHUNK) {
      if (my.lengths[row] < 0) continue;
      integer state = ((integer)my.d * B + my.first + row) * H + unit;
      two h = get_or_zero(first_h, state);
      put(last_s + state, get_or_zero(first_s, state));
      if (my.lengths[row] == 0) put(last_h + state, h);
      else publish(before + (my.frame(row, 0) * H + unit) / PACKED, pack(h));
    }
  }
  const integer next = my.d == 0 ? D : -D;  // from a frame to the one after it
  int buffer = 0;
  for (int n = 0; n < my.longest; n++)
    for (int chunk = 0; chunk < my.rows; chunk += CHUNK) {
      if (n >= my.ends[chunk / CHUNK]) continue;
      two inputs[TURNS][4], state[TURNS];
      integer here[TURNS];
#pragma unroll
      for (int turn = 0; turn < TURNS; turn++) {
        place at(turn);
        int row = chunk + at.row, unit = my.member * UNITS + 2 * at.couple;
        if (at.inside && n < my.lengths[row]) {
          here[turn] = my.frame(row, n);
          const float* g = gates + here[turn] * 4 * H + unit;
#pragma unroll
          for (int i = 0; i < 4; i++) inputs[turn][i] = get(g + i * H);
          state[turn] = get(last_s + ((integer)my.d * B + my.first + row) * H + unit);
        }
      }
      const word* from[COLUMNS];
#pragma unroll
      for (int column = 0; column < COLUMNS; column++) {
        int row = chunk + 8 * column + my.lane / 4;
        from[column] = n < my.lengths[row]
                           ? before + my.frame(row, n) * (H / PACKED) + my.warp * SHARE * 16 + my.lane % 4 * 4
                           : 0;
      }
      float* sums = my.sums + buffer * SUMS;
      buffer ^= 1;
      my.product(sums, from);
      __syncthreads();
#pragma unroll
      for (int turn = 0; turn < TURNS; turn++) {
        place at(turn);
        int row = chunk + at.row, unit = my.member * UNITS + 2 * at.couple;
        if (!at.inside || n >= my.lengths[row]) continue;
        two sum[4], gate[4], now, h;
#pragma unroll
        for (int i = 0; i < 4; i++) sum[i] = at.total(sums, i);
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float total[4], earlier = state[turn].e[e];
#pragma unroll
          for (int i = 0; i < 4; i++) total[i] = sum[i].e[e] + inputs[turn][i].e[e] + bias[turn][i].e[e];
          float input_gate = sigmoid(total[0] + peep[turn][0].e[e] * earlier);        // Eq. 4
          float forget_gate = sigmoid(total[1] + peep[turn][1].e[e] * earlier);       // Eq. 5
          float squashed = squash(total[2]);
          now.e[e] = forget_gate * earlier + input_gate * squashed;                   // Eq. 6
          float output_gate = sigmoid(total[3] + peep[turn][2].e[e] * now.e[e]);      // Eq. 7
          h.e[e] = output_gate * squash(now.e[e]);                                    // Eq. 8
          gate[0].e[e] = input_gate, gate[1].e[e] = forget_gate;
          gate[2].e[e] = squashed, gate[3].e[e] = output_gate;
        }
        bool last = n == my.lengths[row] - 1;
        if (!last) publish(before + ((here[turn] + next) * H + unit) / PACKED, pack(h));
        integer carried = ((integer)my.d * B + my.first + row) * H + unit;
        output[(here[turn] * H + unit) / 2] = rounded(h);
        put(last_s + carried, now);
        if (last) put(last_h + carried, h);
        if (states) {
          put(states + here[turn] * H + unit, now);
          float* g = gates + here[turn] * 4 * H + unit;
#pragma unroll
          for (int i = 0; i < 4; i++) put(g + i * H, gate[i]);
        }
      }
    }
  for (int row = 0; row < my.rows; row++)  // zero the padding
    for (integer i = threadIdx.x; my.lengths[row] >= 0 && i < (N - my.lengths[row]) * (UNITS / 2); i += THREADS) {
      integer t = my.lengths[row] + i / (UNITS / 2);
      integer at = (((my.first + row) * N + t) * D + my.d) * (H / 2) + my.member * (UNITS / 2) + i % (UNITS / 2);
      output[at] = rounded(two{0, 0});
      ((packed*)before)[at] = pack(two{0, 0});
    }
}

#else

// The backward pass (docs/derivations.md). `grad_sums` [B, N, D, 4, H] is EMPTY on entry;
// `hidden_weights` [D, H, 4, H] are transposed. `grad_rest` [groups, D, 7, H] gets each group's part of
// the gradients of the three peepholes and four biases. Null gradients are zero.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    tensor_core_backward(const float* gates, const word* hidden_weights, const float* peepholes,
                         const integer* all_lengths, const float* first_s, const float* states,
                         const pair* grad_output, const float* grad_last_h, const float* grad_last_s,
                         word* grad_sums, float* grad_first_h, float* grad_first_s, float* grad_rest,
                         integer B, integer N, integer D, integer R, integer groups,
                         integer first_direction) {
  block my(all_lengths, hidden_weights, B, N, D, R, groups, first_direction);
  two peep[TURNS][3], rest[TURNS][7];
#pragma unroll
  for (int turn = 0; turn < TURNS; turn++) {
    place at(turn);
    int unit = my.member * UNITS + 2 * at.couple;
#pragma unroll
    for (int i = 0; i < 7; i++) rest[turn][i] = two{0, 0};
#pragma unroll
    for (int i = 0; i < 3; i++)
      peep[turn][i] = get_or_zero(at.inside ? peepholes : 0, ((integer)my.d * 3 + i) * H + unit);
    for (int row = at.row; at.inside && row < my.rows; row += CHUNK) {
      integer carried = ((integer)my.d * B + my.first + row) * H + unit;
      if (my.lengths[row] >= 0) put(grad_first_s + carried, get_or_zero(grad_last_s, carried));
    }
  }
  const integer next = my.d == 0 ? D : -D;  // from a frame to the one after it
  int buffer = 0;
  for (int n = my.longest - 1; n >= -1; n--)
    for (int chunk = 0; chunk < my.rows; chunk += CHUNK) {
      if (n >= my.ends[chunk / CHUNK]) continue;
      two gate[TURNS][4], now[TURNS], earlier[TURNS], above[TURNS], carry[TURNS];
      integer here[TURNS];
#pragma unroll
      for (int turn = 0; turn < TURNS; turn++) {
        place at(turn);
        int row = chunk + at.row, unit = my.member * UNITS + 2 * at.couple;
        if (at.inside && n >= 0 && n < my.lengths[row]) {
          integer carried = ((integer)my.d * B + my.first + row) * H + unit;
          here[turn] = my.frame(row, n);
#pragma unroll
          for (int i = 0; i < 4; i++) gate[turn][i] = get(gates + (here[turn] * 4 + i) * H + unit);
          now[turn] = get(states + here[turn] * H + unit);
          earlier[turn] = n > 0 ? get(states + (here[turn] - next) * H + unit) : get_or_zero(first_s, carried);
          above[turn] = grad_output ? unpack(grad_output[(here[turn] * H + unit) / 2]) : two{0, 0};
          carry[turn] = get(grad_first_s + carried);
        }
      }
      const word* from[COLUMNS];
#pragma unroll
      for (int column = 0; column < COLUMNS; column++) {
        int row = chunk + 8 * column + my.lane / 4;
        from[column] = n + 1 < my.lengths[row] ? grad_sums + my.frame(row, n + 1) * (4 * H / PACKED) +
                                                     my.warp * SHARE * 16 + my.lane % 4 * 4
                                               : 0;
      }
      float* sums = my.sums + buffer * SUMS;
      buffer ^= 1;
      my.product(sums, from);
      __syncthreads();
#pragma unroll
      for (int turn = 0; turn < TURNS; turn++) {
        place at(turn);
        int row = chunk + at.row, unit = my.member * UNITS + 2 * at.couple;
        if (!at.inside || n >= my.lengths[row]) continue;
        integer carried = ((integer)my.d * B + my.first + row) * H + unit;
        two grad_h = n + 1 < my.lengths[row] ? at.total(sums, 0) : get_or_zero(grad_last_h, carried);
        if (n < 0) {
          put(grad_first_h + carried, grad_h);
          continue;
        }
        two grad[4], passed;
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float input_gate = gate[turn][0].e[e], forget_gate = gate[turn][1].e[e];
          float squashed = gate[turn][2].e[e], output_gate = gate[turn][3].e[e];
          float before = earlier[turn].e[e], after = now[turn].e[e], tanh_after = squash(after);
          float above_h = grad_h.e[e] + above[turn].e[e];
          float to_output = above_h * tanh_after * (output_gate * (1 - output_gate));
          float grad_s = carry[turn].e[e] + above_h * output_gate * (1 - tanh_after * tanh_after) +
                         to_output * peep[turn][2].e[e];
          float to_state = grad_s * input_gate * (1 - squashed * squashed);
          float to_input = grad_s * squashed * (input_gate * (1 - input_gate));
          float to_forget = grad_s * before * (forget_gate * (1 - forget_gate));
          grad[0].e[e] = to_input, grad[1].e[e] = to_forget;
          grad[2].e[e] = to_state, grad[3].e[e] = to_output;
          passed.e[e] = grad_s * forget_gate + to_input * peep[turn][0].e[e] + to_forget * peep[turn][1].e[e];
          rest[turn][0].e[e] += to_input * before;
          rest[turn][1].e[e] += to_forget * before;
          rest[turn][2].e[e] += to_output * after;
#pragma unroll
          for (int i = 0; i < 4; i++) rest[turn][3 + i].e[e] += grad[i].e[e];
        }
        word* to = grad_sums + (here[turn] * 4 * H + unit) / PACKED;
#pragma unroll
        for (int i = 0; i < 4; i++) publish(to + i * (H / PACKED), pack(grad[i]));
        put(grad_first_s + carried, passed);
      }
    }
  __syncthreads();
  // Add up the rows, in order; the buffers of the sums have room for them.
  static_assert(2 * SUMS >= 7 * UNITS * CHUNK, "the sums of the rows need more room");
#pragma unroll
  for (int turn = 0; turn < TURNS; turn++) {
    place at(turn);
#pragma unroll
    for (int i = 0; at.inside && i < 7; i++) {
      float* to = my.sums + (i * UNITS + 2 * at.couple) * CHUNK + at.row;
      to[0] = rest[turn][i].e[0], to[CHUNK] = rest[turn][i].e[1];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 7 * UNITS; i += THREADS) {
    float sum = 0;
    for (int row = 0; row < CHUNK; row++) sum += my.sums[i * CHUNK + row];
    grad_rest[((my.first / R * D + my.d) * 7 + i / UNITS) * H + my.member * UNITS + i % UNITS] = sum;
  }
  for (int row = 0; row < my.rows; row++)  // zero the padding
    for (integer i = threadIdx.x; my.lengths[row] >= 0 && i < (N - my.lengths[row]) * (2 * UNITS); i += THREADS) {
      integer t = my.lengths[row] + i / (2 * UNITS), at = ((my.first + row) * N + t) * D + my.d;
      int part = (int)(i / (UNITS / 2) % 4), couple = (int)(i % (UNITS / 2));
      packed* to = (packed*)grad_sums + (at * 4 + part) * (H / 2) + my.member * (UNITS / 2);
      to[couple] = pack(two{0, 0});
    }
}

#endif
