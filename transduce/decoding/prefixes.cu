// The operations of the beam search that visit every prefix, a warp for each prefix.
//
// Prefixes are the nodes of a trie: a node has a parent, a label, a depth, a row of children (-1 for
// none), and its prediction vector g. `frame` is the last frame at whose beginning it was in A, and
// `row` its place there. Probabilities are logarithms.

typedef long long integer;
#define WHOLE 0xffffffff
#define LANES 32
#define NONE (-__longlong_as_double(0x7ff0000000000000LL))

__device__ __forceinline__ integer number() {  // the index of this warp
  return ((integer)blockIdx.x * blockDim.x + threadIdx.x) / LANES;
}

__device__ __forceinline__ int lane() { return threadIdx.x % LANES; }

// Returns ln Σ exp(f + g) over the labels and null, the denominator of Eq. 13.
__device__ double log_norm(const double *f, const double *g, integer K1) {
  double top = NONE, sum = 0;
  for (integer k = lane(); k < K1; k += LANES) top = fmax(top, f[k] + g[k]);
  for (int n = LANES / 2; n > 0; n /= 2) top = fmax(top, __shfl_xor_sync(WHOLE, top, n));
  if (top == NONE) return NONE;
  for (integer k = lane(); k < K1; k += LANES) sum += exp(f[k] + g[k] - top);
  for (int n = LANES / 2; n > 0; n /= 2) sum += __shfl_xor_sync(WHOLE, sum, n);
  return top + log(sum);
}

__device__ double log_sum(double a, double b) {
  double top = fmax(a, b);
  return top == NONE ? NONE : top + log1p(exp(fmin(a, b) - top));
}

// Records the rows of A's nodes, and the depth of the shortest.
extern "C" __global__ void enter(const integer *nodes, integer count, integer t,
                                 const integer *depth, integer *frame, integer *row,
                                 integer *shortest) {
  integer i = (integer)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  frame[nodes[i]] = t;
  row[nodes[i]] = i;
  atomicMin(shortest, depth[nodes[i]]);
}

// Computes Pr(y) + Σ Pr(y') Pr(y|y',t) over the proper prefixes y' of y in A, walking from y towards
// the root as far as the shortest node of A.
extern "C" __global__ void prefix_sums(const integer *nodes, integer count, integer t,
                                       const double *log_prob, const double *f, const double *g,
                                       const double *fused, integer K1, const integer *parent,
                                       const integer *label, const integer *depth,
                                       const integer *frame, const integer *row,
                                       const integer *shortest, double *summed) {
  integer i = number();
  if (i >= count) return;
  double total = log_prob[i], between = 0;
  for (integer here = nodes[i]; depth[here] > *shortest; here = parent[here]) {
    integer prefix = parent[here], k = label[here];
    double norm = log_norm(f, g + prefix * K1, K1);
    between += norm == NONE ? NONE : f[k] + g[prefix * K1 + k] - norm;
    if (fused) between += fused[prefix * K1 + k];
    if (between == NONE) break;
    if (frame[prefix] == t) total = log_sum(total, between + log_prob[row[prefix]]);
  }
  if (lane() == 0) summed[i] = total;
}

// Computes each node's probability after null, and after every label that may extend it. An extension
// that is in A keeps its sum, and one with too many labels in this frame is closed: both get NONE.
extern "C" __global__ void extend(const integer *nodes, integer count, integer t,
                                  const double *log_prob, const double *f, const double *g,
                                  const double *fused, integer K1, integer most,
                                  const integer *parent, const int *child, const integer *frame,
                                  integer *emitted, double *with_null, double *extended) {
  integer i = number();
  if (i >= count) return;
  integer node = nodes[i];
  integer labels = frame[node] == t ? 0 : emitted[parent[node]] + 1;
  double norm = log_norm(f, g + node * K1, K1);
  for (integer k = lane(); k < K1; k += LANES) {
    double log_pr = norm == NONE ? NONE : f[k] + g[node * K1 + k] - norm;
    if (fused) log_pr += fused[node * K1 + k];
    integer next = child[node * K1 + k];
    bool open = k > 0 && labels < most && !(next >= 0 && frame[next] == t);
    extended[i * K1 + k] = open ? log_prob[i] + log_pr : NONE;
    if (k == 0) {
      with_null[i] = log_prob[i] + log_pr;
      emitted[node] = labels;
    }
  }
}

// Adds nodes from `first` on; a key is the parent's number times K1, plus the label.
extern "C" __global__ void plant(const integer *keys, integer count, integer first, integer K1,
                                 integer *parent, integer *label, integer *depth, int *child,
                                 integer *frame) {
  integer i = number();
  if (i >= count) return;
  integer node = first + i, above = keys[i] / K1;
  for (integer k = lane(); k < K1; k += LANES) child[node * K1 + k] = -1;
  if (lane() > 0) return;
  parent[node] = above;
  label[node] = keys[i] % K1;
  depth[node] = depth[above] + 1;
  frame[node] = -1;
  child[keys[i]] = (int)node;
}

__device__ __forceinline__ float sigmoid(float x) { return 1 / (1 + expf(-x)); }

// Steps a layer to the new nodes (Eqs. 4-8). `sums` lack the biases and, in the first layer, the
// label's weights. h and s are [nodes, layers, H].
extern "C" __global__ void step(const float *sums, integer count, integer first, integer H,
                                integer layer, integer layers, const integer *parent,
                                const integer *label, const float *inputs, const float *biases,
                                const float *peepholes, float *h, float *s) {
  integer at = (integer)blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= count * H) return;
  integer i = at / H, j = at % H, node = first + i;
  float sum[4];
  for (int gate = 0; gate < 4; gate++) {
    integer column = gate * H + j;
    sum[gate] = sums[i * 4 * H + column] + biases[column];
    if (inputs) sum[gate] += inputs[label[node] * 4 * H + column];
  }
  float before = s[(parent[node] * layers + layer) * H + j];
  float input_gate = sigmoid(sum[0] + peepholes[j] * before);       // Eq. 4
  float forget_gate = sigmoid(sum[1] + peepholes[H + j] * before);  // Eq. 5
  float state = forget_gate * before + input_gate * tanhf(sum[2]);  // Eq. 6
  float output_gate = sigmoid(sum[3] + peepholes[2 * H + j] * state);  // Eq. 7
  s[(node * layers + layer) * H + j] = state;
  h[(node * layers + layer) * H + j] = output_gate * tanhf(state);  // Eq. 8
}
