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
static Dim gridDim;
alignas(16) static double rooms[8][1 << 14];  // shared memory, of each block that runs at once
#define shared (rooms[blockIdx.x % 8])

static std::vector<ucontext_t> coroutines;
static std::vector<std::vector<char>> stacks;
static std::vector<int> waits, done;  // 0: runs, 1: for its warp, 2: for its block
static ucontext_t scheduler;
static unsigned long long slots[4096];

static int first_block;
static int self() { return (blockIdx.x - first_block) * blockDim.x + threadIdx.x; }

static void wait_at(int barrier) {
  waits[self()] = barrier;
  swapcontext(&coroutines[self()], &scheduler);
}
static void __syncthreads() { wait_at(2); }
static void __threadfence() {}
#define pause_block() wait_at(0)

template <class T>
static T from_lane(T value, int lane) {
  memcpy(&slots[self()], &value, sizeof value);
  wait_at(1);
  T other;
  memcpy(&other, &slots[self() / 32 * 32 + lane], sizeof other);
  wait_at(1);
  return other;
}
template <class T>
static T __shfl_xor_sync(unsigned, T value, int mask) {
  return from_lane(value, (threadIdx.x % 32) ^ mask);
}
static unsigned __ballot_sync(unsigned, bool bit) {
  slots[self()] = bit;
  wait_at(1);
  unsigned all = 0;
  for (int lane = 0; lane < 32; lane++) all |= (unsigned)slots[self() / 32 * 32 + lane] << lane;
  wait_at(1);
  return all;
}
static bool __any_sync(unsigned mask, bool bit) { return __ballot_sync(mask, bit); }
static void __nanosleep(unsigned) {}
#define __expf(x) std::exp((float)(x))
static float __fdividef(float x, float y) { return x / y; }
static int __popc(unsigned x) { return __builtin_popcount(x); }
template <class A, class B>
static B of_bits(A a) { B b; memcpy(&b, &a, sizeof b); return b; }
static double __longlong_as_double(long long x) { return of_bits<long long, double>(x); }
static long long __double_as_longlong(double x) { return of_bits<double, long long>(x); }
static float __uint_as_float(unsigned x) { return of_bits<unsigned, float>(x); }
static float __int_as_float(int x) { return of_bits<int, float>(x); }
template <class T> static T atomicAdd(T *at, T x) { T was = *at; *at += x; return was; }
template <class T> static T atomicMin(T *at, T x) { T was = *at; *at = min(was, x); return was; }
template <class T> static T atomicMax(T *at, T x) { T was = *at; *at = max(was, x); return was; }

typedef void (*Body)(const long long *);
static Body body;
static const long long *values;

static void entry() {
  body(values);
  done[self()] = 1;
  swapcontext(&coroutines[self()], &scheduler);
}

// Runs `count` blocks at once, from `first` on; returns 1 if threads wait for ever.
static int run_blocks(int first, int count) {
  int threads = blockDim.x, all = count * threads;
  first_block = first;
  waits.assign(all, 0), done.assign(all, 0);
  for (auto &room : rooms)
    for (double &x : room) x = NAN;
  for (int i = 0; i < all; i++) {
    getcontext(&coroutines[i]);
    coroutines[i].uc_stack.ss_sp = stacks[i].data();
    coroutines[i].uc_stack.ss_size = stacks[i].size();
    makecontext(&coroutines[i], entry, 0);
  }
  bool reversed = false;
  for (int left = all; left > 0; reversed = !reversed) {
    bool moved = false;
    for (int n = 0; n < all; n++) {
      int i = reversed ? all - 1 - n : n;
      if (done[i] || waits[i]) continue;
      blockIdx.x = first + i / threads, threadIdx.x = i % threads, moved = true;
      swapcontext(&scheduler, &coroutines[i]);
      left -= done[i];
    }
    for (int barrier = 1; barrier <= 2; barrier++)
      for (int size = barrier == 1 ? 32 : threads, from = 0; from < all; from += size) {
        bool met = true;
        for (int i = from; i < from + size; i++) met &= waits[i] == barrier;
        if (met) for (int i = from; i < from + size; i++) waits[i] = 0, moved = true;
      }
    if (!moved && left > 0) return 1;
  }
  return 0;
}

static int run_grid(Body kernel, int blocks, int threads, bool together, const long long *given) {
  body = kernel, values = given, blockDim.x = threads, gridDim.x = blocks;
  coroutines.assign(8 * threads, {}), stacks.assign(8 * threads, std::vector<char>(1 << 16));
  if (together) return run_blocks(0, blocks);
  for (int first = 0; first < blocks; first++)
    if (run_blocks(first, 1)) return 1;
  return 0;
}
