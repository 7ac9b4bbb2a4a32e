// The output lattice on the GPU (Eqs. 12-22). `real` is float or double, `input` the logits' type.
// Arrays along the lattice are skewed: node (t, u) of item b is at (b * rows + t + u) * columns + u.

typedef long long integer;
#define INFINITE __longlong_as_double(0x7ff0000000000000LL)
#define NOT_A_NUMBER __longlong_as_double(0x7ff8000000000000LL)

__device__ __forceinline__ double exponential(double x) { return exp(x); }
__device__ __forceinline__ float exponential(float x) { return expf(x); }
__device__ __forceinline__ double logarithm(double x) { return log(x); }
__device__ __forceinline__ float logarithm(float x) { return logf(x); }

// A value along the lattice: a sum of thousands of logarithms. A step waits for the one before, and a
// double's conversions are slow, so for float inputs it is two floats, whose sum is exact.
#ifdef DOUBLE
typedef double value;
#define IMPOSSIBLE (-1e290)
#define NEVER (-1e280)
__device__ __forceinline__ value new_value(double x) { return x; }
__device__ __forceinline__ double whole(value a) { return a; }
__device__ __forceinline__ value add(value a, double b) { return a + b; }
__device__ __forceinline__ value log_add(value a, value b) {  // ln(e^a + e^b)
  return (a > b ? a : b) + log1p(exp(-fabs(a - b)));
}
__device__ __forceinline__ value shuffle_up(value a) { return __shfl_up_sync(0xffffffff, a, 1); }
__device__ __forceinline__ value shuffle_down(value a) { return __shfl_down_sync(0xffffffff, a, 1); }
#else
struct __align__(8) value { float high, low; };
#define IMPOSSIBLE (-1e30f)
#define NEVER (-1e29)
__device__ __forceinline__ value new_value(float x) { return {x, 0.0f}; }
__device__ __forceinline__ double whole(value a) { return (double)a.high + (double)a.low; }
__device__ __forceinline__ value add(value a, float b) {
  float sum = a.high + b, part = sum - a.high;  // what the sum lost goes to the low part
  return {sum, a.low + ((a.high - (sum - part)) + (b - part))};
}
__device__ __forceinline__ value log_add(value a, value b) {  // ln(e^a + e^b)
  float ahead = (a.high - b.high) + (a.low - b.low), z;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(z) : "f"(-fabsf(ahead) * 1.44269504f));
  // ln(1 + z) for z in [0, 1], two halves of the polynomial at a time
  float z2 = z * z, z4 = z2 * z2;
  float p0 = fmaf(fmaf(-0.2489211559f, z, 0.3332148492f), z2, fmaf(-0.4999934733f, z, 0.9999998808f));
  float p1 = fmaf(fmaf(-0.0488452949f, z, 0.0969111174f), z2, fmaf(-0.1469127387f, z, 0.1942333728f));
  float p2 = fmaf(-0.0024245873f, z, 0.0158852190f);
  float rest = z * fmaf(fmaf(p2, z4, p1), z4, p0);
  return add(ahead > 0 ? a : b, rest);
}
__device__ __forceinline__ value shuffle_up(value a) {
  return {__shfl_up_sync(0xffffffff, a.high, 1), __shfl_up_sync(0xffffffff, a.low, 1)};
}
__device__ __forceinline__ value shuffle_down(value a) {
  return {__shfl_down_sync(0xffffffff, a.high, 1), __shfl_down_sync(0xffffffff, a.low, 1)};
}
#endif

__device__ __forceinline__ integer frames_of(const integer* num_frames, integer b, integer max_T) {
  integer T = num_frames[b];
  return T < 1 ? 1 : T > max_T ? max_T : T;
}
__device__ __forceinline__ integer labels_of(const integer* num_labels, integer b, integer max_U) {
  integer U = num_labels[b];
  return U < 0 ? 0 : U > max_U ? max_U : U;
}
__device__ __forceinline__ integer label_at(const integer* labels, integer b, integer u, integer max_U,
                                            integer num_outputs) {
  integer k = labels[b * max_U + u];
  return k < 0 || k >= num_outputs ? 0 : k;
}

// The largest and the sum over a block of at most 1024 threads, in a fixed order.
template <typename number, bool SUM>
__device__ number reduce(number x, number* space) {
  __syncthreads();
  for (int d = 16; d > 0; d /= 2) {
    number other = __shfl_xor_sync(0xffffffff, x, d);
    x = SUM ? x + other : (x > other ? x : other);
  }
  int warp = threadIdx.x / 32, warps = (blockDim.x + 31) / 32;
  if (threadIdx.x % 32 == 0) space[warp] = x;
  __syncthreads();
  x = space[0];
  for (int i = 1; i < warps; i++) x = SUM ? x + space[i] : (x > space[i] ? x : space[i]);
  return x;
}

// e^(x - the row's largest) for every row of f, then of g; padding becomes 0. A block a row.
extern "C" __global__ void exponentials(const real* f, const real* g, const integer* num_frames,
                                        const integer* num_labels, real* exp_f, real* exp_g,
                                        real* top_f, real* top_g, integer B, integer max_T,
                                        integer max_U, integer K) {
  __shared__ real space[32];
  integer row = blockIdx.x;
  bool of_f = row < B * max_T;
  if (!of_f) row -= B * max_T;
  integer length = of_f ? max_T : max_U + 1, b = row / length, i = row % length;
  bool inside = of_f ? i < frames_of(num_frames, b, max_T) : i <= labels_of(num_labels, b, max_U);
  const real* x = (of_f ? f : g) + row * K;
  real* y = (of_f ? exp_f : exp_g) + row * K;
  if (!inside) {
    for (integer k = threadIdx.x; k < K; k += blockDim.x) y[k] = 0;
    return;
  }
  real top = -INFINITE;
  bool bad = false;
  for (integer k = threadIdx.x; k < K; k += blockDim.x) {
    real v = x[k];
    bad |= !(v < INFINITE);
    top = v > top ? v : top;
  }
  top = reduce<real, false>(top, space);
  if (top == -INFINITE) top = 0;
  bad = __syncthreads_or(bad);
  for (integer k = threadIdx.x; k < K; k += blockDim.x) y[k] = exponential(x[k] - top);
  if (threadIdx.x == 0) (of_f ? top_f : top_g)[row] = bad ? (real)NOT_A_NUMBER : top;
}

__device__ double direct_log_total(const real* f, const real* g, integer K) {
  double top = -INFINITE;
  for (integer k = 0; k < K; k++) {
    double v = (double)f[k] + (double)g[k];
    top = v > top ? v : top;
  }
  if (top == -INFINITE) return top;
  double total = 0;
  for (integer k = 0; k < K; k++) total += exponential((real)((double)f[k] + (double)g[k] - top));
  return top + log(total);
}

// ln of the null and of the label arrow out of every node, skewed, -inf outside the lattice.
// Where the total is too small to be trusted it is computed directly, and set to 0.
extern "C" __global__ void transitions(const real* f, const real* g, const integer* labels,
                                       const integer* num_frames, const integer* num_labels,
                                       const real* top_f, const real* top_g, real* total,
                                       real* log_null, real* log_label, int* weak_rows, integer B, integer max_T,
                                       integer max_U, integer K, integer rows, integer columns,
                                       double threshold) {
  integer i = blockIdx.x * (integer)blockDim.x + threadIdx.x;
  if (i >= B * rows * columns) return;
  integer u = i % columns, n = i / columns % rows, b = i / columns / rows, t = n - u;
  integer T = frames_of(num_frames, b, max_T), U = labels_of(num_labels, b, max_U);
  real null = -INFINITE, label = -INFINITE;
  if (t >= 0 && t < max_T && u <= max_U && !(t < T && u <= U)) total[(b * max_T + t) * (max_U + 1) + u] = 0;
  if (t >= 0 && t < T && u <= U) {
    const real *f_t = f + (b * max_T + t) * K, *g_u = g + (b * (max_U + 1) + u) * K;
    double tops = (double)top_f[b * max_T + t] + (double)top_g[b * (max_U + 1) + u];
    integer cell = (b * max_T + t) * (max_U + 1) + u;
    double log_total;
    if (total[cell] < (real)threshold) {
      total[cell] = 0;
      weak_rows[b * max_T + t] = 1;
      weak_rows[B * max_T + b * (max_U + 1) + u] = 1;
      log_total = direct_log_total(f_t, g_u, K);
      if (log_total == -INFINITE) log_total = INFINITE;  // whatever is divided by it, too
    } else {
      log_total = tops + (double)logarithm(total[cell]);
    }
    null = (real)((double)f_t[0] + (double)g_u[0] - log_total);
    if (u < U) {
      integer k = label_at(labels, b, u, max_U, K);
      label = (real)((double)f_t[k] + (double)g_u[k] - log_total);
    }
  }
  log_null[i] = null;
  log_label[i] = label;
}

__device__ __forceinline__ real arrow(real x) { return x > (real)IMPOSSIBLE ? x : (real)IMPOSSIBLE; }

// The forward variables of an item, or the backward ones, a thread for every E columns; the last of
// them. Diagonals ahead are loaded AHEAD at a time, because a step takes less time than a load.
template <bool rising>
__device__ void diagonals(const real* log_null, const real* log_label, value* result, int last, int U,
                          int columns, double* evidence) {
  __shared__ value edge[2][32];
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, u = threadIdx.x * E;
  const integer step_by = rising ? columns : -columns;
  const integer start = rising ? u : (integer)(last - 1) * columns + u;
  const real *null = log_null + start, *label = log_label + start;
  result += rising ? u : (integer)last * columns + u;
  value x[E];
#pragma unroll
  for (int e = 0; e < E; e++) {
    x[e] = new_value(u + e == (rising ? 0 : U) ? 0 : IMPOSSIBLE);  // α(1, 0) = 1, β(T+1, U) = 1
    result[e] = x[e];
  }
  real nulls[AHEAD][E], labels[AHEAD][E], next_nulls[AHEAD][E], next_labels[AHEAD][E];
#pragma unroll
  for (int i = 0; i < AHEAD; i++)
#pragma unroll
    for (int e = 0; e < E; e++) {
      next_nulls[i][e] = i < last ? null[i * step_by + e] : (real)0;
      next_labels[i][e] = i < last ? label[i * step_by + e] : (real)0;
    }
  for (int n = 0; n < last; n += AHEAD) {
    null += AHEAD * step_by;
    label += AHEAD * step_by;
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
#pragma unroll
      for (int e = 0; e < E; e++) {
        nulls[i][e] = next_nulls[i][e];
        labels[i][e] = next_labels[i][e];
        bool inside = n + AHEAD + i < last;
        next_nulls[i][e] = inside ? null[i * step_by + e] : (real)0;
        next_labels[i][e] = inside ? label[i * step_by + e] : (real)0;
      }
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      if (n + i < last) {
        // α: what leaves a column by its label enters the next; β: a column looks at the next.
        value leaving[E];
#pragma unroll
        for (int e = 0; e < E; e++) leaving[e] = rising ? add(x[e], arrow(labels[i][e])) : x[e];
        value beside = rising ? shuffle_up(leaving[E - 1]) : shuffle_down(leaving[0]);
        if (warps > 1) {
          if (lane == (rising ? 31 : 0)) edge[i % 2][warp] = leaving[rising ? E - 1 : 0];
          __syncthreads();
        }
        int other = rising ? warp - 1 : warp + 1;
        if (lane == (rising ? 0 : 31))
          beside = other >= 0 && other < warps ? edge[i % 2][other] : new_value(IMPOSSIBLE);
        result += step_by;
        value before[E];
#pragma unroll
        for (int e = 0; e < E; e++) before[e] = leaving[e];
#pragma unroll
        for (int e = 0; e < E; e++) {
          value up = rising ? (e == 0 ? beside : before[e - 1])
                            : add(e == E - 1 ? beside : before[e + 1], arrow(labels[i][e]));
          x[e] = log_add(add(x[e], arrow(nulls[i][e])), up);  // Eqs. 16, 18
          result[e] = x[e];
        }
      }
    }
  }
  if (rising)
#pragma unroll
    for (int e = 0; e < E; e++)
      if (u + e == U) *evidence = whole(x[e]);  // Eq. 17: α(T, U) ∅(T, U)
}

// ln Pr(y|x) and the forward variables (blockIdx.y 0), or the backward ones (1), of an item.
extern "C" __global__ void __launch_bounds__(THREADS)
    variables(const real* log_null, const real* log_label,
                                     const integer* num_frames, const integer* num_labels,
                                     value* log_alpha, value* log_beta, double* evidence,
                                     integer max_T, integer max_U, integer rows, integer columns) {
  integer b = blockIdx.x, at = b * rows * columns;
  int U = (int)labels_of(num_labels, b, max_U), last = (int)frames_of(num_frames, b, max_T) + U;
  if (blockIdx.y == 0)
    diagonals<true>(log_null + at, log_label + at, log_alpha + at, last, U, (int)columns, evidence + b);
  else
    diagonals<false>(log_null + at, log_label + at, log_beta + at, last, U, (int)columns, evidence + b);
}

// The loss: NaN if the lengths or labels are not such as can be. And, for each label, the next place
// that has the same one, or -1, and whether it is the first.
extern "C" __global__ void losses(const integer* labels, const integer* num_frames,
                                  const integer* num_labels, double* evidence, real* loss, int* chain,
                                  integer max_T, integer max_U, integer K, integer null) {
  integer b = blockIdx.x, T = num_frames[b], U = labels_of(num_labels, b, max_U);
  bool bad = T < 1 || T > max_T || num_labels[b] != U;
  for (integer u = threadIdx.x; u < U; u += blockDim.x) {
    integer k = labels[b * max_U + u], next = -1;
    bad |= k < 0 || k >= K || k == null;
    bool first = true;
    for (integer v = 0; v < u; v++) first &= labels[b * max_U + v] != k;
    for (integer v = U - 1; v > u; v--) next = labels[b * max_U + v] == k ? v : next;
    chain[2 * (b * max_U + u)] = (int)next;
    chain[2 * (b * max_U + u) + 1] = first;
  }
  bad = __syncthreads_or(bad);
  if (threadIdx.x == 0) {
    double x = bad ? NOT_A_NUMBER : evidence[b];
    loss[b] = (real)(x <= NEVER ? INFINITE : -x);
    evidence[b] = x <= NEVER ? INFINITE : x;  // then every occupancy is 0
  }
}

// Given y: the probability that a node is passed, over its total (0 where that is done directly) if
// there is one; and that it is left by its label, skewed.
extern "C" __global__ void flow(const value* log_alpha, const value* log_beta,
                                const real* log_label, const double* evidence,
                                const integer* num_frames, const integer* num_labels,
                                const real* total, real* passed, real* by_label, integer B,
                                integer max_T, integer max_U, integer rows, integer columns,
                                integer divide) {
  integer i = blockIdx.x * (integer)blockDim.x + threadIdx.x;
  integer width = max_U + 1;
  if (i >= B * max_T * width) return;
  integer u = i % width, t = i / width % max_T, b = i / width / max_T;
  integer T = frames_of(num_frames, b, max_T), U = labels_of(num_labels, b, max_U);
  if (t >= T || u > U) {
    passed[i] = 0;
    return;
  }
  integer node = (b * rows + t + u) * columns + u;
  real here = exponential((real)(whole(log_alpha[node]) + whole(log_beta[node]) - evidence[b]));
  if (u < U)
    by_label[node] = exponential((real)(whole(log_alpha[node]) + arrow(log_label[node]) +
                                        whole(log_beta[node + columns + 1]) - evidence[b]));
  passed[i] = !divide ? here : total[i] == 0 ? (real)0 : here / total[i];
}

// The gradients (Eqs. 21-22): products become sums of occupancy Pr(k|t,u), less what was emitted.
extern "C" __global__ void gradients(const real* f, const real* g, const real* exp_f,
                                     const real* exp_g, const integer* labels, const int* chain,
                                     const integer* num_frames, const integer* num_labels,
                                     const value* log_alpha, const value* log_beta,
                                     const double* evidence, const real* by_label, const real* weights,
                                     const int* weak_rows, const real* upstream, real* grad_f,
                                     real* grad_g, integer B, integer max_T, integer max_U, integer K,
                                     integer rows, integer columns) {
  __shared__ real space[32];
  integer row = blockIdx.x;
  bool of_f = row < B * max_T;
  if (!of_f) row -= B * max_T;
  integer length = of_f ? max_T : max_U + 1, b = row / length, i = row % length;
  integer T = frames_of(num_frames, b, max_T), U = labels_of(num_labels, b, max_U);
  real* grad = (of_f ? grad_f : grad_g) + row * K;
  const real* scale = (of_f ? exp_f : exp_g) + row * K;
  real factor = upstream[b];
  bool inside = of_f ? i < T : i <= U, possible = evidence[b] != INFINITE;
  if (!inside || !possible) {
    for (integer k = threadIdx.x; k < K; k += blockDim.x) grad[k] = 0;
    return;
  }
  for (integer k = threadIdx.x; k < K; k += blockDim.x) grad[k] *= factor * scale[k];
  // Nodes whose total was computed directly, in order.
  integer others = !weak_rows[blockIdx.x] ? 0 : of_f ? U + 1 : T;
  for (integer j = 0; j < others; j++) {
    integer t = of_f ? i : j, u = of_f ? j : i;
    if (weights[(b * max_T + t) * (max_U + 1) + u] != 0) continue;
    integer node = (b * rows + t + u) * columns + u;
    real passed = exponential((real)(whole(log_alpha[node]) + whole(log_beta[node]) - evidence[b]));
    if (!(passed > 0)) continue;
    const real *f_t = f + (b * max_T + t) * K, *g_u = g + (b * (max_U + 1) + u) * K;
    double top = -INFINITE, total = 0;
    __shared__ double wide_space[32];
    for (integer k = threadIdx.x; k < K; k += blockDim.x) {
      double v = (double)f_t[k] + (double)g_u[k];
      top = v > top ? v : top;
    }
    top = reduce<double, false>(top, wide_space);
    for (integer k = threadIdx.x; k < K; k += blockDim.x)
      total += exponential((real)((double)f_t[k] + (double)g_u[k] - top));
    total = reduce<double, true>(total, wide_space);
    double log_total = top + log(total);
    for (integer k = threadIdx.x; k < K; k += blockDim.x)
      grad[k] += factor * passed * exponential((real)((double)f_t[k] + (double)g_u[k] - log_total));
  }
  __syncthreads();
  if (of_f) {
    if (threadIdx.x == 0) grad[0] -= factor;  // one null a frame
    for (integer u = threadIdx.x; u < U; u += blockDim.x)
      if (chain[2 * (b * max_U + u) + 1]) {
        real sum = 0;
        for (integer v = u; v >= 0; v = chain[2 * (b * max_U + v)])
          sum += by_label[(b * rows + i + v) * columns + v];
        grad[label_at(labels, b, u, max_U, K)] -= factor * sum;
      }
  } else {
    real visits = 0;  // upstream times the sum over t of the occupancy: Pr(k|t,u) sums to 1 over k
    for (integer k = threadIdx.x; k < K; k += blockDim.x) visits += grad[k];
    visits = reduce<real, true>(visits, space);
    if (threadIdx.x == 0) {
      // Where null is impossible no null leaves u, and the difference is rounding alone.
      if (g[row * K] > -INFINITE) grad[0] -= visits - (i < U ? factor : (real)0);
      if (i < U) grad[label_at(labels, b, i, max_U, K)] -= factor;
    }
  }
}

// --- Any joint network ---------------------------------------------------------------------------

#if INPUT == 16
typedef unsigned short input;
__device__ __forceinline__ float widen(unsigned short x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}
__device__ __forceinline__ unsigned short narrowed(float x) {
  unsigned short y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}
#elif INPUT == 17
typedef unsigned short input;
__device__ __forceinline__ float widen(unsigned short x) { return __uint_as_float((unsigned)x << 16); }
__device__ __forceinline__ unsigned short narrowed(float x) {
  unsigned short y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}
#else
typedef real input;
__device__ __forceinline__ real widen(real x) { return x; }
__device__ __forceinline__ real narrowed(real x) { return x; }
#endif

// ln of the sum of e^logit of each node, a warp a node, and the arrows out of it, skewed.
extern "C" __global__ void joint_transitions(const input* logits, const integer* labels,
                                             const integer* num_frames, const integer* num_labels,
                                             real* log_total, real* log_null, real* log_label,
                                             integer B, integer max_T, integer max_U, integer K,
                                             integer rows, integer columns, integer null,
                                             integer fused) {
  integer i = (blockIdx.x * (integer)blockDim.x + threadIdx.x) / 32;
  int lane = threadIdx.x % 32;
  if (i >= B * rows * columns) return;
  integer u = i % columns, n = i / columns % rows, b = i / columns / rows, t = n - u;
  integer T = frames_of(num_frames, b, max_T), U = labels_of(num_labels, b, max_U);
  double to_null = -INFINITE, to_label = -INFINITE;
  if (t >= 0 && t < T && u <= U) {
    integer cell = (b * max_T + t) * (max_U + 1) + u;
    const input* x = logits + cell * K;
    real top = -INFINITE, sum = 0;
    bool bad = false;
    for (integer k = lane; k < K; k += 32) {
      real v = widen(x[k]);
      bad |= !(v < INFINITE);
      if (v > top) {
        sum *= exponential(top - v);
        top = v;
      }
      if (v > -INFINITE) sum += exponential(v - top);
    }
    real highest = top;
    for (int d = 16; d > 0; d /= 2) {
      real other = __shfl_xor_sync(0xffffffff, highest, d);
      highest = other > highest ? other : highest;
    }
    sum = top == (real)-INFINITE ? (real)0 : sum * exponential(top - highest);
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffff, sum, d);
    bad = __any_sync(0xffffffff, bad);
    double all = highest == (real)-INFINITE ? INFINITE : (double)highest + (double)logarithm(sum);
    if (!fused) all = 0;
    if (bad) all = NOT_A_NUMBER;
    if (lane == 0) {
      log_total[cell] = (real)all;
      to_null = (double)widen(x[null]) - all;
      if (u < U) to_label = (double)widen(x[label_at(labels, b, u, max_U, K)]) - all;
    }
  }
  if (lane == 0) {
    log_null[i] = (real)to_null;
    log_label[i] = (real)to_label;
  }
}

// The gradient of each node's logits, a warp a node.
extern "C" __global__ void joint_gradient(const input* logits, const real* log_total,
                                          const integer* labels, const integer* num_frames,
                                          const integer* num_labels, const real* occupancy,
                                          const real* by_label, const double* evidence,
                                          const real* upstream, input* grad, integer B, integer max_T,
                                          integer max_U, integer K, integer rows, integer columns,
                                          integer null, integer fused, double clamp) {
  integer cell = (blockIdx.x * (integer)blockDim.x + threadIdx.x) / 32;
  int lane = threadIdx.x % 32;
  if (cell >= B * max_T * (max_U + 1)) return;
  integer u = cell % (max_U + 1), t = cell / (max_U + 1) % max_T, b = cell / (max_U + 1) / max_T;
  integer T = frames_of(num_frames, b, max_T), U = labels_of(num_labels, b, max_U);
  const input* x = logits + cell * K;
  input* y = grad + cell * K;
  if (t >= T || u > U || evidence[b] == INFINITE) {
    for (integer k = lane; k < K; k += 32) y[k] = narrowed((real)0);
    return;
  }
  real passed = occupancy[cell], emitted = u < U ? by_label[(b * rows + t + u) * columns + u] : (real)0;
  real total = log_total[cell], factor = upstream[b], bound = (real)clamp;
  integer label = u < U ? label_at(labels, b, u, max_U, K) : -1;
  for (integer k = lane; k < K; k += 32) {
    real v = fused ? passed * exponential((real)widen(x[k]) - total) : (real)0;
    if (k == null && (real)widen(x[k]) > (real)-INFINITE) v -= passed - emitted;
    if (k == label) v -= emitted;
    if (bound > 0) v = v > bound ? bound : v < -bound ? -bound : v;
    y[k] = narrowed(factor * v);
  }
}
