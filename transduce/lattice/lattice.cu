// The output lattice on the GPU (Eqs. 12-22). `real` is float or double, `input` the logits' type.
// Arrays along the lattice are skewed: node (t, u) of item b is at (b * rows + t + u) * columns + u,
// with rows = T + U and columns = U + 1, rounded up to a thread's E. The compiler's options define
// IMPOSSIBLE, a large negative number in place of -inf, and NEVER, which every possible value is above.

typedef long long integer;
#define INFINITE __longlong_as_double(0x7ff0000000000000LL)
#define NOT_A_NUMBER __longlong_as_double(0x7ff8000000000000LL)

__device__ __forceinline__ double exponential(double x) { return exp(x); }
__device__ __forceinline__ float exponential(float x) { return expf(x); }
__device__ __forceinline__ double logarithm(double x) { return log(x); }
__device__ __forceinline__ float logarithm(float x) { return logf(x); }

// A value along the lattice is a sum of thousands of logarithms. Each step waits for the one before, and
// conversions to double are slow, so for float inputs a value is two floats, whose sum is exact.
#ifdef DOUBLE
typedef double value;
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
__device__ __forceinline__ value new_value(float x) { return {x, 0.0f}; }
__device__ __forceinline__ double whole(value a) { return (double)a.high + (double)a.low; }
__device__ __forceinline__ value add(value a, float b) {
  float sum = a.high + b, part = sum - a.high;  // the sum's rounding error goes to the low part
  return {sum, a.low + ((a.high - (sum - part)) + (b - part))};
}
__device__ __forceinline__ value log_add(value a, value b) {  // ln(e^a + e^b)
  float ahead = (a.high - b.high) + (a.low - b.low), z;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(z) : "f"(-fabsf(ahead) * 1.44269504f));
  // ln(1 + z) for z in [0, 1]; the polynomial in parts, which the processor evaluates side by side
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

// Replaces -inf by IMPOSSIBLE in an arrow's logarithm; NaN stays NaN.
__device__ __forceinline__ real arrow(double x) { return (real)(x < IMPOSSIBLE ? IMPOSSIBLE : x); }

// E neighbouring numbers of a diagonal.
template <typename number>
struct __align__(E * sizeof(number) > 16 ? 16 : E * sizeof(number)) several {
  number e[E];
};

// The forward or the backward variables in memory. For float inputs each is a float and the upper half
// of a second float, which holds the rounding error of the first: 33 bits in six bytes.
struct log_variables {
  real* high;
  unsigned short* low;
  __device__ __forceinline__ log_variables at(integer i) const { return {high + i, low + i}; }
  __device__ __forceinline__ void store(const value (&x)[E]) const {
    several<real> highs;
#ifdef DOUBLE
#pragma unroll
    for (int e = 0; e < E; e++) highs.e[e] = x[e];
#else
    several<unsigned short> lows;
#pragma unroll
    for (int e = 0; e < E; e++) {
      highs.e[e] = x[e].high + x[e].low;
      float rest = (x[e].high - highs.e[e]) + x[e].low;
      lows.e[e] = (unsigned short)((__float_as_uint(rest) + 0x8000) >> 16);
    }
    *(several<unsigned short>*)low = lows;
#endif
    *(several<real>*)high = highs;
  }
  __device__ __forceinline__ double operator[](integer i) const {
#ifdef DOUBLE
    return high[i];
#else
    return (double)high[i] + (double)__uint_as_float((unsigned)low[i] << 16);
#endif
  }
};

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

// Returns the sum (SUM) or the largest over a block of at most 1024 threads, in a fixed order.
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

// A row of f or of g. The B T rows of f and then the B (U + 1) rows of g are numbered as one array.
struct row_of {
  bool of_f, inside;
  integer b, i, in_its_array;
  __device__ row_of(integer row, const integer* num_frames, const integer* num_labels, integer B,
                    integer max_T, integer max_U) {
    of_f = row < B * max_T;
    in_its_array = of_f ? row : row - B * max_T;
    integer length = of_f ? max_T : max_U + 1;
    b = in_its_array / length, i = in_its_array % length;
    inside = of_f ? i < frames_of(num_frames, b, max_T) : i <= labels_of(num_labels, b, max_U);
  }
};

// W neighbouring numbers of a row.
template <int W>
struct __align__(W * sizeof(real) > 16 ? 16 : W * sizeof(real)) pack {
  real e[W];
};

template <int W>
__device__ void exponentials_of(const real* x, real* y, real* top_of_row, int K, bool known) {
  int lane = threadIdx.x % 32;
  real top = known ? *top_of_row : (real)-INFINITE;
  if (!known) {
    bool bad = false;
#pragma unroll 4
    for (int k = lane * W; k < K; k += 32 * W) {
      pack<W> v = *(const pack<W>*)(x + k);
#pragma unroll
      for (int e = 0; e < W; e++) {
        bad |= !(v.e[e] < INFINITE);
        top = v.e[e] > top ? v.e[e] : top;
      }
    }
    for (int d = 16; d > 0; d /= 2) {
      real other = __shfl_xor_sync(0xffffffff, top, d);
      top = other > top ? other : top;
    }
    if (top == (real)-INFINITE) top = 0;
    if (__any_sync(0xffffffff, bad)) top = (real)NOT_A_NUMBER;
    if (lane == 0) *top_of_row = top;
  }
#pragma unroll 4
  for (int k = lane * W; k < K; k += 32 * W) {
    pack<W> v = *(const pack<W>*)(x + k);
#pragma unroll
    for (int e = 0; e < W; e++) v.e[e] = exponential(v.e[e] - top);
    *(pack<W>*)(y + k) = v;
  }
}

// Writes e^(x - the row's largest) for every row of f and g, one warp per row, and 0 in the padding.
// Reads the largest from `tops` if `known`, else finds it; a row with NaN or +inf has top NaN.
extern "C" __global__ void exponentials(const real* f, const real* g, const integer* num_frames,
                                        const integer* num_labels, real* exp_f, real* exp_g,
                                        real* tops, int* weak_rows, integer B, integer max_T,
                                        integer max_U, integer K, integer known) {
  integer index = (blockIdx.x * (integer)blockDim.x + threadIdx.x) / 32;
  int lane = threadIdx.x % 32;
  if (index >= B * (max_T + max_U + 1)) return;
  row_of row(index, num_frames, num_labels, B, max_T, max_U);
  const real* x = (row.of_f ? f : g) + row.in_its_array * K;
  real* y = (row.of_f ? exp_f : exp_g) + row.in_its_array * K;
  if (!known && lane == 0) weak_rows[index] = 0;
  if (!row.inside)
    for (integer k = lane; k < K; k += 32) y[k] = 0;
  else if (K % 4 == 0)
    exponentials_of<4>(x, y, tops + index, (int)K, known);
  else
    exponentials_of<1>(x, y, tops + index, (int)K, known);
}

// Finds for each label of an item the next position with the same label, or -1, and whether it is the
// first with it.
__device__ void find_chain(const integer* labels, int* chain, integer U) {
  for (integer u = threadIdx.x; u < U; u += blockDim.x) {
    integer k = labels[u], next = -1;
    bool first = true;
    for (integer v = 0; v < u; v++) first &= labels[v] != k;
    for (integer v = U - 1; v > u; v--) next = labels[v] == k ? v : next;
    chain[2 * u] = (int)next;
    chain[2 * u + 1] = first;
  }
}

// The node of an item (blockIdx.y) that a thread computes.
struct node_of {
  int t, u;
  bool inside;
  integer at;  // in the skewed arrays
  __device__ node_of(integer rows, integer columns) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    u = i % (int)columns, t = i / (int)columns - u;
    inside = i < rows * columns;
    at = blockIdx.y * rows * columns + i;
  }
};

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

// Writes ln of the null and of the label arrow of every node, skewed, IMPOSSIBLE outside the lattice.
// Where the total is too small to be trusted, computes it term by term and sets it to 0. The last block
// of an item finds the chain of its labels.
extern "C" __global__ void transitions(const real* f, const real* g, const integer* labels,
                                       const integer* num_frames, const integer* num_labels,
                                       const real* tops, real* total, real* log_null,
                                       real* log_label, int* weak_rows, int* chain, integer B,
                                       integer max_T, integer max_U, integer K, integer rows,
                                       integer columns, double threshold) {
  integer b = blockIdx.y;
  integer T = frames_of(num_frames, b, max_T), U = labels_of(num_labels, b, max_U);
  if (blockIdx.x == gridDim.x - 1) {
    find_chain(labels + b * max_U, chain + 2 * b * max_U, U);
    return;
  }
  node_of node(rows, columns);
  if (!node.inside) return;
  int t = node.t, u = node.u;
  real null = (real)IMPOSSIBLE, label = (real)IMPOSSIBLE;
  if (t >= 0 && t < max_T && u <= max_U && !(t < T && u <= U))
    total[(b * max_T + t) * (max_U + 1) + u] = 0;
  if (t >= 0 && t < T && u <= U) {
    const real *f_t = f + (b * max_T + t) * K, *g_u = g + (b * (max_U + 1) + u) * K;
    integer row_f = b * max_T + t, row_g = B * max_T + b * (max_U + 1) + u;
    integer cell = (b * max_T + t) * (max_U + 1) + u;
    double log_total;
    if (total[cell] < (real)threshold) {
      total[cell] = 0;
      weak_rows[row_f] = 1;
      weak_rows[row_g] = 1;
      log_total = direct_log_total(f_t, g_u, K);
      if (log_total == -INFINITE) log_total = INFINITE;  // makes both arrows impossible
    } else {
      log_total = (double)tops[row_f] + (double)tops[row_g] + (double)logarithm(total[cell]);
    }
    null = arrow((double)f_t[0] + (double)g_u[0] - log_total);
    if (u < U) {
      integer k = label_at(labels, b, u, max_U, K);
      label = arrow((double)f_t[k] + (double)g_u[k] - log_total);
    }
  }
  log_null[node.at] = null;
  log_label[node.at] = label;
}

// Computes the forward variables (`rising`) or the backward variables of an item, one thread for every E
// columns. Returns ln Pr(y|x) to the thread of column U. Loads AHEAD diagonals in advance, because a step
// takes less time than a load.
template <bool rising>
__device__ double diagonals(const real* log_null, const real* log_label, log_variables result, int last,
                            int U, int columns) {
  __shared__ value edge[2][32];
  int lane = threadIdx.x % 32, u = threadIdx.x * E;
#if THREADS > 32
  int warp = threadIdx.x / 32, warps = blockDim.x / 32;
#endif
  const bool inside = u < columns;
  const integer step_by = rising ? columns : -columns;
  const integer start = rising ? u : (integer)(last - 1) * columns + u;
  const real *null = log_null + start, *label = log_label + start;
  result = result.at(start);
  value x[E];
  several<real> nowhere;
#pragma unroll
  for (int e = 0; e < E; e++) {
    x[e] = new_value(u + e == (rising ? 0 : U) ? 0 : IMPOSSIBLE);  // α(1, 0) = 1, β(T+1, U) = 1
    nowhere.e[e] = (real)IMPOSSIBLE;
  }
  if (rising && inside) result.store(x);
  several<real> nulls[AHEAD], labels[AHEAD], next_nulls[AHEAD], next_labels[AHEAD];
#pragma unroll
  for (int i = 0; i < AHEAD; i++) {
    next_nulls[i] = inside && i < last ? *(const several<real>*)(null + i * step_by) : nowhere;
    next_labels[i] = inside && i < last ? *(const several<real>*)(label + i * step_by) : nowhere;
  }
  auto step = [&](const several<real>& null, const several<real>& label, int parity, bool stored) {
    // α: the label arrow of a column enters the next column; β: a column reads the next column.
    value leaving[E];
#pragma unroll
    for (int e = 0; e < E; e++) leaving[e] = rising ? add(x[e], label.e[e]) : x[e];
    value beside = rising ? shuffle_up(leaving[E - 1]) : shuffle_down(leaving[0]);
#if THREADS > 32
    if (lane == (rising ? 31 : 0)) edge[parity][warp] = leaving[rising ? E - 1 : 0];
    __syncthreads();
    int other = rising ? warp - 1 : warp + 1;
    if (lane == (rising ? 0 : 31))
      beside = other >= 0 && other < warps ? edge[parity][other] : new_value(IMPOSSIBLE);
#else
    if (lane == (rising ? 0 : 31)) beside = new_value(IMPOSSIBLE);
#endif
#pragma unroll
    for (int e = 0; e < E; e++) {
      value up = rising ? (e == 0 ? beside : leaving[e == 0 ? 0 : e - 1])
                        : add(e == E - 1 ? beside : leaving[e == E - 1 ? e : e + 1], label.e[e]);
      x[e] = log_add(add(x[e], null.e[e]), up);  // Eqs. 16, 18
    }
    if (rising) result = result.at(step_by);
    if (inside && stored) result.store(x);
    if (!rising) result = result.at(step_by);
  };
  int n = 0;
  auto load = [&]() {  // shift in the AHEAD loaded diagonals and load as many after them
    null += AHEAD * step_by;
    label += AHEAD * step_by;
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      nulls[i] = next_nulls[i];
      labels[i] = next_labels[i];
      bool there = inside && n + AHEAD + i < last;
      next_nulls[i] = there ? *(const several<real>*)(null + i * step_by) : nowhere;
      next_labels[i] = there ? *(const several<real>*)(label + i * step_by) : nowhere;
    }
  };
  for (; n + AHEAD < last; n += AHEAD) {
    load();
#pragma unroll
    for (int i = 0; i < AHEAD; i++) step(nulls[i], labels[i], i % 2, true);
  }
  load();
#pragma unroll
  for (int i = 0; i < AHEAD; i++)  // no α follows the last null
    if (n + i < last) step(nulls[i], labels[i], i % 2, !rising || n + i + 1 < last);
  double log_likelihood = 0;
#pragma unroll
  for (int e = 0; e < E; e++)
    if (u + e == U) log_likelihood = whole(x[e]);  // Eq. 17: α(T, U) ∅(T, U)
  return log_likelihood;
}

// Computes the loss and the forward variables (blockIdx.y 0) or the backward variables (1) of an item.
// Loss and evidence, ln Pr(y|x), are NaN if the lengths or the labels are out of range. The evidence of
// a y that cannot be emitted is +inf, so that every occupancy is 0.
extern "C" __global__ void __launch_bounds__(THREADS)
    variables(const real* log_null, const real* log_label, const integer* labels,
              const integer* num_frames, const integer* num_labels, real* high_alpha,
              unsigned short* low_alpha, real* high_beta, unsigned short* low_beta, double* evidence,
              real* loss, integer max_T, integer max_U, integer K, integer null, integer rows,
              integer columns) {
  integer b = blockIdx.x, at = b * rows * columns;
  log_variables log_alpha = {high_alpha + at, low_alpha + at}, log_beta = {high_beta + at, low_beta + at};
  int T = (int)frames_of(num_frames, b, max_T), U = (int)labels_of(num_labels, b, max_U);
  if (blockIdx.y == 1) {
    diagonals<false>(log_null + at, log_label + at, log_beta, T + U, U, (int)columns);
    return;
  }
  bool bad = T != num_frames[b] || U != num_labels[b];
  if (labels)  // else the arrows were given
    for (integer u = threadIdx.x; u < U; u += blockDim.x) {
      integer k = labels[b * max_U + u];
      bad |= k < 0 || k >= K || k == null;
    }
  bad = __syncthreads_or(bad);
  double x = diagonals<true>(log_null + at, log_label + at, log_alpha, T + U, U, (int)columns);
  if (threadIdx.x == U / E) {
    if (bad) x = NOT_A_NUMBER;
    loss[b] = (real)(x <= NEVER ? INFINITE : -x);
    evidence[b] = x <= NEVER ? INFINITE : x;
  }
}

// The posteriors that the alignment passes a node, and that it leaves the node by its label.
struct occupancy {
  real passed, emitted;
  __device__ occupancy(log_variables log_alpha, log_variables log_beta, const real* log_label,
                       double evidence, integer node, integer columns, bool has_label) {
    double before = log_alpha[node] - evidence;
    passed = exponential((real)(before + log_beta[node]));
    emitted = 0;
    if (has_label)
      emitted = exponential((real)(before + log_label[node] + log_beta[node + columns + 1]));
  }
};

// Overwrites each null arrow with the posterior that the alignment passes its node, each label arrow with
// the posterior that it leaves by the label, and each total with the first over the total (0 where the
// total is 0: `gradients` adds those nodes term by term).
extern "C" __global__ void flow(const real* high_alpha, const unsigned short* low_alpha,
                                const real* high_beta, const unsigned short* low_beta, real* log_null,
                                real* log_label, const double* evidence, const integer* num_frames,
                                const integer* num_labels, real* total, integer max_T, integer max_U,
                                integer rows, integer columns) {
  log_variables log_alpha = {(real*)high_alpha, (unsigned short*)low_alpha};
  log_variables log_beta = {(real*)high_beta, (unsigned short*)low_beta};
  integer b = blockIdx.y;
  integer T = frames_of(num_frames, b, max_T), U = labels_of(num_labels, b, max_U);
  node_of node(rows, columns);
  if (!node.inside || node.t < 0 || node.t >= T || node.u > U) return;
  integer cell = (b * max_T + node.t) * (max_U + 1) + node.u;
  real whole_total = total[cell];
  occupancy given_y(log_alpha, log_beta, log_label, evidence[b], node.at, columns, node.u < U);
  log_null[node.at] = given_y.passed;
  log_label[node.at] = given_y.emitted;
  total[cell] = whole_total == 0 ? (real)0 : given_y.passed / whole_total;
}

// Turns the matrix products in grad_f and grad_g into the gradients (Eqs. 21-22): the sums of occupancy
// Pr(k|t,u), less the emissions. One block per row.
extern "C" __global__ void gradients(const real* f, const real* g, const real* tops,
                                     const integer* labels, const int* chain,
                                     const integer* num_frames, const integer* num_labels,
                                     const double* evidence, const real* passed, const real* emitted,
                                     const real* weights, const int* weak_rows, const real* upstream,
                                     real* grad_f, real* grad_g, integer B, integer max_T,
                                     integer max_U, integer K, integer rows, integer columns,
                                     integer upstream_step) {
  __shared__ real space[32];
  row_of row(blockIdx.x, num_frames, num_labels, B, max_T, max_U);
  bool of_f = row.of_f;
  integer b = row.b, i = row.i;
  integer T = frames_of(num_frames, b, max_T), U = labels_of(num_labels, b, max_U);
  real* grad = (of_f ? grad_f : grad_g) + row.in_its_array * K;
  const real* x = (of_f ? f : g) + row.in_its_array * K;
  real factor = upstream[b * upstream_step], top = tops[blockIdx.x];
  if (!row.inside || evidence[b] == INFINITE) {
    for (integer k = threadIdx.x; k < K; k += blockDim.x) grad[k] = 0;
    return;
  }
  if (K % 4 == 0)
    for (integer k = threadIdx.x * 4; k < K; k += blockDim.x * 4) {
      pack<4> v = *(const pack<4>*)(x + k), w = *(const pack<4>*)(grad + k);
#pragma unroll
      for (int e = 0; e < 4; e++) w.e[e] *= factor * exponential(v.e[e] - top);
      *(pack<4>*)(grad + k) = w;
    }
  else
    for (integer k = threadIdx.x; k < K; k += blockDim.x) grad[k] *= factor * exponential(x[k] - top);
  __syncthreads();
  // Add the nodes whose total was computed term by term, in a fixed order.
  integer others = !weak_rows[blockIdx.x] ? 0 : of_f ? U + 1 : T;
  for (integer j = 0; j < others; j++) {
    integer t = of_f ? i : j, u = of_f ? j : i;
    if (weights[(b * max_T + t) * (max_U + 1) + u] != 0) continue;
    real occupancy = passed[(b * rows + t + u) * columns + u];
    if (!(occupancy > 0)) continue;
    const real *f_t = f + (b * max_T + t) * K, *g_u = g + (b * (max_U + 1) + u) * K;
    double highest = -INFINITE, total = 0;
    __shared__ double wide_space[32];
    for (integer k = threadIdx.x; k < K; k += blockDim.x) {
      double v = (double)f_t[k] + (double)g_u[k];
      highest = v > highest ? v : highest;
    }
    highest = reduce<double, false>(highest, wide_space);
    for (integer k = threadIdx.x; k < K; k += blockDim.x)
      total += exponential((real)((double)f_t[k] + (double)g_u[k] - highest));
    total = reduce<double, true>(total, wide_space);
    double log_total = highest + log(total);
    for (integer k = threadIdx.x; k < K; k += blockDim.x)
      grad[k] += factor * occupancy * exponential((real)((double)f_t[k] + (double)g_u[k] - log_total));
  }
  if (others) __syncthreads();
  if (of_f) {
    if (threadIdx.x == 0) grad[0] -= factor;  // one null per frame
    for (integer u = threadIdx.x; u < U; u += blockDim.x)
      if (chain[2 * (b * max_U + u) + 1]) {
        real sum = 0;
        for (integer v = u; v >= 0; v = chain[2 * (b * max_U + v)])
          sum += emitted[(b * rows + i + v) * columns + v];
        grad[label_at(labels, b, u, max_U, K)] -= factor * sum;
      }
  } else {
    real visits = 0;  // upstream times the sum over t of the occupancy: Pr(k|t,u) sums to 1 over k
    for (integer k = threadIdx.x; k < K; k += blockDim.x) visits += grad[k];
    visits = reduce<real, true>(visits, space);
    if (threadIdx.x == 0) {
      // Where null is impossible no null leaves u, and the difference is only rounding.
      if (x[0] > (real)-INFINITE) grad[0] -= visits - (i < U ? factor : (real)0);
      if (i < U) grad[label_at(labels, b, i, max_U, K)] -= factor;
    }
  }
}

// --- Few outputs: the products of the additive density inside its kernels ------------------------

// For K <= FEW a launch costs more than a product, so one kernel takes the place of `exponentials`, the
// product and `transitions`, and one that of `flow`, `exponentials`, two products and `gradients`.
// A block has TILE warps, each with one frame, and 32 columns at a time.
#define TILE 8

// Writes e^(x - the row's largest) into shared memory, one warp per row; returns the largest.
__device__ real few_exponentials(const real* x, real* y, int K) {
  int lane = threadIdx.x % 32;
  real top = (real)-INFINITE;
  bool bad = false;
  for (int k = lane; k < K; k += 32) {
    bad |= !(x[k] < INFINITE);
    top = x[k] > top ? x[k] : top;
  }
  for (int d = 16; d > 0; d /= 2) {
    real other = __shfl_xor_sync(0xffffffff, top, d);
    top = other > top ? other : top;
  }
  if (top == (real)-INFINITE) top = 0;
  if (__any_sync(0xffffffff, bad)) top = (real)NOT_A_NUMBER;
  for (int k = lane; k < K; k += 32) y[k] = exponential(x[k] - top);
  return top;
}

// Writes what `exponentials` and `transitions` write, but for flags and chains. The blocks of an item
// (blockIdx.y) begin at frame 1 - columns, so that every node of the skewed arrays is written.
extern "C" __global__ void __launch_bounds__(32 * TILE)
    few_transitions(const real* f, const real* g, const integer* labels, const integer* num_frames,
                    const integer* num_labels, real* tops, real* total, real* log_null, real* log_label,
                    integer B, integer max_T, integer max_U, integer K, integer rows, integer columns,
                    double threshold) {
  __shared__ real exp_f[TILE][FEW + 1], exp_g[32][FEW + 1], tops_g[32];  // odd rows: no bank conflicts
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, outputs = (int)K;
  integer b = blockIdx.y;
  int T = (int)frames_of(num_frames, b, max_T), U = (int)labels_of(num_labels, b, max_U);
  int first = (int)(blockIdx.x * TILE) - (int)columns + 1, t = first + warp;
  bool some = first + TILE > 0 && first < T, frame = t >= 0 && t < T;
  integer row_f = b * max_T + t;
  const real* f_t = f + row_f * K;
  real top_f = 0;
  if (frame) {
    top_f = few_exponentials(f_t, exp_f[warp], outputs);
    if (lane == 0) tops[row_f] = top_f;
  }
  for (int first_u = 0; first_u < columns; first_u += 32) {
    int u = first_u + lane;
    if (some) {
      __syncthreads();
      for (int i = warp; i < 32 && first_u + i <= U; i += TILE) {
        integer row_g = b * (max_U + 1) + first_u + i;
        real top = few_exponentials(g + row_g * K, exp_g[i], outputs);
        if (lane == 0) tops_g[i] = top;
        if (lane == 0 && first <= 0) tops[B * max_T + row_g] = top;
      }
      __syncthreads();
    }
    real null = (real)IMPOSSIBLE, label = (real)IMPOSSIBLE;
    if (frame && u <= U) {
      const real* g_u = g + (b * (max_U + 1) + u) * K;
      real sum = 0;
#pragma unroll 8
      for (int k = 0; k < outputs; k++) sum += exp_f[warp][k] * exp_g[lane][k];  // Eq. 13's denominator
      double log_total;
      if (sum < (real)threshold) {
        sum = 0;
        log_total = direct_log_total(f_t, g_u, K);
        if (log_total == -INFINITE) log_total = INFINITE;  // makes both arrows impossible
      } else {
        log_total = (double)top_f + (double)tops_g[lane] + (double)logarithm(sum);
      }
      total[row_f * (max_U + 1) + u] = sum;
      null = arrow((double)f_t[0] + (double)g_u[0] - log_total);
      if (u < U) {
        integer k = label_at(labels, b, u, max_U, K);
        label = arrow((double)f_t[k] + (double)g_u[k] - log_total);
      }
    }
    if (u < columns && t + u >= 0 && t + u < rows) {
      integer at = (b * rows + t + u) * columns + u;
      log_null[at] = null;
      log_label[at] = label;
    }
  }
}

// A node as the gradients need it. The share of output k in the occupancy is weight e^(f_k + g_k - tops);
// where the total was not trusted it is passed e^(f_k + g_k - log_total), and the weight is 0.
struct few_node {
  real weight, passed, emitted;
  bool weak;
  double log_total;
};

struct few_nodes {
  const real *f, *g, *total, *log_label;
  log_variables log_alpha, log_beta;
  double evidence;
  integer b, max_T, max_U, K, rows, columns;
  int T, U;
  __device__ few_node at(int t, int u) const {
    few_node found = {0, 0, 0, false, 0};
    if (t >= T || u > U) return found;
    integer node = (b * rows + t + u) * columns + u, cell = (b * max_T + t) * (max_U + 1) + u;
    occupancy given_y(log_alpha, log_beta, log_label, evidence, node, columns, u < U);
    real all = total[cell];
    found.passed = given_y.passed;
    found.emitted = given_y.emitted;
    found.weight = all == 0 ? (real)0 : given_y.passed / all;
    found.weak = all == 0 && given_y.passed > 0;
    if (found.weak)
      found.log_total = direct_log_total(f + (b * max_T + t) * K, g + (b * (max_U + 1) + u) * K, K);
    return found;
  }
};

// The sums over the nodes of a row of their shares in the outputs lane and lane + 32.
struct few_sums {
  real strong[(FEW + 31) / 32], weak[(FEW + 31) / 32];
};

// Writes the gradients (Eqs. 21-22) from α and β. The first blocks of an item (blockIdx.y) have a frame
// per warp, the others have a row of g each.
extern "C" __global__ void __launch_bounds__(32 * TILE)
    few_gradients(const real* f, const real* g, const real* tops, const integer* labels,
                  const integer* num_frames, const integer* num_labels, const double* evidence,
                  const real* log_label, const real* high_alpha, const unsigned short* low_alpha,
                  const real* high_beta, const unsigned short* low_beta, const real* total,
                  const real* upstream, real* grad_f, real* grad_g, integer B, integer max_T,
                  integer max_U, integer K, integer rows, integer columns, integer upstream_step) {
  constexpr int PARTS = (FEW + 31) / 32;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, outputs = (int)K;
  integer b = blockIdx.y;
  int T = (int)frames_of(num_frames, b, max_T), U = (int)labels_of(num_labels, b, max_U);
  int blocks_of_f = (int)((max_T + TILE - 1) / TILE);
  const real factor = upstream[b * upstream_step];
  bool possible = evidence[b] != INFINITE;
  few_nodes nodes = {f, g, total, log_label,
                     {(real*)high_alpha, (unsigned short*)low_alpha},
                     {(real*)high_beta, (unsigned short*)low_beta},
                     evidence[b], b, max_T, max_U, K, rows, columns, T, U};
  const real *of_f = f + b * max_T * K, *of_g = g + b * (max_U + 1) * K;
  const real *tops_f = tops + b * max_T, *tops_g = tops + B * max_T + b * (max_U + 1);
  few_sums sums = {};
  if ((int)blockIdx.x < blocks_of_f) {
    __shared__ real exp_g[32][FEW + 1];
    __shared__ int label[32];
    int first = blockIdx.x * TILE, t = first + warp;
    real emitted[PARTS] = {};
    bool inside = possible && t < T;
    for (int first_u = 0; possible && first < T && first_u <= U; first_u += 32) {
      __syncthreads();
      for (int i = warp; i < 32 && first_u + i <= U; i += TILE)
        for (int k = lane; k < outputs; k += 32)
          exp_g[i][k] = exponential(of_g[(first_u + i) * K + k] - tops_g[first_u + i]);
      if (warp == 0)
        label[lane] = first_u + lane < U ? (int)label_at(labels, b, first_u + lane, max_U, K) : -1;
      __syncthreads();
      few_node mine = {0, 0, 0, false, 0};
      if (inside) mine = nodes.at(t, first_u + lane);
      for (int i = 0; i < 32 && first_u + i <= U; i++) {
        real weight = __shfl_sync(0xffffffff, mine.weight, i);
        real leaving = __shfl_sync(0xffffffff, mine.emitted, i);
#pragma unroll
        for (int j = 0; j < PARTS; j++) {
          int k = lane + 32 * j;
          if (k < outputs) sums.strong[j] += weight * exp_g[i][k];
          emitted[j] += label[i] == k ? leaving : (real)0;
        }
      }
      unsigned weak = __ballot_sync(0xffffffff, mine.weak);
      for (; weak; weak &= weak - 1) {
        int i = __ffs(weak) - 1;
        real passed = __shfl_sync(0xffffffff, mine.passed, i);
        double log_total = __shfl_sync(0xffffffff, mine.log_total, i);
#pragma unroll
        for (int j = 0; j < PARTS; j++) {
          int k = lane + 32 * j;
          if (k < outputs)
            sums.weak[j] += passed * exponential((real)((double)of_f[t * K + k] +
                                                        (double)of_g[(first_u + i) * K + k] - log_total));
        }
      }
    }
    if (t >= max_T) return;
#pragma unroll
    for (int j = 0; j < PARTS; j++) {
      int k = lane + 32 * j;
      if (k >= outputs) continue;
      real grad = 0;
      if (inside) {
        grad = sums.strong[j] * (factor * exponential(of_f[t * K + k] - tops_f[t]));
        grad += factor * sums.weak[j];
        if (k == 0) grad -= factor;  // one null per frame
        grad -= factor * emitted[j];
      }
      grad_f[(b * max_T + t) * K + k] = grad;
    }
    return;
  }
  __shared__ few_sums all[TILE][32];
  int u = blockIdx.x - blocks_of_f;
  bool inside = possible && u <= U;
  for (int first = 32 * warp; inside && first < T; first += 32 * TILE) {
    few_node mine = nodes.at(first + lane, u);
    real top = first + lane < T ? tops_f[first + lane] : (real)0;
    for (int i = 0; i < 32 && first + i < T; i++) {
      real weight = __shfl_sync(0xffffffff, mine.weight, i), top_f = __shfl_sync(0xffffffff, top, i);
#pragma unroll
      for (int j = 0; j < PARTS; j++) {
        int k = lane + 32 * j;
        if (k < outputs) sums.strong[j] += weight * exponential(of_f[(first + i) * K + k] - top_f);
      }
    }
    unsigned weak = __ballot_sync(0xffffffff, mine.weak);
    for (; weak; weak &= weak - 1) {
      int i = __ffs(weak) - 1;
      real passed = __shfl_sync(0xffffffff, mine.passed, i);
      double log_total = __shfl_sync(0xffffffff, mine.log_total, i);
#pragma unroll
      for (int j = 0; j < PARTS; j++) {
        int k = lane + 32 * j;
        if (k < outputs)
          sums.weak[j] += passed * exponential((real)((double)of_f[(first + i) * K + k] +
                                                      (double)of_g[u * K + k] - log_total));
      }
    }
  }
  all[warp][lane] = sums;
  __syncthreads();
  if (warp > 0) return;
  real grad[PARTS] = {}, visits = 0;  // upstream times the sum over t of the occupancy
#pragma unroll
  for (int j = 0; j < PARTS; j++) {
    int k = lane + 32 * j;
    if (k >= outputs || !inside) continue;
    real strong = 0, weak = 0;
    for (int i = 0; i < TILE; i++) strong += all[i][lane].strong[j], weak += all[i][lane].weak[j];
    grad[j] = strong * (factor * exponential(of_g[u * K + k] - tops_g[u])) + factor * weak;
    visits += grad[j];
  }
  for (int d = 16; d > 0; d /= 2) visits += __shfl_xor_sync(0xffffffff, visits, d);
  int label = inside && u < U ? (int)label_at(labels, b, u, max_U, K) : -1;
#pragma unroll
  for (int j = 0; j < PARTS; j++) {
    int k = lane + 32 * j;
    if (k >= outputs) continue;
    // Where null is impossible no null leaves u, and the difference is only rounding.
    if (inside && k == 0 && of_g[u * K] > (real)-INFINITE) grad[j] -= visits - (u < U ? factor : (real)0);
    if (k == label) grad[j] -= factor;
    grad_g[(b * (max_U + 1) + u) * K + k] = grad[j];
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
  unsigned bits = __float_as_uint(x);  // round to nearest, ties to even
  return x == x ? (unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16) : (unsigned short)0x7fc0;
}
#else
typedef real input;
__device__ __forceinline__ real widen(real x) { return x; }
__device__ __forceinline__ real narrowed(real x) { return x; }
#endif

// Writes ln of the sum of e^logit of each node and, skewed, its arrows; one warp per node.
extern "C" __global__ void joint_transitions(const input* logits, const integer* labels,
                                             const integer* num_frames, const integer* num_labels,
                                             real* log_total, real* log_null, real* log_label,
                                             integer max_T, integer max_U, integer K, integer rows,
                                             integer columns, integer null, integer fused) {
  int i = (int)((blockIdx.x * (integer)blockDim.x + threadIdx.x) / 32), lane = threadIdx.x % 32;
  integer b = blockIdx.y;
  if (i >= rows * columns) return;
  int u = i % (int)columns, t = i / (int)columns - u;
  integer T = frames_of(num_frames, b, max_T), U = labels_of(num_labels, b, max_U);
  double to_null = IMPOSSIBLE, to_label = IMPOSSIBLE;
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
    log_null[b * rows * columns + i] = arrow(to_null);
    log_label[b * rows * columns + i] = arrow(to_label);
  }
}

// Writes the gradient of each node's logits; one warp per node.
extern "C" __global__ void joint_gradient(const input* logits, const real* log_total,
                                          const integer* labels, const integer* num_frames,
                                          const integer* num_labels, const real* high_alpha,
                                          const unsigned short* low_alpha, const real* high_beta,
                                          const unsigned short* low_beta, const real* log_label,
                                          const double* evidence, const real* upstream, input* grad,
                                          integer max_T, integer max_U, integer K, integer rows,
                                          integer columns, integer null, integer fused, double clamp,
                                          integer upstream_step) {
  int i = (int)((blockIdx.x * (integer)blockDim.x + threadIdx.x) / 32), lane = threadIdx.x % 32;
  integer b = blockIdx.y, cell = b * max_T * (max_U + 1) + i;
  if (i >= max_T * (max_U + 1)) return;
  int u = i % (int)(max_U + 1), t = i / (int)(max_U + 1);
  integer T = frames_of(num_frames, b, max_T), U = labels_of(num_labels, b, max_U);
  const input* x = logits + cell * K;
  input* y = grad + cell * K;
  if (t >= T || u > U || evidence[b] == INFINITE) {
    for (integer k = lane; k < K; k += 32) y[k] = narrowed((real)0);
    return;
  }
  integer node = (b * rows + t + u) * columns + u, label = u < U ? label_at(labels, b, u, max_U, K) : -1;
  real total = log_total[cell], factor = upstream[b * upstream_step], bound = (real)clamp;
  log_variables log_alpha = {(real*)high_alpha, (unsigned short*)low_alpha};
  log_variables log_beta = {(real*)high_beta, (unsigned short*)low_beta};
  occupancy given_y(log_alpha, log_beta, log_label, evidence[b], node, columns, u < U);
  real by_label = given_y.emitted, by_null = given_y.passed - by_label;
  for (integer k = lane; k < K; k += 32) {
    real v = fused ? given_y.passed * exponential((real)widen(x[k]) - total) : (real)0;
    if (k == null && (real)widen(x[k]) > (real)-INFINITE) v -= by_null;
    if (k == label) v -= by_label;
    if (bound > 0) v = v > bound ? bound : v < -bound ? -bound : v;
    y[k] = narrowed(factor * v);
  }
}

// --- Given arrows --------------------------------------------------------------------------------

// Copies the arrows [T, U+1] and [T, U] of an item (blockIdx.y) into skewed arrays; +inf becomes NaN.
extern "C" __global__ void skew_arrows(const real* null_arrows, const real* label_arrows,
                                       const integer* num_frames, const integer* num_labels,
                                       real* log_null, real* log_label, integer max_T, integer max_U,
                                       integer rows, integer columns) {
  integer b = blockIdx.y;
  integer T = frames_of(num_frames, b, max_T), U = labels_of(num_labels, b, max_U);
  node_of node(rows, columns);
  if (!node.inside) return;
  double to_null = IMPOSSIBLE, to_label = IMPOSSIBLE;
  if (node.t >= 0 && node.t < T && node.u <= U) {
    to_null = null_arrows[(b * max_T + node.t) * (max_U + 1) + node.u];
    if (node.u < U) to_label = label_arrows[(b * max_T + node.t) * max_U + node.u];
  }
  log_null[node.at] = arrow(to_null < INFINITE ? to_null : NOT_A_NUMBER);
  log_label[node.at] = arrow(to_label < INFINITE ? to_label : NOT_A_NUMBER);
}

// Writes the posteriors that the alignment takes each arrow of an item (blockIdx.y), and 0 in the
// padding.
extern "C" __global__ void occupancies(const real* high_alpha, const unsigned short* low_alpha,
                                       const real* high_beta, const unsigned short* low_beta,
                                       const real* log_null, const real* log_label,
                                       const double* evidence, const integer* num_frames,
                                       const integer* num_labels, real* by_null, real* by_label,
                                       integer max_T, integer max_U, integer rows, integer columns) {
  log_variables log_alpha = {(real*)high_alpha, (unsigned short*)low_alpha};
  log_variables log_beta = {(real*)high_beta, (unsigned short*)low_beta};
  integer b = blockIdx.y, i = blockIdx.x * (integer)blockDim.x + threadIdx.x;
  if (i >= max_T * (max_U + 1)) return;
  integer t = i / (max_U + 1), u = i % (max_U + 1);
  integer T = frames_of(num_frames, b, max_T), U = labels_of(num_labels, b, max_U);
  real null = 0, label = 0;
  if (t < T && u <= U && evidence[b] != INFINITE) {
    integer node = (b * rows + t + u) * columns + u;
    double before = log_alpha[node] - evidence[b];
    if (t + 1 < T)
      null = exponential((real)(before + log_null[node] + log_beta[node + columns]));
    else if (u == U)  // the last null ends the alignment: β(T+1, U) = 1
      null = exponential((real)(before + log_null[node]));
    if (u < U) label = exponential((real)(before + log_label[node] + log_beta[node + columns + 1]));
  }
  by_null[b * max_T * (max_U + 1) + i] = null;
  if (u < max_U) by_label[(b * max_T + t) * max_U + u] = label;
}
