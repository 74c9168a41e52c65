// What exchange.cu needs of CUDA, in plain C++, so that unit tests run that very file on a CPU.
//
// A launch runs its blocks one after the other, and the threads of a block as coroutines of the
// thread that launches, both in an order that a seed decides. They change over at barriers and
// sleeps, and now and then at a word that another process may read or write.
//
// It is compiled once for each dtype and each planted fault, so it includes little.

#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <ucontext.h>

#include <utility>

#define AFD_ON_CPU 1
#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static thread_local
#define __maxnreg__(number)

struct Index {
  unsigned x;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline float fmaxf(float a, float b) { return __builtin_fmaxf(a, b); }
inline float fabsf(float a) { return __builtin_fabsf(a); }

inline thread_local Index threadIdx, blockIdx, blockDim, gridDim;

namespace on_cpu {

constexpr unsigned STACK_BYTES = 65536, WARP = 32, MAX_THREADS = 256, MAX_MASKS = 4;
constexpr unsigned NUM_SLEEPS_TO_REST = 64;
constexpr double PATIENCE_S = 20.0;

struct Barrier {  // of those threads of a warp that `mask` names, or of a whole block
  unsigned mask, num_arrived, generation;
  unsigned given[WARP], taken[2][WARP];  // what a warp exchanges; of an even generation, an odd one
};

struct Thread {
  ucontext_t context;
  char* stack;
  bool is_done;
};

struct Launch {
  void (*body)(void*);
  void* argument;
  unsigned long long random;
  double began_s;
  const char* error;
  unsigned num_sleeps;
  // Of the block that runs now.
  ucontext_t scheduler;
  Thread* threads;
  unsigned num_living, current;
  bool made_progress;
  Barrier of_block, of_warps[MAX_THREADS / WARP][MAX_MASKS];

  unsigned draw(unsigned number) {
    random = random * 6364136223846793005ull + 1442695040888963407ull;
    return (unsigned)(random >> 33) % number;
  }
};

inline thread_local Launch* launch_now;

inline double now_s() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec + now.tv_nsec * 1e-9;
}

inline void change_over(bool made_progress) {
  Launch* launch = launch_now;
  launch->made_progress |= made_progress;
  swapcontext(&launch->threads[launch->current].context, &launch->scheduler);
}

inline void sometimes_change_over() {
  if (launch_now->draw(8) == 0) change_over(true);
}

inline void pass(Barrier& barrier) {
  barrier.num_arrived = 0;
  memcpy(barrier.taken[barrier.generation % 2], barrier.given, sizeof barrier.given);
  barrier.generation++;
}

inline void meet(Barrier& barrier, unsigned number) {
  const unsigned generation = barrier.generation;
  if (++barrier.num_arrived == number) return pass(barrier);
  for (bool is_new = true; barrier.generation == generation; is_new = false) change_over(is_new);
}

// What each lane of the warp that `mask` names brings.
inline const unsigned* share(unsigned mask, unsigned value) {
  Launch* launch = launch_now;
  const unsigned warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const unsigned width = min(WARP, blockDim.x - warp * WARP);
  mask &= 0xffffffffu >> (WARP - width);
  Barrier* const barriers = launch->of_warps[warp];
  unsigned i = 0;
  while (i < MAX_MASKS && barriers[i].mask && barriers[i].mask != mask) i++;
  if (i == MAX_MASKS || !(mask >> lane & 1)) {
    launch->error = "a barrier of a warp does not name who is there, or is one of too many";
    change_over(true);
  }
  Barrier& barrier = barriers[i];
  barrier.mask = mask;
  barrier.given[lane] = value;
  const unsigned generation = barrier.generation;
  meet(barrier, __builtin_popcount(mask));
  return barrier.taken[generation % 2];
}

inline void begin_thread() {
  Launch* launch = launch_now;
  launch->body(launch->argument);
  launch->threads[launch->current].is_done = true;
  launch->num_living--;
  Barrier& barrier = launch->of_block;
  if (barrier.num_arrived && barrier.num_arrived == launch->num_living) pass(barrier);
  change_over(true);
}

inline void shuffle(Launch& launch, unsigned number, unsigned* order) {
  for (unsigned i = 0; i < number; i++) {
    const unsigned at = launch.draw(i + 1);
    order[i] = order[at], order[at] = i;
  }
}

inline void run_block(Launch& launch) {
  for (unsigned i = 0; i < blockDim.x; i++) {
    Thread& thread = launch.threads[i];
    if (!thread.stack) thread.stack = (char*)malloc(STACK_BYTES);
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack;
    thread.context.uc_stack.ss_size = STACK_BYTES;
    thread.context.uc_link = nullptr;
    thread.is_done = false;
    makecontext(&thread.context, begin_thread, 0);
  }
  launch.num_living = blockDim.x;
  launch.of_block = {};
  memset(launch.of_warps, 0, sizeof launch.of_warps);
  unsigned order[MAX_THREADS];
  shuffle(launch, blockDim.x, order);
  while (launch.num_living) {
    launch.made_progress = false;
    for (unsigned at = 0; at < blockDim.x; at++) {
      if (launch.threads[order[at]].is_done) continue;
      launch.current = threadIdx.x = order[at];
      swapcontext(&launch.scheduler, &launch.threads[order[at]].context);
      if (launch.error) return;
    }
    if (!launch.made_progress) {
      launch.error = "threads are at a barrier that others never reach";
      return;
    }
  }
}

struct Threads {
  Thread all[MAX_THREADS] = {};
  ~Threads() {
    for (Thread& thread : all) free(thread.stack);
  }
};

inline const char* run(void (*body)(void*), void* argument, unsigned grid, unsigned block,
                       unsigned long long seed) {
  if (block > MAX_THREADS) return "a block has more threads than a launch on a CPU has room for";
  static thread_local Threads threads;
  Launch launch{.body = body, .argument = argument, .random = seed, .began_s = now_s()};
  launch.threads = threads.all;
  launch_now = &launch;
  gridDim.x = grid, blockDim.x = block;
  auto* order = (unsigned*)malloc(grid * sizeof(unsigned));
  shuffle(launch, grid, order);
  for (unsigned at = 0; at < grid && !launch.error; at++) {
    blockIdx.x = order[at];
    run_block(launch);
  }
  free(order);
  return launch.error;
}

// As cuLaunchKernel takes them; `sizes` are of what the arguments point to.
template <class... Parameters>
const char* launch(void (*kernel)(Parameters...), unsigned grid, unsigned block,
                   unsigned long long seed, unsigned number, const unsigned* sizes,
                   void** arguments) {
  const unsigned wanted[] = {sizeof(Parameters)...};
  if (number != sizeof...(Parameters) || memcmp(sizes, wanted, sizeof wanted))
    return "the arguments are not those that the kernel takes";
  auto call = [&]<size_t... at>(std::index_sequence<at...>) {
    kernel(*(Parameters*)arguments[at]...);
  };
  auto body = [&] { call(std::index_sequence_for<Parameters...>()); };
  return run([](void* it) { (*(decltype(body)*)it)(); }, &body, grid, block, seed);
}

// Code of the value nearest to `f` in a narrower format, ties to even; too large a one is above all
// codes of finite values.
inline unsigned narrow(float f, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const double magnitude = __builtin_fabs(f);
  if (magnitude == 0) return 0;
  const int smallest = 1 - bias, own = __builtin_ilogb(magnitude);
  const int exponent = own < smallest ? smallest : own;
  const double steps = __builtin_nearbyint(__builtin_ldexp(magnitude, mantissa_bits - exponent));
  return ((unsigned)(exponent + bias - 1) << mantissa_bits) + (unsigned)steps;
}

inline float widen(unsigned code, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1);
  const int mantissa = code & ((1 << mantissa_bits) - 1);
  const int steps = exponent ? mantissa + (1 << mantissa_bits) : mantissa;
  const double value = __builtin_ldexp(steps, (exponent ? exponent : 1) - bias - mantissa_bits);
  return code >> (exponent_bits + mantissa_bits) & 1 ? -value : value;
}

inline unsigned short to_16_bits(float f, int exponent_bits) {
  const int mantissa_bits = 15 - exponent_bits;
  const unsigned infinity = 0x7fff >> mantissa_bits << mantissa_bits;
  if (__builtin_isnan(f)) return 0x7fff;
  const unsigned code = __builtin_isinf(f) ? infinity : narrow(f, exponent_bits, mantissa_bits);
  return (__builtin_signbit(f) ? 0x8000 : 0) | min(code, infinity);
}

inline unsigned to_e4m3(float f) {
  if (__builtin_isnan(f)) return 0x7f;
  const unsigned largest = 0x7e, code = __builtin_isinf(f) ? largest : narrow(f, 4, 3);
  return (__builtin_signbit(f) ? 0x80 : 0) | min(code, largest);
}

}  // namespace on_cpu

// CUDA's own functions.

inline float __uint_as_float(unsigned v) {
  float f;
  memcpy(&f, &v, 4);
  return f;
}
inline unsigned __float_as_uint(float f) {
  unsigned v;
  memcpy(&v, &f, 4);
  return v;
}
inline void __syncthreads() {
  on_cpu::meet(on_cpu::launch_now->of_block, on_cpu::launch_now->num_living);
}
inline void __syncwarp() { on_cpu::share(0xffffffffu, 0); }
inline unsigned __shfl_sync(unsigned mask, unsigned value, unsigned from) {
  return on_cpu::share(mask, value)[from % on_cpu::WARP];
}
inline unsigned __shfl_up_sync(unsigned mask, unsigned value, unsigned distance) {
  const unsigned lane = threadIdx.x % on_cpu::WARP;
  return on_cpu::share(mask, value)[lane < distance ? lane : lane - distance];
}
inline float __shfl_xor_sync(unsigned mask, float value, int lanes, int width) {
  const unsigned lane = threadIdx.x % on_cpu::WARP;
  const unsigned* shared = on_cpu::share(mask, __float_as_uint(value));
  const unsigned from = (lane ^ lanes) / width == lane / width ? lane ^ lanes : lane;
  return __uint_as_float(shared[from]);
}
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __nanosleep(unsigned) {
  on_cpu::Launch* launch = on_cpu::launch_now;
  if (++launch->num_sleeps % on_cpu::NUM_SLEEPS_TO_REST == 0) {
    const timespec rest = {0, 20000};
    nanosleep(&rest, nullptr);
    if (on_cpu::now_s() > launch->began_s + on_cpu::PATIENCE_S)
      launch->error = "a thread waits for a word that never comes";
  } else {
    sched_yield();
  }
  on_cpu::change_over(true);
}
inline unsigned atomicInc(unsigned* p, unsigned last) {
  on_cpu::sometimes_change_over();
  unsigned old = __atomic_load_n(p, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(p, &old, old >= last ? 0 : old + 1, false, __ATOMIC_SEQ_CST,
                                      __ATOMIC_SEQ_CST)) {
  }
  return old;
}
inline unsigned long long atomicAdd(unsigned long long* p, unsigned long long v) {
  return __atomic_fetch_add(p, v, __ATOMIC_RELAXED);
}

// What exchange.cu says in PTX.

inline unsigned load_acquire(const unsigned* p) {
  on_cpu::sometimes_change_over();
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
inline unsigned load_relaxed(const unsigned* p) {
  on_cpu::sometimes_change_over();
  return __atomic_load_n(p, __ATOMIC_RELAXED);
}
inline void store_release(unsigned* p, unsigned v) {
  on_cpu::sometimes_change_over();
  __atomic_store_n(p, v, __ATOMIC_RELEASE);
}
inline void store_relaxed(unsigned* p, unsigned v) {
  on_cpu::sometimes_change_over();
  __atomic_store_n(p, v, __ATOMIC_RELAXED);
}
inline unsigned long long load_acquire_pair(const unsigned* p) {
  on_cpu::sometimes_change_over();
  return __atomic_load_n((const unsigned long long*)p, __ATOMIC_ACQUIRE);
}
inline void store_pair(unsigned* p, unsigned low, unsigned high) {
  on_cpu::sometimes_change_over();
  __atomic_store_n((unsigned long long*)p, low | (unsigned long long)high << 32, __ATOMIC_RELAXED);
}
inline unsigned add_acq_rel(unsigned* p, unsigned v) {
  on_cpu::sometimes_change_over();
  return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL);
}
inline uint4 read_host(const void* p) {
  const auto* words = (const volatile unsigned*)p;
  return {words[0], words[1], words[2], words[3]};
}
inline void prefetch(const void*) {}
inline unsigned short to_bf16(float f) { return on_cpu::to_16_bits(f, 8); }
inline unsigned short to_f16(float f) { return on_cpu::to_16_bits(f, 5); }
inline float from_f16(unsigned short v) {
  if ((v & 0x7c00) == 0x7c00) {
    const float infinity = __builtin_inff();
    return v & 0x3ff ? __builtin_nanf("") : v & 0x8000 ? -infinity : infinity;
  }
  return on_cpu::widen(v, 5, 10);
}
inline unsigned short to_e4m3x2(float high, float low) {
  return on_cpu::to_e4m3(high) << 8 | on_cpu::to_e4m3(low);
}
inline unsigned f16x2_from_e4m3x2(unsigned short pair) {
  auto widened = [](unsigned v) {
    return to_f16((v & 0x7f) == 0x7f ? __builtin_nanf("") : on_cpu::widen(v, 4, 3));
  };
  return (unsigned)widened(pair & 0xff) | (unsigned)widened(pair >> 8) << 16;
}

#define KERNEL(name)                                                                             \
  extern "C" const char* launch_##name(unsigned grid, unsigned block, unsigned long long seed,   \
                                       unsigned number, const unsigned* sizes, void** arguments) { \
    return on_cpu::launch(exchange::name, grid, block, seed, number, sizes, arguments);          \
  }
