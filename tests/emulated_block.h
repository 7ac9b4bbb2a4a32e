// Runs a CUDA block on the CPU: each thread is a coroutine that runs up to the next barrier.
#include <cmath>
#include <cstring>
#include <algorithm>
#include <ucontext.h>
#include <vector>

using std::max;
using std::min;
#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__
#define __align__(n) alignas(n)
#define __launch_bounds__(...)
struct Dim { int x; };
struct float4 { float x, y, z, w; };
static Dim blockIdx, blockDim, threadIdx;
alignas(16) static double shared[1 << 17];

static std::vector<ucontext_t> coroutines;
static std::vector<std::vector<char>> stacks;
static std::vector<int> waits, done;  // 0: runs, 1: for its warp, 2: for its block
static ucontext_t scheduler;
static unsigned long long slots[1024];

static void wait_at(int barrier) {
  int self = threadIdx.x;
  waits[self] = barrier;
  swapcontext(&coroutines[self], &scheduler);
  threadIdx.x = self;
}
static void __syncthreads() { wait_at(2); }

template <class T>
static T from_lane(T value, int lane) {
  memcpy(&slots[threadIdx.x], &value, sizeof value);
  wait_at(1);
  T other;
  memcpy(&other, &slots[threadIdx.x / 32 * 32 + lane], sizeof other);
  wait_at(1);
  return other;
}
template <class T>
static T __shfl_xor_sync(unsigned, T value, int mask) {
  return from_lane(value, (threadIdx.x % 32) ^ mask);
}
static unsigned __ballot_sync(unsigned, bool bit) {
  unsigned all = 0;
  for (int lane = 0; lane < 32; lane++) all |= (unsigned)from_lane((int)bit, lane) << lane;
  return all;
}
static int __popc(unsigned x) { return __builtin_popcount(x); }
template <class A, class B>
static B of_bits(A a) { B b; memcpy(&b, &a, sizeof b); return b; }
static double __longlong_as_double(long long x) { return of_bits<long long, double>(x); }
static long long __double_as_longlong(double x) { return of_bits<double, long long>(x); }
static float __int_as_float(int x) { return of_bits<int, float>(x); }
template <class T> static T atomicAdd(T *at, T x) { T was = *at; *at += x; return was; }
template <class T> static T atomicMin(T *at, T x) { T was = *at; *at = min(was, x); return was; }
template <class T> static T atomicMax(T *at, T x) { T was = *at; *at = max(was, x); return was; }

typedef void (*Body)(const long long *);
static Body body;
static const long long *values;

static void entry() {
  int self = threadIdx.x;
  body(values);
  done[self] = 1;
  threadIdx.x = self;
  swapcontext(&coroutines[self], &scheduler);
}

// Returns 0, or 1 if threads wait for others that have ended.
static int run_grid(Body kernel, int blocks, int threads, const long long *arguments) {
  body = kernel, values = arguments, blockDim.x = threads;
  coroutines.assign(threads, {}), stacks.assign(threads, std::vector<char>(1 << 16));
  for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
    for (double &x : shared) x = NAN;
    waits.assign(threads, 0), done.assign(threads, 0);
    for (int i = 0; i < threads; i++) {
      getcontext(&coroutines[i]);
      coroutines[i].uc_stack.ss_sp = stacks[i].data();
      coroutines[i].uc_stack.ss_size = stacks[i].size();
      makecontext(&coroutines[i], entry, 0);
    }
    bool reversed = false;
    for (int left = threads; left > 0;) {
      bool moved = false;
      for (int n = 0; n < threads; n++) {
        int i = reversed ? threads - 1 - n : n;
        if (done[i] || waits[i]) continue;
        threadIdx.x = i, moved = true;
        swapcontext(&scheduler, &coroutines[i]);
        left -= done[i];
      }
      reversed = !reversed;
      for (int first = 0; first < threads; first += 32) {
        bool all = true;
        for (int i = first; i < min(threads, first + 32); i++) all &= waits[i] == 1;
        if (all) for (int i = first; i < min(threads, first + 32); i++) waits[i] = 0, moved = true;
      }
      bool all = true;
      for (int i = 0; i < threads; i++) all &= waits[i] == 2;
      if (all) for (int i = 0; i < threads; i++) waits[i] = 0, moved = true;
      if (!moved && left > 0) return 1;
    }
  }
  return 0;
}
