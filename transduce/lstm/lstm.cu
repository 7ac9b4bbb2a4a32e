// The peephole LSTM on the GPU (Eqs. 4-8); `real` is float or double.
//
// A group of blocks takes R sequences through all frames of one direction. Each block has V of the H
// units and keeps their recurrent weights in registers (RESIDENT) or reads them from the cache. At
// every frame a block needs the results of all other blocks of its group at the frame before. It
// reads them from the output tensor itself. The host fills that tensor with EMPTY, a NaN that no
// arithmetic produces, so a number has arrived as soon as its bits are not EMPTY. No result is sent
// twice and no arrivals are counted. All blocks must run at once; a cooperative launch ensures it.
// One thread carries each element of the state in last_s, and of its gradient in grad_first_s.
//
// S neighbouring lanes share a unit's sum, KT of the H terms each, for RC sequences at a time. The
// sums of a frame read PARTS * H numbers: h in the forward pass, the gradients of all units' four
// sums in the backward pass.

typedef long long integer;
#define THREADS 256
#define S (THREADS / V)
#define KT (4 * ((H + 4 * S - 1) / (4 * S)))
#define WIDTH (S * KT)
#define BLOCKS ((H + V - 1) / V)
#define WHOLE 0xffffffff

struct __align__(16) four {
  real e[4];
};

#ifdef DOUBLE
#define TOGETHER 1
__device__ __forceinline__ bool empty(real x) { return __double_as_longlong(x) == -1; }
__device__ __forceinline__ real canonical(real x) {
  return x == x ? x : __longlong_as_double(0x7ff8000000000000LL);
}
__device__ __forceinline__ void look(const real* p, real* x) {
  asm volatile("ld.relaxed.gpu.global.f64 %0, [%1];" : "=d"(x[0]) : "l"(p) : "memory");
}
__device__ __forceinline__ void publish(real* p, real x) {
  asm volatile("st.relaxed.gpu.global.f64 [%0], %1;" ::"l"(p), "d"(canonical(x)) : "memory");
}
__device__ __forceinline__ real exponential(real x) { return exp(x); }
__device__ __forceinline__ real squash(real x) { return tanh(x); }
#else
__device__ __forceinline__ bool empty(real x) { return __float_as_int(x) == -1; }
__device__ __forceinline__ real canonical(real x) { return x == x ? x : __int_as_float(0x7fc00000); }
#if H % 4 == 0
#define TOGETHER 4
__device__ __forceinline__ void look(const real* p, real* x) {
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
               : "l"(p)
               : "memory");
}
#else
#define TOGETHER 1
__device__ __forceinline__ void look(const real* p, real* x) {
  asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(x[0]) : "l"(p) : "memory");
}
#endif
__device__ __forceinline__ void publish(real* p, real x) {
  asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(p), "f"(canonical(x)) : "memory");
}
__device__ __forceinline__ real exponential(real x) { return expf(x); }
__device__ __forceinline__ real squash(real x) { return tanhf(x); }
#endif

__device__ __forceinline__ real sigmoid(real x) { return 1 / (1 + exponential(-x)); }

// Copy the results of a group for RC sequences to shared memory; with `wait`, poll until they have
// arrived. `source` returns the address of a row of the chunk, or null if there is none.
template <typename Source>
__device__ __forceinline__ void fetch(real* to, bool wait, Source source) {
  const int a_row = PARTS * H / TOGETHER, count = RC * a_row, ahead = 4;
#pragma unroll
  for (int first = 0; first < count; first += ahead * THREADS) {
    real x[ahead][TOGETHER];
    const real* from[ahead];
#pragma unroll
    for (int i = 0; i < ahead; i++) {
      int at = first + i * THREADS + threadIdx.x;
      from[i] = at < count ? source(at / a_row) : 0;
      if (from[i]) {
        from[i] += at % a_row * TOGETHER;
        look(from[i], x[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < ahead; i++)
      if (from[i]) {
        bool missing = wait;
        while (missing) {
          missing = false;
#pragma unroll
          for (int e = 0; e < TOGETHER; e++) missing |= empty(x[i][e]);
          if (missing) look(from[i], x[i]);
        }
        int at = first + i * THREADS + threadIdx.x, row = at / a_row, k = at % a_row * TOGETHER;
        real* place = to + (row * PARTS + k / H) * WIDTH + k % H;
#pragma unroll
        for (int e = 0; e < TOGETHER; e++) place[e] = x[i][e];
      }
  }
}

// The weights of a thread: for its unit and each of the four gates, those of KT of the H terms.
struct weights {
#if RESIDENT
  four kept[4][KT / 4];
#endif
  const real* from;  // [4, H, H], at this unit
  bool inside;
  int s;

  __device__ __forceinline__ four look_up(int gate, int i) const {
    four w;
    int k = (i * S + s) * 4;
#pragma unroll
    for (int e = 0; e < 4; e++) w.e[e] = 0;
    if (!inside || k >= H) return w;
    const real* p = from + (integer)gate * H * H + k;
    if (H % 4 == 0) return *(const four*)p;
#pragma unroll
    for (int e = 0; e < 4; e++)
      if (k + e < H) w.e[e] = p[e];
    return w;
  }
  __device__ __forceinline__ weights(const real* all, int d, int unit, int s)
      : from(all + ((integer)d * 4 * H + unit) * H), inside(unit < H), s(s) {
#if RESIDENT
#pragma unroll
    for (int gate = 0; gate < 4; gate++)
#pragma unroll
      for (int i = 0; i < KT / 4; i++) kept[gate][i] = look_up(gate, i);
#endif
  }
  __device__ __forceinline__ four operator()(int gate, int i) const {
#if RESIDENT
    return kept[gate][i];
#else
    return look_up(gate, i);
#endif
  }
};

#if RESIDENT
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("unroll 1")
#endif

// Exchange the sums of 2 HALF rows with the lane HALF away: give it HALF rows, add its other HALF.
template <int HALF, int SUMS>
__device__ __forceinline__ void share(real (&part)[RC][SUMS], int s) {
  if (2 * HALF > RC) return;
#pragma unroll
  for (int r = 0; r < HALF; r++)
#pragma unroll
    for (int i = 0; i < SUMS; i++) {
      const int other = 2 * HALF > RC ? 0 : r + HALF;
      real given = s & HALF ? part[r][i] : part[other][i];
      real kept = s & HALF ? part[other][i] : part[r][i];
      part[r][i] = kept + __shfl_xor_sync(WHOLE, given, HALF);
    }
}

// Add up the sums of the S lanes of a unit; lane s gets those of row s % RC of the chunk.
template <int SUMS>
__device__ __forceinline__ void add_up(real (&part)[RC][SUMS], int s, real (&sum)[SUMS]) {
  share<4>(part, s);
  share<2>(part, s);
  share<1>(part, s);
#pragma unroll
  for (int i = 0; i < SUMS; i++) {
    sum[i] = part[0][i];
#pragma unroll
    for (int d = RC; d < S; d *= 2) sum[i] += __shfl_xor_sync(WHOLE, sum[i], d);
  }
}

// The position of a block, and its shared memory. At each step a block takes RC sequences at a time
// until all of its group are done.
struct block {
  int d, first, member, unit, s, rows, longest;
  integer B, N, D;
  real* buffers;
  int* lengths;  // -1 for rows past the last sequence
  int n, chunk;  // the current step, and the first of the current RC rows

  __device__ block(const integer* all_lengths, integer B, integer N, integer D, integer R,
                   integer groups, integer first_direction)
      : B(B), N(N), D(D) {
    extern __shared__ __align__(16) char shared[];
    int group = blockIdx.x / BLOCKS;
    member = blockIdx.x % BLOCKS;
    d = (int)(first_direction + group / groups);
    first = (int)(group % groups * R);
    unit = member * V + threadIdx.x / S;
    s = threadIdx.x % S;
    rows = (int)((R + RC - 1) / RC * RC);
    buffers = (real*)shared;
    lengths = (int*)(buffers + 2 * RC * PARTS * WIDTH);
    for (int i = threadIdx.x; i < 2 * RC * PARTS * WIDTH; i += THREADS) buffers[i] = 0;
    longest = 0;
    for (int row = 0; row < rows; row++) {
      integer b = first + row, length = all_lengths && b < B ? all_lengths[b] : N;
      length = row >= R || b >= B ? -1 : length > N ? N : length < 0 ? 0 : length;
      if (threadIdx.x == 0) lengths[row] = (int)length;
      longest = length > longest ? (int)length : longest;
    }
    __syncthreads();
  }
  __device__ __forceinline__ bool alive() const {
    bool any = false;
#pragma unroll
    for (int r = 0; r < RC; r++) any |= n < lengths[chunk + r];
    return any;
  }
  // The row of the chunk whose gates this thread computes, for its unit.
  __device__ __forceinline__ int row() const { return chunk + s % RC; }
  __device__ __forceinline__ bool mine() const { return unit < H && s < RC && n < lengths[row()]; }
  // The index of a row's step among all frames of this direction; the second direction runs backwards.
  __device__ __forceinline__ integer frame(int row, int n) const {
    integer t = d == 0 ? n : lengths[row] - 1 - n;
    return ((integer)(first + row) * N + t) * D + d;
  }
  __device__ __forceinline__ integer state(int row) const {
    return ((integer)d * B + first + row) * H + unit;
  }
};

// The peepholes of a unit.
struct peephole {
  real to_input, to_forget, to_output;
  __device__ peephole(const real* all, int d, int unit) : to_input(0), to_forget(0), to_output(0) {
    const real* p = all + (integer)d * 3 * H + unit;
    if (unit < H) to_input = p[0], to_forget = p[H], to_output = p[2 * H];
  }
};

#if PARTS == 1

// The forward pass. `gates` [B, N, D, 4 H] holds the inputs' part of the four sums on entry and the
// gates on return; `output` [B, N, D, H] is EMPTY on entry. Null lengths mean N, null first_h and
// first_s mean zero. Null states mean that there is no backward pass: states and gates are not kept.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    lstm_forward(real* gates, const real* hidden_weights, const real* peepholes,
                 const integer* all_lengths, const real* first_h, const real* first_s, real* output,
                 real* states, real* last_h, real* last_s, integer B, integer N, integer D, integer R,
                 integer groups, integer first_direction) {
  block my(all_lengths, B, N, D, R, groups, first_direction);
  weights w(hidden_weights, my.d, my.unit, my.s);
  peephole peep(peepholes, my.d, my.unit);
  for (int row = my.s; my.s < RC && row < my.rows; row += RC)  // each by the thread that continues it
    if (my.unit < H && my.lengths[row] >= 0) {
      integer at = my.state(row);
      last_s[at] = first_s ? first_s[at] : 0;
      if (my.lengths[row] == 0) last_h[at] = first_h ? first_h[at] : 0;
    }
  auto source = [&](int r) -> const real* {  // the address of h(n-1)
    int row = my.chunk + r;
    if (my.n >= my.lengths[row]) return 0;
    if (my.n > 0) return output + my.frame(row, my.n - 1) * H;
    return first_h ? first_h + ((integer)my.d * B + my.first + row) * H : 0;
  };
  int turn = 0;
  for (my.n = 0; my.n < my.longest; my.n++)
    for (my.chunk = 0; my.chunk < my.rows; my.chunk += RC) {
      if (!my.alive()) continue;
      bool mine = my.mine();
      integer here = my.frame(my.row(), my.n), at = my.state(my.row());
      real inputs[4], before;
      if (mine) {
#pragma unroll
        for (int gate = 0; gate < 4; gate++) inputs[gate] = gates[(here * 4 + gate) * H + my.unit];
        before = last_s[at];
      }
      real* buffer = my.buffers + turn * RC * PARTS * WIDTH;
      turn ^= 1;
      fetch(buffer, my.n > 0, source);
      __syncthreads();
      real part[RC][4];
#pragma unroll
      for (int r = 0; r < RC; r++)
#pragma unroll
        for (int gate = 0; gate < 4; gate++) part[r][gate] = 0;
      UNROLL
      for (int i = 0; i < KT / 4; i++) {
        four each[4];
#pragma unroll
        for (int gate = 0; gate < 4; gate++) each[gate] = w(gate, i);
#pragma unroll
        for (int r = 0; r < RC; r++) {
          four h = *(const four*)(buffer + r * WIDTH + (i * S + my.s) * 4);
#pragma unroll
          for (int gate = 0; gate < 4; gate++)
#pragma unroll
            for (int e = 0; e < 4; e++) part[r][gate] += each[gate].e[e] * h.e[e];
        }
      }
      real recurrent[4];
      add_up<4>(part, my.s, recurrent);
      if (!mine) continue;
      real input_gate = sigmoid(inputs[0] + recurrent[0] + peep.to_input * before);    // Eq. 4
      real forget_gate = sigmoid(inputs[1] + recurrent[1] + peep.to_forget * before);  // Eq. 5
      real squashed = squash(inputs[2] + recurrent[2]);
      real now = forget_gate * before + input_gate * squashed;                         // Eq. 6
      real output_gate = sigmoid(inputs[3] + recurrent[3] + peep.to_output * now);     // Eq. 7
      real h = output_gate * squash(now);                                              // Eq. 8
      publish(output + here * H + my.unit, h);
      last_s[at] = now;
      if (my.n == my.lengths[my.row()] - 1) last_h[at] = h;
      if (states) {
        states[here * H + my.unit] = now;
        real* g = gates + here * 4 * H + my.unit;
        g[0] = input_gate, g[H] = forget_gate, g[2 * H] = squashed, g[3 * H] = output_gate;
      }
    }
  for (int row = 0; row < my.rows; row++)  // zero the padding
    for (integer i = threadIdx.x; my.lengths[row] >= 0 && i < (N - my.lengths[row]) * V; i += THREADS) {
      integer t = my.lengths[row] + i / V;
      int unit = my.member * V + (int)(i % V);
      if (unit < H) output[(((my.first + row) * N + t) * D + my.d) * H + unit] = 0;
    }
}

#else

// The backward pass (docs/derivations.md). `grad_sums` [B, N, D, 4 H] is EMPTY on entry;
// `hidden_weights` [D, 4, H, H] are transposed. `before_h` gets h(n-1), `grad_rest` [groups, D, 7, H]
// each group's part of the gradients of the three peepholes and four biases. Null gradients are zero.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    lstm_backward(const real* gates, const real* hidden_weights, const real* peepholes,
                  const integer* all_lengths, const real* first_h, const real* first_s,
                  const real* output, const real* states, const real* grad_output,
                  const real* grad_last_h, const real* grad_last_s, real* grad_sums, real* before_h,
                  real* grad_first_h, real* grad_first_s, real* grad_rest, integer B, integer N,
                  integer D, integer R, integer groups, integer first_direction) {
  block my(all_lengths, B, N, D, R, groups, first_direction);
  weights w(hidden_weights, my.d, my.unit, my.s);
  peephole peep(peepholes, my.d, my.unit);
  for (int row = my.s; my.s < RC && row < my.rows; row += RC)
    if (my.unit < H && my.lengths[row] >= 0)
      grad_first_s[my.state(row)] = grad_last_s ? grad_last_s[my.state(row)] : 0;
  auto source = [&](int r) -> const real* {  // the address of the sums' gradients at n+1
    int row = my.chunk + r;
    return my.n + 1 < my.lengths[row] ? grad_sums + my.frame(row, my.n + 1) * 4 * H : 0;
  };
  real rest[7] = {0, 0, 0, 0, 0, 0, 0};
  int turn = 0;
  for (my.n = my.longest - 1; my.n >= -1; my.n--)
    for (my.chunk = 0; my.chunk < my.rows; my.chunk += RC) {
      if (!my.alive()) continue;
      bool mine = my.mine();
      int row = my.row();
      integer here = my.frame(row, my.n), at = my.state(row);
      real gate[4], now, before, h, above, carried;
      if (mine && my.n >= 0) {
#pragma unroll
        for (int i = 0; i < 4; i++) gate[i] = gates[(here * 4 + i) * H + my.unit];
        integer earlier = my.frame(row, my.n - 1) * H + my.unit;
        now = states[here * H + my.unit];
        before = my.n > 0 ? states[earlier] : first_s ? first_s[at] : 0;
        h = my.n > 0 ? output[earlier] : first_h ? first_h[at] : 0;
        above = grad_output ? grad_output[here * H + my.unit] : 0;
        carried = grad_first_s[at];
      }
      real* buffer = my.buffers + turn * RC * PARTS * WIDTH;
      turn ^= 1;
      fetch(buffer, true, source);
      __syncthreads();
      real part[RC][1];
#pragma unroll
      for (int r = 0; r < RC; r++) part[r][0] = 0;
      UNROLL
      for (int i = 0; i < KT / 4; i++)
#pragma unroll
        for (int g = 0; g < 4; g++) {
          four each = w(g, i);
#pragma unroll
          for (int r = 0; r < RC; r++) {
            four grad = *(const four*)(buffer + (r * 4 + g) * WIDTH + (i * S + my.s) * 4);
#pragma unroll
            for (int e = 0; e < 4; e++) part[r][0] += each.e[e] * grad.e[e];
          }
        }
      real recurrent[1];
      add_up<1>(part, my.s, recurrent);
      if (!mine) continue;
      real grad_h = my.n + 1 < my.lengths[row] ? recurrent[0] : grad_last_h ? grad_last_h[at] : 0;
      if (my.n < 0) {
        grad_first_h[at] = grad_h;
        continue;
      }
      grad_h += above;
      real input_gate = gate[0], forget_gate = gate[1], squashed = gate[2], output_gate = gate[3];
      real tanh_now = squash(now), grad[4];
      grad[3] = grad_h * tanh_now * (output_gate * (1 - output_gate));
      real grad_s = carried + grad_h * output_gate * (1 - tanh_now * tanh_now) + grad[3] * peep.to_output;
      grad[2] = grad_s * input_gate * (1 - squashed * squashed);
      grad[0] = grad_s * squashed * (input_gate * (1 - input_gate));
      grad[1] = grad_s * before * (forget_gate * (1 - forget_gate));
#pragma unroll
      for (int i = 0; i < 4; i++) publish(grad_sums + (here * 4 + i) * H + my.unit, grad[i]);
      grad_first_s[at] = grad_s * forget_gate + grad[0] * peep.to_input + grad[1] * peep.to_forget;
      before_h[here * H + my.unit] = h;
      rest[0] += grad[0] * before;
      rest[1] += grad[1] * before;
      rest[2] += grad[3] * now;
#pragma unroll
      for (int i = 0; i < 4; i++) rest[3 + i] += grad[i];
    }
#pragma unroll
  for (int i = 0; i < 7; i++) {
#pragma unroll
    for (int d = 1; d < RC; d *= 2) rest[i] += __shfl_xor_sync(WHOLE, rest[i], d);
    if (my.unit < H && my.s == 0) grad_rest[((my.first / R * D + my.d) * 7 + i) * H + my.unit] = rest[i];
  }
  for (int row = 0; row < my.rows; row++)  // zero the padding
    for (integer i = threadIdx.x; my.lengths[row] >= 0 && i < (N - my.lengths[row]) * V; i += THREADS) {
      integer t = my.lengths[row] + i / V, at = ((my.first + row) * N + t) * D + my.d;
      int unit = my.member * V + (int)(i % V);
      if (unit < H) {
        before_h[at * H + unit] = 0;
#pragma unroll
        for (int gate = 0; gate < 4; gate++) grad_sums[(at * 4 + gate) * H + unit] = 0;
      }
    }
}

#endif

// Compute the inputs' part of the four sums [B, N, D 4 H] of ids: a column of the weights plus biases.
extern "C" __global__ void look_up(const integer* ids, const integer* lengths,
                                   const real* input_weights, const real* biases, real* sums,
                                   integer N, integer columns, integer I) {
  integer at = blockIdx.x, id = !lengths || at % N < lengths[at / N] ? ids[at] : 0;
  bool bad = id < 0 || id > I;  // NaN marks an id out of range, as the host does not wait to raise an error
  for (integer j = threadIdx.x; j < columns; j += blockDim.x)
    sums[at * columns + j] = bad ? canonical((real)__longlong_as_double(-1LL))
                                 : biases[j] + (id > 0 ? input_weights[j * I + id - 1] : (real)0);
}

// Compute the gradient of the input weights [D 4 H, I] of ids. A block adds all rows of one id, in order.
extern "C" __global__ void look_up_gradient(const integer* ids, const real* grad_sums, real* grad,
                                            integer positions, integer columns, integer I) {
  integer id = blockIdx.x + 1, j = blockIdx.y * (integer)blockDim.x + threadIdx.x;
  int lane = threadIdx.x % 32;
  real sum = 0;
  for (integer first = 0; first < positions; first += 32) {
    unsigned here = __ballot_sync(WHOLE, first + lane < positions && ids[first + lane] == id);
    for (; here; here &= here - 1) {
      integer at = first + __ffs(here) - 1;
      if (j < columns) sum += grad_sums[at * columns + j];
    }
  }
  if (j < columns) grad[j * I + id - 1] = sum;
}

// Copy the frames [B, N, I] with zeros in the padding, which may hold NaN.
extern "C" __global__ void without_padding(const real* x, const integer* lengths, real* y, integer N,
                                           integer I, integer count) {
  integer i = blockIdx.x * (integer)blockDim.x + threadIdx.x;
  if (i < count) y[i] = i / I % N < lengths[i / I / N] ? x[i] : (real)0;
}
