// Both sides of one exchange. Compiled at start with NVRTC, so nothing is included.
//
// A slab is owned by an attention server, and its captured kernels name addresses in it only. An MLP
// rank reaches slabs through a table in its own memory. Flags between processes are stored with
// release and loaded with acquire at system scope. Where everything lies is said by layout.py, whose
// names come as definitions: see kernels.py.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned char u8;
typedef unsigned short u16;

#define DETACHED 0u
#define ATTACHED 1u

#define SPINS_BEFORE_SLEEP 8192
#define SPINS_PER_LOOK 32  // between two looks at the word that ends a wait early
#define SPINS_PER_HOST_LOOK 1024  // at the same in host memory, for half a millisecond

// What a kernel of the MLP side found wrong; units.py has the words for it.
#define ERROR_HEADER 1u
#define ERROR_ROWS 2u

#ifndef AFD_ON_CPU  // unit tests run this file on a CPU, and have their own of these
__device__ __forceinline__ u32 load_acquire(const u32* p) {
  u32 v;
  asm volatile("ld.acquire.sys.global.u32 %0,[%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ u32 load_relaxed(const u32* p) {
  u32 v;
  asm volatile("ld.relaxed.sys.global.u32 %0,[%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void store_release(u32* p, u32 v) {
  asm volatile("st.release.sys.global.u32 [%0],%1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ void store_relaxed(u32* p, u32 v) {
  asm volatile("st.relaxed.sys.global.u32 [%0],%1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ u64 load_acquire_pair(const u32* p) {
  u64 v;
  asm volatile("ld.acquire.sys.global.u64 %0,[%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void store_pair(u32* p, u32 low, u32 high) {
  asm volatile("st.relaxed.sys.global.u64 [%0],%1;" ::"l"(p), "l"(low | (u64)high << 32) : "memory");
}
__device__ __forceinline__ u32 add_acq_rel(u32* p, u32 v) {
  u32 old;
  asm volatile("atom.add.acq_rel.sys.global.u32 %0,[%1],%2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
  return old;
}
__device__ __forceinline__ uint4 read_host(const void* p) {
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// What another process streams through the GPU meanwhile leaves nothing in L2 that is not asked for.
__device__ __forceinline__ void prefetch(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

__device__ __forceinline__ u16 to_bf16(float f) {
  u16 v;
  asm("cvt.rn.bf16.f32 %0,%1;" : "=h"(v) : "f"(f));
  return v;
}
__device__ __forceinline__ u16 to_f16(float f) {
  u16 v;
  asm("cvt.rn.f16.f32 %0,%1;" : "=h"(v) : "f"(f));
  return v;
}
__device__ __forceinline__ float from_f16(u16 v) {
  float f;
  asm("cvt.f32.f16 %0,%1;" : "=f"(f) : "h"(v));
  return f;
}
__device__ __forceinline__ u16 to_e4m3x2(float high, float low) {
  u16 v;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0,%1,%2;" : "=h"(v) : "f"(high), "f"(low));
  return v;
}
__device__ __forceinline__ u32 f16x2_from_e4m3x2(u16 pair) {
  u32 v;
  asm("cvt.rn.f16x2.e4m3x2 %0,%1;" : "=r"(v) : "h"(pair));
  return v;
}
#endif

// Called in the turns of a loop that waits; false once `*alive` is not `living` any more, or when the
// host set `*is_aborted`, if there is such a word. `used_next` is kept in L2.
__device__ __forceinline__ bool may_wait(u32 spins, const u32* alive, u32 living,
                                         const void* used_next, const u32* is_aborted) {
  if (spins % SPINS_PER_LOOK == SPINS_PER_LOOK - 1) {
    prefetch(used_next), prefetch((const u8*)used_next + 128);
    if (load_relaxed(alive) != living) return false;
    if (is_aborted && spins % SPINS_PER_HOST_LOOK == SPINS_PER_HOST_LOOK - 1 &&
        load_relaxed(is_aborted))
      return false;
  }
  if (spins > SPINS_BEFORE_SLEEP) __nanosleep(200);
  return true;
}

// Polls `word` until it is `wanted`; false when `*alive` stopped being 1 first.
__device__ __forceinline__ bool wait_for(const u32* word, u32 wanted, const u32* alive) {
  for (u32 spins = 0; load_acquire(word) != wanted; spins++)
    if (!may_wait(spins, alive, 1, alive, 0)) return false;
  return true;
}

// Has every row of what is in a slot been replied to by every rank?
__device__ __forceinline__ bool is_replied(const u32* words) {
  const u64 replies = load_acquire_pair(words + NUM_REPLIED);
  return (u32)replies == (u32)(replies >> 32);
}

// A hundred times as long as the last block of a dispatch takes.
__device__ __forceinline__ void pause() {
  for (u32 i = 0; i < 32; i++) __nanosleep(10000);
}

// True in every thread of the block that finishes last; what all blocks wrote is then visible to it.
__device__ __forceinline__ bool is_last_block(u32* counter) {
  __shared__ u32 is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    is_last = atomicInc(counter, gridDim.x - 1) == gridDim.x - 1;
    if (is_last) __threadfence();
  }
  __syncthreads();
  return is_last;
}

// Eight values of the model's dtype as floats, and back.
#if DTYPE_FLOAT32
#define VALUES_PER_VECTOR 4
#else
#define VALUES_PER_VECTOR 8
#endif
__device__ __forceinline__ void unpack(uint4 v, float* f) {
#if DTYPE_FLOAT32
  f[0] = __uint_as_float(v.x), f[1] = __uint_as_float(v.y);
  f[2] = __uint_as_float(v.z), f[3] = __uint_as_float(v.w);
#else
  u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
#if DTYPE_BFLOAT16
    f[2 * i] = __uint_as_float(w[i] << 16);
    f[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
#else
    f[2 * i] = from_f16((u16)w[i]);
    f[2 * i + 1] = from_f16((u16)(w[i] >> 16));
#endif
  }
#endif
}
__device__ __forceinline__ uint4 pack(const float* f) {
#if DTYPE_FLOAT32
  return make_uint4(__float_as_uint(f[0]), __float_as_uint(f[1]), __float_as_uint(f[2]),
                    __float_as_uint(f[3]));
#else
  u32 w[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
#if DTYPE_BFLOAT16
    const u16 low = to_bf16(f[2 * i]), high = to_bf16(f[2 * i + 1]);
#else
    const u16 low = to_f16(f[2 * i]), high = to_f16(f[2 * i + 1]);
#endif
    w[i] = (u32)low | (u32)high << 16;
  }
  return make_uint4(w[0], w[1], w[2], w[3]);
#endif
}

// ---- attention side ----

#define LANES_PER_GROUP (128 / VALUES_PER_VECTOR)
#if DTYPE_FLOAT32
#define GROUP_MASK 0xffffffffu
#else
#define GROUP_MASK (0xffffu << (threadIdx.x & 16))
#endif

// One vector of a row to e4m3; the threads of a group of 128 values are neighbours in a warp.
__device__ __forceinline__ void store_fp8(uint4 v, u8* row, float* scales, u32 vector) {
#if WITH_FP8
  float f[VALUES_PER_VECTOR], largest = 1e-10f;
  unpack(v, f);
#pragma unroll
  for (int i = 0; i < VALUES_PER_VECTOR; i++) largest = fmaxf(largest, fabsf(f[i]));
#pragma unroll
  for (int lane = LANES_PER_GROUP / 2; lane; lane /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(GROUP_MASK, largest, lane, LANES_PER_GROUP));
  float scale = largest / 448.0f;
  u32 w[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < VALUES_PER_VECTOR / 2; i++) {
    const u16 pair = to_e4m3x2(f[2 * i + 1] / scale, f[2 * i] / scale);
    w[i / 2] |= (u32)pair << 16 * (i % 2);
  }
#if DTYPE_FLOAT32
  *(u32*)(row + vector * 4) = w[0];
#else
  *(uint2*)(row + vector * 8) = make_uint2(w[0], w[1]);
#endif
  if (vector % LANES_PER_GROUP == 0) scales[vector / LANES_PER_GROUP] = scale;
#endif
}

// The host may read words of two rings; their sum, sum_of_ring() in layout.py, tells it so.
__device__ void ring(u32* words, u32* doorbell) {
  u32 rings = ++words[NUM_RINGS], sum = rings;
  for (u32 i = 0; i < 10; i++) {
    sum = sum * 31 + words[i];
    store_relaxed(doorbell + 1 + i, words[i]);
  }
  store_relaxed(doorbell + 11, sum);
  __threadfence_system();
  store_release(doorbell, rings);
}

// What the next dispatches say of their step. A kernel, since a copy of twenty bytes would change over
// to the copy engine and back.
extern "C" __global__ void afd_stage_step(u32* control, u32 step_low, u32 step_high, u32 kind,
                                          u32 num_micro_batches, u32 num_rows) {
  u32* step = control + STEP_WORDS;
  step[0] = step_low, step[1] = step_high;
  step[2] = kind, step[3] = num_micro_batches, step[4] = num_rows;
}

// Puts the rows of one micro-batch into its slot and tells every rank. One block for each row that
// there may be; those beyond the step's own rows never leave.
extern "C" __global__ void afd_dispatch(u32* control, u32* words, u32* doorbell,
                                        const uint4* hidden_states, const u32* topk_ids,
                                        const u32* topk_weights, u8* to_states, float* to_scales,
                                        u32* to_ids, u32* to_weights, u32 vectors_per_row,
                                        u32 top_k, u32 layer_id, u32 micro_batch_id, u32 first_row,
                                        u32 rings) {
  const u32 row = blockIdx.x, lane = threadIdx.x;
  const uint4* from = hidden_states + (u64)row * vectors_per_row;
  uint4 v = make_uint4(0, 0, 0, 0);
  if (lane < vectors_per_row) v = from[lane];
  // NOTE: every block counts itself below, whatever the host does to the link meanwhile.
  const bool is_attached = load_relaxed(control + LINK) == ATTACHED;
  const u32* step = control + STEP_WORDS;
  const u32 rows_of_step = step[4], stop = words[ROWS_BEFORE] + gridDim.x;
  const u32 left = rows_of_step > first_row ? rows_of_step - first_row : 0;
  const u32 num_rows = left < gridDim.x ? left : gridDim.x;
  const bool is_sent = is_attached && num_rows;
  // The header goes first, of a warp that is not the one which counts; rows are told of one by one.
  if (is_sent && row == 0 && lane == blockDim.x - 32) {
    words[HEADER + 0] = control[EPOCH], words[HEADER + 1] = control[EPOCH + 1];
    words[HEADER + 2] = step[0], words[HEADER + 3] = step[1];
    words[HEADER + 4] = layer_id, words[HEADER + 5] = micro_batch_id;
    words[HEADER + 6] = num_rows;
    words[HEADER + 7] = step[2], words[HEADER + 8] = step[3];
    words[ROWS_WANTED] = stop;
    store_relaxed(words + ALL_REPLIED, 0);
    store_pair(words + NUM_REPLIED, 0, num_rows * control[NUM_RANKS]);
    store_release(words, words[0] + 1);
  }
  if (is_attached && !num_rows && row == 0 && lane == 0) store_pair(words + NUM_REPLIED, 0, 0);
  if (is_attached && row < num_rows) {
    if (to_scales) {
      u8* to = to_states + (u64)row * vectors_per_row * VALUES_PER_VECTOR;
      float* scales = to_scales + (u64)row * (vectors_per_row / LANES_PER_GROUP);
      for (u32 i = lane; i < vectors_per_row; i += blockDim.x)
        store_fp8(i == lane ? v : from[i], to, scales, i);
    } else {
      uint4* to = (uint4*)to_states + (u64)row * vectors_per_row;
      for (u32 i = lane; i < vectors_per_row; i += blockDim.x) to[i] = i == lane ? v : from[i];
    }
    for (u32 i = lane; i < top_k; i += blockDim.x) {
      to_ids[(u64)row * top_k + i] = topk_ids[(u64)row * top_k + i];
      to_weights[(u64)row * top_k + i] = topk_weights[(u64)row * top_k + i];
    }
  }
  __syncthreads();
  if (lane != 0 || add_acq_rel(words + ROWS_HERE, 1) + 1 != stop) return;
  words[ROWS_BEFORE] = stop;
  if (is_sent && rings) ring(words, doorbell);
}

// One warp; ends when every rank has replied, when the link is no longer attached, or when the host
// says so in a word of its own: a host that frees GPU memory holds up every launch until the wait is
// over, so no kernel could end it.
extern "C" __global__ void afd_wait(const u32* control, const u32* words, const u32* is_aborted) {
  if (threadIdx.x != 0 || load_relaxed(control + LINK) != ATTACHED) return;
  for (u32 spins = 0; !is_replied(words); spins++)
    if (!may_wait(spins, control + LINK, ATTACHED, words, is_aborted)) return;
}

// Adds the partial sums in rank order into those of rank 0, in float32.
extern "C" __global__ void afd_sum(const u32* control, uint4* replies, u64 vectors_per_rank,
                                   u32 num_vectors) {
  const u32 num_ranks = control[NUM_RANKS];
  if (num_ranks < 2 || load_relaxed(control + LINK) != ATTACHED) return;
  for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < num_vectors; i += gridDim.x * blockDim.x) {
    float sum[VALUES_PER_VECTOR], next[VALUES_PER_VECTOR];
    unpack(replies[i], sum);
    for (u32 rank = 1; rank < num_ranks; rank++) {
      unpack(replies[rank * vectors_per_rank + i], next);
#pragma unroll
      for (int j = 0; j < VALUES_PER_VECTOR; j++) sum[j] += next[j];
    }
    replies[i] = pack(sum);
  }
}

// The host's word on the link, one thread for each slot. Attaching asks anew for what is pending, of
// every rank; anything else gives it up.
extern "C" __global__ void afd_set_link(u32* control, u8* slots, u64 slot_bytes, u32* doorbells,
                                        u32 link, u32 epoch_low, u32 epoch_high, u32 num_ranks) {
  u32* words = (u32*)(slots + threadIdx.x * slot_bytes);
  if (link != ATTACHED) {
    if (threadIdx.x == 0) store_release(control + LINK, link);
    __syncthreads();
    store_pair(words + NUM_REPLIED, 0, 0);
    store_release(words + ALL_REPLIED, 1);
    return;
  }
  if (threadIdx.x == 0) {
    control[EPOCH] = epoch_low, control[EPOCH + 1] = epoch_high;
    control[NUM_RANKS] = num_ranks;
    __threadfence_system();
    store_release(control + LINK, ATTACHED);
  }
  __syncthreads();
  // NOTE: a dispatch may run beside this. One that took the epoch before has ended after the pause,
  // and is asked for here; one that takes the new epoch asks by itself, and must not be disturbed.
  pause();
  if (is_replied(words)) return;
  pause();  // its header may be seen later than that it is pending
  if (load_relaxed(words + HEADER) == epoch_low && load_relaxed(words + HEADER + 1) == epoch_high)
    return;
  words[HEADER] = epoch_low, words[HEADER + 1] = epoch_high;
  store_pair(words + NUM_REPLIED, 0, words[HEADER + 6] * num_ranks);
  ring(words, doorbells + threadIdx.x * DOORBELL_LINE_WORDS);
}

// ---- MLP side ----

struct Peer {       // one row of the table; peer_table.py writes it
  u8* slab;
  u64 slot_bytes;   // from one slot to the next
  u64 states, scales, ids, weights, reply;  // offsets in a slot; `reply` is this rank's
  u32 epoch_low, epoch_high;
  u32 is_alive, is_fp8;
};
struct Member {     // of a unit, as the host wrote it
  u32 peer, slot, num_rows, seq;
};
struct Unit {
  u32 ticket, layer_index, layer_id, num_members;
  u32 first_row, num_rows, unused[2];
  Member members[1];
};
struct Planned {    // of a member, as the plan kernel left it; without rows when it is dead
  u8 *states, *scales, *ids, *weights, *reply;
  u32* words;
  const u32* control;             // of its slab
  u32 epoch_low, epoch_high;      // under which it is served
  u32 peer, is_fp8, first, stop;  // rows of the unit, first .. stop - 1
  u32 num_wanted, unused;         // rows that all ranks together reply with
};
struct Plan {
  u32 ticket, layer_index, num_members, num_rows;
  u32 first_row, next_unit, blocks_done, unused;
  Planned members[1];
};

// One warp. Takes the next unit, waits for the rows of each member, and lays them out in order.
// NOTE: it waits beside kernels that fill an SM but for 1024 registers: FlashAttention 3 and cuBLAS
// use 384 threads of 168. With more it would keep them from one SM for as long as it waits.
extern "C" __global__ void __maxnreg__(32)
    afd_plan(Plan* plan, const u8* units, u32 unit_bytes, u32 num_units, const Peer* peers,
             u32* error, u32 bucket) {
  const Unit* unit = (const Unit*)(units + (u64)(plan->next_unit % num_units) * unit_bytes);
  const u32 lane = threadIdx.x;
  // All loads from host memory are on their way before the first one is used.
  uint4 member = read_host(unit->members + lane);
  const uint4 first_words = read_host(&unit->ticket), last_words = read_host(&unit->first_row);
  const u32 num_members = first_words.w, layer_id = first_words.z, piece_rows = last_words.y;
  u32 total = 0;
  for (u32 i = lane;; i += 32) {
    u32 num_rows = 0;
    if (i < num_members) {
      const Peer* peer = peers + member.x;
      u8* base = peer->slab + member.y * peer->slot_bytes;
      const u32* words = (const u32*)base;
      Planned* planned = plan->members + i;
      planned->states = base + peer->states, planned->scales = base + peer->scales;
      planned->ids = base + peer->ids, planned->weights = base + peer->weights;
      planned->reply = base + peer->reply;
      planned->control = (const u32*)peer->slab - CONTROL_WORDS;
      planned->epoch_low = peer->epoch_low, planned->epoch_high = peer->epoch_high;
      planned->peer = member.x, planned->is_fp8 = peer->is_fp8;
      planned->words = (u32*)base;
      if (load_relaxed(&peer->is_alive) == 1 && wait_for(words, member.w, &peer->is_alive)) {
        const u32 got_rows = load_relaxed(words + HEADER + 6);
        const u32 got_layer_id = load_relaxed(words + HEADER + 4);
        planned->num_wanted = load_relaxed(words + NUM_WANTED);
        if (wait_for(words + ROWS_HERE, load_relaxed(words + ROWS_WANTED), &peer->is_alive) &&
            load_relaxed(&peer->is_alive) == 1) {
          if (got_layer_id == layer_id && got_rows == member.z) {
            num_rows = min(got_rows, piece_rows);
          } else {
            store_relaxed(error + 1, member.x), store_relaxed(error + 2, layer_id);
            store_relaxed(error + 3, got_layer_id), store_relaxed(error + 4, got_rows);
            store_release(error, got_layer_id != layer_id ? ERROR_HEADER : ERROR_ROWS);
          }
        }
      }
    }
    __syncwarp();
    u32 stop = num_rows;
#pragma unroll
    for (u32 distance = 1; distance < 32; distance *= 2) {
      const u32 before = __shfl_up_sync(0xffffffffu, stop, distance);
      if (lane >= distance) stop += before;
    }
    stop += total;
    if (i < num_members) {
      plan->members[i].first = min(stop - num_rows, bucket);
      plan->members[i].stop = min(stop, bucket);
    }
    total = __shfl_sync(0xffffffffu, stop, 31);
    if (i - lane + 32 >= num_members) break;
    member = read_host(unit->members + i + 32);
  }
  if (lane == 0) {
    plan->num_rows = min(total, bucket), plan->num_members = num_members;
    plan->ticket = first_words.x, plan->layer_index = first_words.y;
    plan->first_row = last_words.x;
    plan->next_unit++;
  }
}

__device__ __forceinline__ const Planned* member_of(const Plan* plan, u32 row) {
  const Planned* member = plan->members;
  while (row >= member->stop) member++;
  return member;
}

// One block for each row of the bucket: rows, weights, and ids as this rank counts its experts.
extern "C" __global__ void afd_pull(const Plan* plan, uint4* to_states, u32* to_ids,
                                    u32* to_weights, u64* expert_counts, u32 vectors_per_row,
                                    u32 top_k, u32 first_expert, u32 num_experts) {
  const u32 row = blockIdx.x, lane = threadIdx.x;
  if (row >= plan->num_rows) {
    for (u32 i = lane; i < top_k; i += blockDim.x) {
      to_ids[(u64)row * top_k + i] = 0xffffffffu;
      to_weights[(u64)row * top_k + i] = 0;
    }
    return;
  }
  const Planned* member = member_of(plan, row);
  const u64 source = row - member->first + plan->first_row;
  uint4* to = to_states + (u64)row * vectors_per_row;
  if (member->is_fp8) {
#if WITH_FP8
    const u8* from = member->states + source * vectors_per_row * VALUES_PER_VECTOR;
    const float* scales =
        (const float*)member->scales + source * (vectors_per_row / LANES_PER_GROUP);
    for (u32 i = lane; i < vectors_per_row; i += blockDim.x) {
      float scale = scales[i / LANES_PER_GROUP], f[VALUES_PER_VECTOR];
      u32 w[2];
#if DTYPE_FLOAT32
      w[0] = ((const u32*)from)[i];
#else
      uint2 packed = ((const uint2*)from)[i];
      w[0] = packed.x, w[1] = packed.y;
#endif
#pragma unroll
      for (int j = 0; j < VALUES_PER_VECTOR / 2; j++) {
        const u32 halves = f16x2_from_e4m3x2((u16)(w[j / 2] >> 16 * (j % 2)));
        f[2 * j] = from_f16((u16)halves);
        f[2 * j + 1] = from_f16((u16)(halves >> 16));
        f[2 * j] *= scale, f[2 * j + 1] *= scale;
      }
      to[i] = pack(f);
    }
#endif
  } else {
    const uint4* from = (const uint4*)member->states + source * vectors_per_row;
    for (u32 i = lane; i < vectors_per_row; i += blockDim.x) to[i] = from[i];
  }
  const u32* ids = (const u32*)member->ids + source * top_k;
  const u32* weights = (const u32*)member->weights + source * top_k;
  for (u32 i = lane; i < top_k; i += blockDim.x) {
    const u32 local = ids[i] - first_expert;
    const bool is_ours = local < num_experts;
    to_ids[(u64)row * top_k + i] = is_ours ? local : 0xffffffffu;
    to_weights[(u64)row * top_k + i] = weights[i];
    if (is_ours) atomicAdd(expert_counts + (u64)plan->layer_index * num_experts + local, 1ull);
  }
}

// One block for each row of the bucket: partial sums into the members' slots, each told of at once.
extern "C" __global__ void afd_push(Plan* plan, const Peer* peers, const uint4* partial, u32* done,
                                    u32 vectors_per_row) {
  const u32 row = blockIdx.x, lane = threadIdx.x;
  if (row < plan->num_rows) {
    const Planned* member = member_of(plan, row);
    const u32* control = member->control;
    u32 is_alive = 0, epoch_low = 0, epoch_high = 0;
    if (lane == 0) {
      is_alive = load_relaxed(&peers[member->peer].is_alive);
      epoch_low = load_relaxed(control + EPOCH), epoch_high = load_relaxed(control + EPOCH + 1);
    }
    const u64 target = row - member->first + plan->first_row;
    uint4* to = (uint4*)member->reply + target * vectors_per_row;
    const uint4* from = partial + (u64)row * vectors_per_row;
    for (u32 i = lane; i < vectors_per_row; i += blockDim.x) to[i] = from[i];
    __syncthreads();
    // NOTE: a server that attached anew meanwhile hears from this rank under its new epoch only.
    if (lane == 0 && is_alive == 1 && epoch_low == member->epoch_low &&
        epoch_high == member->epoch_high &&
        add_acq_rel(member->words + NUM_REPLIED, 1) + 1 == member->num_wanted)
      store_release(member->words + ALL_REPLIED, 1);
  }
  if (is_last_block(&plan->blocks_done) && lane == 0) store_relaxed(done, plan->ticket);
}
