// Both searches and the timings, a block for each utterance: it goes through all frames by itself, so
// that the host waits once for a whole batch. With TOGETHER all blocks share the beam search of one
// utterance.
//
// Compiled for K1 outputs of type F and a prediction network of LAYERS layers of H units, which is
// stepped to TILE prefixes at once, and for blocks of THREADS threads. `transcriptions` are the
// addresses of each utterance's f; the host's other tensors have a row for each utterance.
// Probabilities are logarithms in float64.

typedef long long integer;
typedef unsigned long long bits;
#define WHOLE 0xffffffff
#define LANES 32
#define BINS_PER_NAT 8  // of the histogram of A
#define NONE (-__longlong_as_double(0x7ff0000000000000LL))
#define LEAST (-1.7976931348623157e308)

enum { DONE, FULL };  // how a search ended: FULL if an array was too short

#ifndef pause_block
#define pause_block() __nanosleep(20)
#endif

__device__ __forceinline__ int lane() { return threadIdx.x % LANES; }
__device__ __forceinline__ int warp() { return threadIdx.x / LANES; }
__device__ __forceinline__ int warps() { return blockDim.x / LANES; }

// Numbers whose order as integers is that of the doubles.
__device__ __forceinline__ bits ordered(double x) {
  bits b = (bits)__double_as_longlong(x);
  return b >> 63 ? ~b : b | 1ULL << 63;
}

__device__ __forceinline__ double unordered(bits b) {
  return __longlong_as_double((integer)(b >> 63 ? b & ~(1ULL << 63) : ~b));
}

__device__ double log_sum(double a, double b) {
  double top = fmax(a, b);
  return top == NONE ? NONE : top + log1p(exp(fmin(a, b) - top));
}

// Returns ln Σ exp(f + g), the denominator of Eq. 13, to all lanes of a warp.
template <class Number>
__device__ double log_norm(const Number *f, const float *g) {
  double top = NONE, sum = 0;
  for (int k = lane(); k < K1; k += LANES) top = fmax(top, (double)f[k] + g[k]);
  for (int n = LANES / 2; n > 0; n /= 2) top = fmax(top, __shfl_xor_sync(WHOLE, top, n));
  if (top == NONE) return NONE;
  for (int k = lane(); k < K1; k += LANES) sum += exp((double)f[k] + g[k] - top);
  for (int n = LANES / 2; n > 0; n /= 2) sum += __shfl_xor_sync(WHOLE, sum, n);
  return top + log(sum);
}

__device__ __forceinline__ double log_pr(double f, float g, double norm) {  // Eq. 13
  return norm == NONE ? NONE : f + g - norm;
}

__device__ __forceinline__ float sigmoid(float x) { return 1 / (1 + expf(-x)); }

// The weights of the prediction network, one layer after the other.
struct Weights {
  const float *labels;     // [K+1, 4H], the part of each label in the first layer's sums
  const float *inputs;     // [LAYERS - 1, H, 4H], of the upper layers, transposed
  const float *hidden;     // [LAYERS, H, 4H], transposed
  const float *peepholes;  // [LAYERS, 3, H]
  const float *biases;     // [LAYERS, 4H]
  const float *output;     // [K+1, H]
  const float *output_bias;
};

// Shared memory of a step.
struct Step {
  float h[TILE][(H + 3) / 4 * 4];  // inputs of a product
  float sums[TILE][4 * H];         // of the gates
};

// Adds the products of N rows of `step.h` and transposed weights [H, 4H] to their sums.
template <int N>
__device__ void multiply(const float *weights, Step &step) {
  for (int column = threadIdx.x; column < 4 * H; column += blockDim.x) {
    float sum[N];
    for (int n = 0; n < N; n++) sum[n] = step.sums[n][column];
    int i = 0;
#pragma unroll 4
    for (; i + 4 <= H; i += 4) {
      float w[4];
#pragma unroll
      for (int j = 0; j < 4; j++) w[j] = weights[(i + j) * 4 * H + column];
#pragma unroll
      for (int n = 0; n < N; n++) {
        float4 h = *(const float4 *)&step.h[n][i];
        sum[n] += w[0] * h.x;
        sum[n] += w[1] * h.y;
        sum[n] += w[2] * h.z;
        sum[n] += w[3] * h.w;
      }
    }
    for (; i < H; i++)
      for (int n = 0; n < N; n++) sum[n] += weights[i * 4 * H + column] * step.h[n][i];
    for (int n = 0; n < N; n++) step.sums[n][column] = sum[n];
  }
}

__device__ void multiply(int count, const float *weights, Step &step) {
  if (count == 1) multiply<1>(weights, step);
  else if (count == 2) multiply<2>(weights, step);
  else if (count <= 4) multiply<4>(weights, step);
  else multiply<TILE>(weights, step);
}

// Steps the prediction network to `count` <= TILE prefixes (Eqs. 3-8). parent, label and place return
// the row of the n-th prefix's parent, its label and its own row, of h and s [LAYERS, H] and g [K+1].
template <class Parent, class Label, class Place>
__device__ void step_prefixes(int count, Parent parent, Label label, Place place, const Weights &w,
                              Step &step, float *h, float *s, float *g, int *bad) {
  for (int layer = 0; layer < LAYERS; layer++) {
    __syncthreads();
    for (int at = threadIdx.x; at < count * 4 * H; at += blockDim.x) {
      int n = at / (4 * H), column = at % (4 * H);
      float sum = w.biases[layer * 4 * H + column];
      if (layer == 0) sum += w.labels[(integer)label(n) * 4 * H + column];
      step.sums[n][column] = sum;
    }
    if (layer > 0) {  // step.h has the outputs of the layer below
      __syncthreads();
      multiply(count, w.inputs + (integer)(layer - 1) * H * 4 * H, step);
      __syncthreads();
    }
    for (int at = threadIdx.x; at < count * H; at += blockDim.x)
      step.h[at / H][at % H] = h[((integer)parent(at / H) * LAYERS + layer) * H + at % H];
    __syncthreads();
    multiply(count, w.hidden + (integer)layer * H * 4 * H, step);
    __syncthreads();
    const float *peephole = w.peepholes + layer * 3 * H;
    for (int at = threadIdx.x; at < count * H; at += blockDim.x) {
      int n = at / H, j = at % H;
      const float *sum = step.sums[n];
      float before = s[((integer)parent(n) * LAYERS + layer) * H + j];
      float input_gate = sigmoid(sum[j] + peephole[j] * before);                      // Eq. 4
      float forget_gate = sigmoid(sum[H + j] + peephole[H + j] * before);             // Eq. 5
      float state = forget_gate * before + input_gate * tanhf(sum[2 * H + j]);        // Eq. 6
      float output_gate = sigmoid(sum[3 * H + j] + peephole[2 * H + j] * state);      // Eq. 7
      integer row = ((integer)place(n) * LAYERS + layer) * H + j;
      s[row] = state;
      h[row] = step.h[n][j] = output_gate * tanhf(state);  // Eq. 8
    }
  }
  __syncthreads();
  for (int at = warp(); at < count * K1; at += warps()) {
    int n = at / K1, k = at % K1;
    float sum = 0;
    for (int j = lane(); j < H; j += LANES) sum += w.output[k * H + j] * step.h[n][j];
    for (int m = LANES / 2; m > 0; m /= 2) sum += __shfl_xor_sync(WHOLE, sum, m);
    if (lane() == 0) {
      g[(integer)place(n) * K1 + k] = sum += w.output_bias[k];  // Eq. 3
      if (!(sum < __int_as_float(0x7f800000))) *bad = 1;  // NaN or +inf
    }
  }
  __syncthreads();
}

#if !TOGETHER

// --- The greedy search ---------------------------------------------------------------------------

struct Path {  // shared memory
  Step step;
  float g[K1], h[LAYERS * H], s[LAYERS * H];
  double log_best[LANES], log_null[LANES];
  int best[LANES], bad;
};

static_assert(sizeof(Path) <= PATH_BYTES, "the host asks for too little shared memory");

// Takes the most probable output at every node. Each warp looks at a frame; up to the first at which
// a label is emitted, all have the same g.
extern "C" __global__ void greedy(const integer *transcriptions, const integer *num_vectors,
                                  integer most, const float *labels_in, const float *inputs,
                                  const float *hidden, const float *peepholes, const float *biases,
                                  const float *output, const float *output_bias, integer room,
                                  int *all_labels, int *all_frames, double *log_probs,
                                  integer *counts) {
  extern __shared__ __align__(16) double shared[];
  Path &path = *(Path *)shared;
  Weights weights = {labels_in, inputs, hidden, peepholes, biases, output, output_bias};
  integer b = blockIdx.x;
  const F *f = (const F *)transcriptions[b];
  int *labels = all_labels + b * room, *frames = all_frames + b * room;
  int length = (int)num_vectors[b], num_labels = 0, num_bounded = 0, emitted = 0, t = 0;
  // The most probable way to leave the frame so far: its ln Pr, and the labels before it.
  double log_prob = 0, leaving = 0;
  int kept = 0;
  for (int at = threadIdx.x; at < LAYERS * H; at += blockDim.x) path.h[at] = path.s[at] = 0;
  if (threadIdx.x == 0) path.bad = 0;
  int last = 0;  // label
  auto zero = [](int) { return 0; };
  auto label = [&](int) { return last; };
  step_prefixes(1, zero, label, zero, weights, path.step, path.h, path.s, path.g, &path.bad);
  while (t < length) {
    int ahead = min(warps(), length - t);
    if (warp() < ahead) {
      const F *here = f + (integer)(t + warp()) * K1;
      double top = NONE, sum = 0;
      int best = K1;
      for (int k = lane(); k < K1; k += LANES) {
        double x = (double)here[k] + path.g[k];
        if (x > top || best == K1) top = x, best = k;
      }
      for (int n = LANES / 2; n > 0; n /= 2) {
        double other = __shfl_xor_sync(WHOLE, top, n);
        int its = __shfl_xor_sync(WHOLE, best, n);
        if (other > top || (other == top && its < best)) top = other, best = its;
      }
      for (int k = lane(); k < K1; k += LANES) sum += exp((double)here[k] + path.g[k] - top);
      for (int n = LANES / 2; n > 0; n /= 2) sum += __shfl_xor_sync(WHOLE, sum, n);
      if (lane() == 0) {
        path.best[warp()] = best;
        path.log_best[warp()] = top == NONE ? NONE : -log(sum);
        path.log_null[warp()] = top == NONE ? NONE : (double)here[0] + path.g[0] - top - log(sum);
      }
    }
    __syncthreads();
    last = 0;
    bool bounded = false;
    for (int i = 0; i < ahead && last == 0 && !bounded; i++) {
      int k = path.best[i];
      if (emitted == 0 || log_prob + path.log_null[i] > leaving)
        leaving = log_prob + path.log_null[i], kept = num_labels;
      if (k > 0 && emitted == most) {
        bounded = true;
        k = 0;
      } else {
        log_prob += path.log_best[i];
      }
      if (k == 0) {
        t++;
        emitted = 0;
      } else {
        last = k;
        emitted++;
      }
    }
    if (bounded) {  // Departure: leave the frame in the most probable way on the path
      num_bounded++;
      log_prob = leaving;
      num_labels = kept;
      __syncthreads();  // the labels are written
      for (int at = threadIdx.x; at < LAYERS * H; at += blockDim.x) path.h[at] = path.s[at] = 0;
      for (int u = -1; u < num_labels; u++) {  // all are stepped again, because this is rare
        last = u < 0 ? 0 : labels[u];
        step_prefixes(1, zero, label, zero, weights, path.step, path.h, path.s, path.g, &path.bad);
      }
    } else if (last > 0) {
      if (num_labels == room) break;
      if (threadIdx.x == 0) labels[num_labels] = last, frames[num_labels] = t;
      num_labels++;
      step_prefixes(1, zero, label, zero, weights, path.step, path.h, path.s, path.g, &path.bad);
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    log_probs[b] = log_prob;
    counts[4 * b] = num_labels;
    counts[4 * b + 1] = num_bounded;
    counts[4 * b + 2] = path.bad;
    counts[4 * b + 3] = t < length ? FULL : DONE;
  }
}

#endif

// --- The beam search -----------------------------------------------------------------------------

struct Node {  // a prefix
  int parent, label, depth;
  int frame;    // the last frame at whose beginning it was in A
  int row;      // its place in A then
  int emitted;  // its labels from the frame in which it is expanded
};

struct Found {  // of an utterance
  integer num_hypotheses, num_bounded, num_expanded, num_prefixes, bad, status;
};

struct Search {  // in shared memory, or in global memory with TOGETHER; arrays of the beam follow
  double f[K1];
  bits bounded, least, best;  // ordered
  unsigned arrived;  // of the blocks, at all meetings
  int shortest, num_open, num_left, num_batch, num_beam, size, bad, cut, full;
  int bins[BINS];
};

static_assert(sizeof(Search) <= SEARCH_BYTES, "the host asks for too little memory");

// The threads that search an utterance.
struct Team {
#if TOGETHER
  unsigned *arrived, meetings;
  __device__ int block() { return blockIdx.x; }
  __device__ int blocks() { return gridDim.x; }
  __device__ void meet() {  // all that was written before is read after
    __syncthreads();
    meetings++;
    if (threadIdx.x == 0) {
      __threadfence();
      atomicAdd(arrived, 1u);
      while (*(volatile unsigned *)arrived < meetings * gridDim.x) pause_block();
      __threadfence();
    }
    __syncthreads();
  }
#else
  __device__ int block() { return 0; }
  __device__ int blocks() { return 1; }
  __device__ void meet() { __syncthreads(); }
#endif
  __device__ int me() { return block() * blockDim.x + threadIdx.x; }
  __device__ int all() { return blocks() * blockDim.x; }
  __device__ int warp() { return me() / LANES; }
  __device__ int warps() { return all() / LANES; }
};

__device__ bool is_before(const Node *nodes, int a, int b) {  // in the order of the labels
  int shorter = nodes[a].depth < nodes[b].depth ? 1 : nodes[a].depth > nodes[b].depth ? -1 : 0;
  while (nodes[a].depth > nodes[b].depth) a = nodes[a].parent;
  while (nodes[b].depth > nodes[a].depth) b = nodes[b].parent;
  if (a == b) return shorter > 0;
  while (nodes[a].parent != nodes[b].parent) a = nodes[a].parent, b = nodes[b].parent;
  return nodes[a].label < nodes[b].label;
}

// Returns the place in the histogram of a hypothesis so many nats below the best.
__device__ __forceinline__ int bin_of(double below) {
  return (int)fmax(0.0, fmin(below * BINS_PER_NAT, BINS - 1.0));
}

// Keeps the hypotheses of B that are at least as probable as `worst`; their number is in `search`.
__device__ void keep_best(Team &team, Search &search, double worst, int num_beam,
                          double *beam_log_prob, int *beam_node) {
  for (int first = 0, left = 0; first < num_beam; first += team.all()) {
    int i = first + team.me();
    double log_prob = i < num_beam ? beam_log_prob[i] : NONE;
    int node = i < num_beam ? beam_node[i] : 0;
    if (team.me() == 0) search.num_beam = left;
    team.meet();
    if (i < num_beam && log_prob >= worst) {
      int to = atomicAdd(&search.num_beam, 1);
      beam_log_prob[to] = log_prob;
      beam_node[to] = node;
    }
    team.meet();
    left = search.num_beam;
    team.meet();
  }
}

// Removes the prefixes that no hypothesis of the beam has, and returns how many are left. `kept` and
// `place` have room for all rows; place[i] becomes the new row of row i. `staged` has room for STAGED
// rows, each of ROW numbers.
#define ROW (2 * K1 + 2 * LAYERS * H)
__device__ int remove_prefixes(Team &team, int size, const int *beam, int num_beam, Node *nodes,
                               int *child, float *g, float *h, float *s, int *kept, int *place,
                               int *staged) {
  for (int i = team.me(); i < size; i += team.all()) nodes[i].row = i == 0;
  team.meet();
  for (int i = team.me(); i < num_beam; i += team.all())
    for (int node = beam[i]; !*(volatile int *)&nodes[node].row; node = nodes[node].parent)
      *(volatile int *)&nodes[node].row = 1;
  team.meet();
  if (team.warp() == 0) {
    int count = 0;
    for (int first = 0; first < size; first += LANES) {
      int i = first + lane();
      bool is_kept = i < size && nodes[i].row;
      unsigned those = __ballot_sync(WHOLE, is_kept);
      int at = count + __popc(those & ((1u << lane()) - 1));
      if (i < size) place[i] = is_kept ? at : -1;
      if (is_kept) kept[at] = i;
      count += __popc(those);
    }
    if (lane() == 0) nodes[0].row = count;
  }
  team.meet();
  int count = nodes[0].row;
  // A row moves down, to the place of one that has moved already.
  int *parts[] = {child, (int *)g, (int *)h, (int *)s};
  const int widths[] = {K1, K1, LAYERS * H, LAYERS * H};
  for (int first = 0; first < count; first += STAGED) {
    int rows = min(STAGED, count - first);
    for (int part = 0, column = 0; part < 4; column += widths[part++])
      for (int at = team.me(); at < rows * widths[part]; at += team.all()) {
        int n = at / widths[part], k = at % widths[part];
        int number = parts[part][(integer)kept[first + n] * widths[part] + k];
        if (part == 0 && number >= 0) number = place[number];
        staged[n * ROW + column + k] = number;
      }
    Node node;
    if (team.me() < rows) node = nodes[kept[first + team.me()]];
    team.meet();
    for (int part = 0, column = 0; part < 4; column += widths[part++])
      for (int at = team.me(); at < rows * widths[part]; at += team.all()) {
        int n = at / widths[part], k = at % widths[part];
        parts[part][(integer)(first + n) * widths[part] + k] = staged[n * ROW + column + k];
      }
    if (team.me() < rows) {
      node.parent = place[node.parent];
      nodes[first + team.me()] = node;
    }
    team.meet();
  }
  return count;
}

// Runs Algorithm 1; cpu/beam.py has the proof. `room` is the number of prefixes, most_open that of
// extensions in A, most_beam that of hypotheses in B. batch_size hypotheses are expanded at once.
extern "C" __global__ void __launch_bounds__(THREADS, 2 - TOGETHER)
                           beam(const integer *transcriptions, const integer *num_vectors,
                                integer most, integer W, integer batch_size,
                                const float *labels_in, const float *inputs, const float *hidden,
                                const float *peepholes, const float *biases, const float *output,
                                const float *output_bias, integer room, integer most_open,
                                integer most_beam, Node *all_nodes, int *all_child, float *all_g,
                                float *all_h, float *all_s, double *all_open, int *all_keys,
                                int *all_staged, double *work,
                                double *log_probs, int *found_nodes, int *depths, Found *found) {
  extern __shared__ __align__(16) double shared[];
  Step &step = *(Step *)shared;
#if TOGETHER
  integer b = 0;
  Team team = {&((Search *)work)->arrived, 0};
#else
  integer b = blockIdx.x;
  Team team;
  work = shared + sizeof(Step) / 8;
#endif
  Search &search = *(Search *)work;
  int most_batch = (int)max(W, batch_size), width = (int)W;
  double *beam_log_prob = work + SEARCH_BYTES / 8;  // B
  double *batch_log_prob = beam_log_prob + most_beam;         // the hypotheses that are expanded
  double *batch_norm = batch_log_prob + most_batch;
  int *beam_node = (int *)(batch_norm + most_batch);
  int *batch_node = beam_node + most_beam;
  int *batch_key = batch_node + most_batch;  // before the nodes are known
  Weights weights = {labels_in, inputs, hidden, peepholes, biases, output, output_bias};

  const F *all_frames = (const F *)transcriptions[b];
  const double *f = search.f;
  Node *nodes = all_nodes + b * room;
  int *child = all_child + b * room * K1;
  float *g = all_g + b * room * K1;
  float *h = all_h + b * room * LAYERS * H, *s = all_s + b * room * LAYERS * H;
  double *open = all_open + b * 2 * most_open, *spare_open = open + most_open;  // A, and its copy
  int *keys = all_keys + b * 2 * most_open, *spare_keys = keys + most_open;
  int *staged = all_staged + b * STAGED * ROW;
  int length = (int)num_vectors[b];
  integer num_bounded = 0, num_expanded = 0, num_prefixes = 1;

  // The empty sequence is its own parent, with a state of zeros.
  for (int j = team.me(); j < LAYERS * H; j += team.all()) h[j] = s[j] = 0;
  for (int k = team.me(); k < K1; k += team.all()) child[k] = -1;
  if (team.me() == 0) {
    nodes[0] = {0, 0, 0, -1, 0, 0};
    beam_node[0] = 0, beam_log_prob[0] = 0;
    search.num_beam = search.size = 1;
    search.bad = search.full = 0;
  }
  auto zero = [](int) { return 0; };
  team.meet();
  if (team.block() == 0)
    step_prefixes(1, zero, zero, zero, weights, step, h, s, g, &search.bad);
  team.meet();

  int count = 1;  // hypotheses in B
  for (int t = 0; t < length && count > 0; t++) {
    // --- Let A = B with its prefix sums, and B = {} ---
    if (search.size > room / 2) {
      int left = remove_prefixes(team, search.size, beam_node, count, nodes, child, g, h, s, keys,
                                 spare_keys, staged);
      for (int i = team.me(); i < count; i += team.all()) beam_node[i] = spare_keys[beam_node[i]];
      if (team.me() == 0) search.size = left;
      team.meet();
    }
    for (int k = team.me(); k < K1; k += team.all()) search.f[k] = all_frames[(integer)t * K1 + k];
    if (team.me() == 0) {
      search.shortest = 1 << 30;
      search.bounded = search.best = ordered(NONE);
      search.num_open = 0;
    }
    team.meet();
    for (int i = team.me(); i < count; i += team.all()) {
      Node &node = nodes[beam_node[i]];
      node.frame = t;
      node.row = i;
      atomicMin(&search.shortest, node.depth);
    }
    team.meet();
    for (int i = team.warp(); i < count; i += team.warps()) {
      double total = beam_log_prob[i], between = 0;
      int at = beam_node[i];
      for (Node here = nodes[at]; here.depth > search.shortest;) {
        int prefix = here.parent, k = here.label;
        here = nodes[prefix];
        between += log_pr(f[k], g[(integer)prefix * K1 + k], log_norm(f, g + (integer)prefix * K1));
        if (between == NONE) break;
        if (here.frame == t) total = log_sum(total, between + beam_log_prob[here.row]);
      }
      if (lane() == 0) {
        batch_node[i] = at;
        batch_log_prob[i] = total;
        atomicMax(&search.best, ordered(total));
      }
    }
    team.meet();
    double best = unordered(search.best);  // no hypothesis of this frame is more probable
    double worst = LEAST;                  // the W-th best probability in B
    int num_beam = 0, num_batch = count;

    // --- Expand batches until none in A is as probable as the W-th best in B ---
    while (num_batch > 0) {
      num_expanded += num_batch;
      if (num_beam + num_batch > most_beam) {  // leave the W best
        keep_best(team, search, worst, num_beam, beam_log_prob, beam_node);
        num_beam = search.num_beam;
        if (num_beam + num_batch > most_beam) {
          if (team.me() == 0) search.full = 1;
          break;
        }
      }
      for (int i = team.warp(); i < num_batch; i += team.warps()) {
        int node = batch_node[i];
        const float *its_g = g + (integer)node * K1;
        double log_prob = batch_log_prob[i], norm = log_norm(f, its_g);
        if (lane() == 0) {
          int emitted = nodes[node].frame == t ? 0 : nodes[nodes[node].parent].emitted + 1;
          nodes[node].emitted = emitted;
          if (emitted == most) atomicMax(&search.bounded, ordered(log_prob));
          batch_norm[i] = norm;
          // Pr(y) Pr(∅|y,t)
          beam_log_prob[num_beam + i] = log_prob + log_pr(f[0], its_g[0], norm);
          beam_node[num_beam + i] = node;
          if (emitted == most) batch_node[i] = -1;  // it has no extensions
        }
      }
      num_beam += num_batch;
      if (team.me() == 0) search.least = ~0ULL;
      team.meet();
      if (num_beam >= width) {
        for (int i = team.warp(); i < num_beam; i += team.warps()) {
          double log_prob = beam_log_prob[i];
          int better = 0;
          for (int j = lane(); j < num_beam; j += LANES) better += beam_log_prob[j] > log_prob;
          for (int n = LANES / 2; n > 0; n /= 2) better += __shfl_xor_sync(WHOLE, better, n);
          if (lane() == 0 && better < width) atomicMin(&search.least, ordered(log_prob));
        }
        team.meet();
        worst = fmax(unordered(search.least), LEAST);
      }
      // Add the extensions that may still enter B to A; one that was in A keeps its sum.
      for (int at = team.me(); at < num_batch * (K1 - 1); at += team.all()) {
        int i = at / (K1 - 1), k = at % (K1 - 1) + 1, node = batch_node[i];
        if (node < 0) continue;
        double log_prob = batch_log_prob[i] + log_pr(f[k], g[(integer)node * K1 + k], batch_norm[i]);
        if (!(log_prob >= worst)) continue;
        int next = child[(integer)node * K1 + k];
        if (next >= 0 && nodes[next].frame == t) continue;
        int to = atomicAdd(&search.num_open, 1);
        if (to < most_open) open[to] = log_prob, keys[to] = node * K1 + k;
      }
      for (int bin = team.me(); bin < BINS; bin += team.all()) search.bins[bin] = 0;
      if (team.me() == 0) search.num_batch = search.num_left = 0, search.cut = BINS;
      team.meet();
      int num_open = search.num_open, first = search.size;
      if (num_open > most_open) {
        if (team.me() == 0) search.full = 1;
        break;
      }
      // Take the best, by a histogram; the order among equals is of no consequence.
      if (num_open > batch_size) {
        for (int i = team.me(); i < num_open; i += team.all())
          if (open[i] >= worst) atomicAdd(&search.bins[bin_of(best - open[i])], 1);
        team.meet();
        if (team.warp() == 0) {
          int sum = 0, bin = 0;  // whole groups of bins, then single ones
          for (; bin < BINS; bin += LANES) {
            int here = search.bins[bin + lane()];
            for (int n = LANES / 2; n > 0; n /= 2) here += __shfl_xor_sync(WHOLE, here, n);
            if (sum + here >= batch_size) break;
            sum += here;
          }
          for (; bin < BINS && sum < batch_size; bin++) sum += search.bins[bin];
          if (lane() == 0) search.cut = bin;  // the first bin of which none is taken
        }
        team.meet();
      }
      for (int i = team.me(); i < num_open; i += team.all()) {
        double log_prob = open[i];
        if (!(log_prob >= worst)) continue;
        int key = keys[i], to = most_batch;
        if (search.cut == BINS || bin_of(best - log_prob) < search.cut)
          to = atomicAdd(&search.num_batch, 1);
        if (to < batch_size) {
          batch_log_prob[to] = log_prob;
          batch_key[to] = key;
        } else {
          to = atomicAdd(&search.num_left, 1);
          spare_open[to] = log_prob;
          spare_keys[to] = key;
        }
      }
      team.meet();
      num_batch = (int)min((integer)search.num_batch, batch_size);
      double *const old_open = open;
      int *const old_keys = keys;
      open = spare_open, spare_open = old_open;
      keys = spare_keys, spare_keys = old_keys;
      // Add new prefixes to the trie.
      for (int i = team.me(); i < num_batch; i += team.all()) {
        int key = batch_key[i], node = child[key];
        if (node < 0) {
          node = atomicAdd(&search.size, 1);
          if (node < room) {
            nodes[node] = {key / K1, key % K1, nodes[key / K1].depth + 1, -1, 0, 0};
            child[key] = node;
          }
        }
        batch_node[i] = node;
      }
      team.meet();
      if (team.me() == 0) search.num_open = search.num_left;
      int size = search.size;
      if (size > room) {
        if (team.me() == 0) search.full = 1;
        break;
      }
      num_prefixes += size - first;
      for (integer k = (integer)first * K1 + team.me(); k < (integer)size * K1; k += team.all())
        child[k] = -1;
      for (first += team.block() * TILE; first < size; first += team.blocks() * TILE) {
        auto parent = [&](int n) { return nodes[first + n].parent; };
        auto label = [&](int n) { return nodes[first + n].label; };
        auto place = [&](int n) { return first + n; };
        step_prefixes(min(size - first, TILE), parent, label, place, weights, step, h, s, g,
                      &search.bad);
      }
      team.meet();
    }
    team.meet();
    if (search.full) break;
    num_bounded += search.bounded > ordered(NONE) && unordered(search.bounded) >= worst;

    // --- Keep the W best; ties are decided by the order of the labels ---
    keep_best(team, search, worst, num_beam, beam_log_prob, beam_node);
    if (team.me() == 0) {
      int left = search.num_beam;
      while (left > width) {
        int last = -1;
        for (int i = 0; i < left; i++)
          if (beam_log_prob[i] == worst &&
              (last < 0 || is_before(nodes, beam_node[last], beam_node[i])))
            last = i;
        left--;
        beam_log_prob[last] = beam_log_prob[left];
        beam_node[last] = beam_node[left];
      }
      search.num_beam = left;
    }
    team.meet();
    count = search.num_beam;
    team.meet();
  }
  for (int i = team.me(); i < count; i += team.all()) {
    log_probs[b * W + i] = beam_log_prob[i];
    found_nodes[b * W + i] = beam_node[i];
    depths[b * W + i] = nodes[beam_node[i]].depth;
  }
  if (team.me() == 0)
    found[b] = {count, num_bounded, num_expanded, num_prefixes, search.bad, search.full ? FULL : DONE};
}

// Writes the labels of hypotheses; ends[i] is where those of the i-th end.
extern "C" __global__ void paths(const integer *utterances, const int *found_nodes, integer count,
                                 const Node *all_nodes, integer room, const integer *ends,
                                 int *labels) {
  integer i = (integer)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const Node *nodes = all_nodes + utterances[i] * room;
  integer to = ends[i];
  for (Node here = nodes[found_nodes[i]]; here.depth > 0; here = nodes[here.parent])
    labels[--to] = here.label;
}

#if !TOGETHER

// --- The timings ---------------------------------------------------------------------------------

__device__ __forceinline__ double finite_or(double arrow) { return arrow > NONE ? arrow : IMPOSSIBLE; }

__device__ __forceinline__ double log_sum_finite(double a, double b) {
  double lead = fabs(a - b);
  return fmax(a, b) + (lead < 40 ? log1p(exp(-lead)) : 0.0);
}

// Computes when each label of a hypothesis is emitted, as cpu/emissions.py does. `room` is the number
// of nodes of the largest lattice of the batch, with one row more than frames; the four arrays of
// `lattices` have so many each.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
                           timings(const integer *transcriptions, const integer *num_vectors,
                                   const integer *utterances, const float *all_g,
                                   const integer *all_labels, const integer *num_labels,
                                   integer longest, double tail, integer room, double *lattices,
                                   integer *frames, integer *starts, integer *ends,
                                   double *confidences, double *evidences) {
  extern __shared__ __align__(16) double shared[];
  integer i = blockIdx.x, b = utterances[i];
  int U = (int)num_labels[i], length = (int)num_vectors[b], width = U + 1;
  const F *f = (const F *)transcriptions[b];
  const float *g = all_g + i * (longest + 1) * K1;
  const integer *labels = all_labels + i * longest;
  double *log_null = lattices + i * 4 * room, *log_label = log_null + room;
  double *log_beta = log_label + room, *log_best = log_beta + room;
  frames += i * longest, starts += i * longest, ends += i * longest, confidences += i * longest;
  for (int at = warp(); at < length * width; at += warps()) {
    int t = at / width, u = at % width, k = u < U ? (int)labels[u] : 0;
    const F *here = f + (integer)t * K1;
    double norm = log_norm(here, g + u * K1);
    if (lane() == 0) {
      log_null[at] = finite_or(log_pr(here[0], g[u * K1], norm));        // Eq. 15
      log_label[at] = finite_or(log_pr(here[k], g[u * K1 + k], norm));  // Eq. 14
    }
  }
  // The last null ends the alignment: β(T+1, U) = 1.
  for (int u = threadIdx.x; u < width; u += blockDim.x)
    log_beta[length * width + u] = log_best[length * width + u] = u == U ? 0.0 : IMPOSSIBLE;
  __syncthreads();
  for (int diagonal = length - 1 + U; diagonal >= 0; diagonal--) {
    for (int u = threadIdx.x; u < width; u += blockDim.x) {
      int t = diagonal - u, at = t * width + u;
      if (t < 0 || t >= length) continue;
      double null = log_null[at], beta = log_beta[at + width] + null;  // Eq. 18
      double best = log_best[at + width] + null;
      if (u < U) {
        beta = log_sum_finite(beta, log_beta[at + 1] + log_label[at]);
        best = fmax(best, log_best[at + 1] + log_label[at]);
      }
      log_beta[at] = beta;
      log_best[at] = best;
    }
    __syncthreads();
  }
  double evidence = log_beta[0];
  // A thread goes through the frames of its columns; the columns before it are a frame ahead.
  double *entering = shared, *emitted = entering + width, *confidence = emitted + width;
  double *up = confidence + width;  // [2, U+1], of even and odd diagonals
  for (int u = threadIdx.x; u < width; u += blockDim.x) {
    entering[u] = u == 0 ? 0.0 : IMPOSSIBLE;
    emitted[u] = confidence[u] = 0;
    if (u < U) starts[u] = ends[u] = frames[u] = 0;
  }
  __syncthreads();
  for (int diagonal = 0; diagonal < length + U; diagonal++) {
    double *now = up + diagonal % 2 * width, *before = up + (diagonal + 1) % 2 * width;
    for (int u = threadIdx.x; u < width; u += blockDim.x) {
      int t = diagonal - u, at = t * width + u;
      if (t < 0 || t >= length) continue;
      double null = log_null[at], label = log_label[at];
      double log_alpha = u == 0 ? entering[0] : log_sum_finite(entering[u], before[u - 1]);  // Eq. 16
      entering[u] = log_alpha + null;
      if (u == U) continue;
      now[u] = log_alpha + label;
      double log_emitted = now[u] + log_beta[at + 1] - evidence;
      if (log_emitted > -700.0) {
        double by_label = exp(log_emitted);
        emitted[u] += by_label;
        double if_any = null < 0 ? label - log(-expm1(null)) : 0.0;
        confidence[u] += by_label * exp(fmin(0.0, if_any));
      }
      starts[u] += emitted[u] < tail;
      ends[u] += emitted[u] < 1 - tail;
    }
    __syncthreads();
  }
  for (int u = threadIdx.x; u < U; u += blockDim.x) {
    ends[u] = min(ends[u], (integer)length - 1);
    confidences[u] = fmin(confidence[u], 1.0);
  }
  if (threadIdx.x == 0) {
    evidences[i] = evidence;
    for (int t = 0, u = 0; t < length && u < U; t++)
      for (; u < U; u++) {
        int at = t * width + u;
        if (log_best[at + 1] + log_label[at] <= log_best[at + width] + log_null[at]) break;
        frames[u] = t;
      }
  }
}

#endif
