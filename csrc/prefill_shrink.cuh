// v[row][rank] = A x for many rows, private factors or (kShared) one for all slices.
//
// Grid: a cluster of 1 to 8 CTAs for each (tile of 64 rows, group of up to 64 ranks), groups innermost; the groups of
// all slices of a fused layer follow one another, so that small ranks read x once. The CTAs of a cluster take the
// chunks of kRound inputs in turn. After each round they add that round's sums in the order of the chunks, every CTA
// for its part of the rows: a row's bits depend neither on its neighbours nor on the size of the cluster.
#pragma once
#include "cluster.cuh"
#include "prefill.cuh"

namespace scute::cuda::prefill {

constexpr int kShrinkThreads = 128;  // each of the four warps has 16 rows
constexpr int kGroup = 8;            // rank blocks of a group
constexpr int kStep = 64;            // inputs of a stage
constexpr int kStages = 4;
constexpr int kRound = 512;  // inputs that a CTA sums before sums are added up
constexpr int kSteps = kRound / kStep;
constexpr int kMaxCluster = 8;

struct ShrinkParams {
  Tenants t;
  const void* x;  // (rows, in), x_stride elements between rows, 16-byte aligned
  int64_t x_stride;
  float* v;  // (rows, slices * v_slice)
  int64_t v_row, v_slice;
  bool v_aligned;
  int in, in_begin;
  int groups, room;  // most groups of a tile; most rank blocks of a group
};

// Shared memory, in this order: this, the stages, two buffers of sums, the sums so far of this CTA's rows.
struct alignas(16) ShrinkShared {
  const void* a[kGroup];  // rank block at the layer's first input
  int column[kGroup];     // of v
  int row[kTileRows];     // -1: nobody's
  int blocks;             // of the group
};

inline size_t shrink_bytes(int room, int peers) {
  const size_t stage = (kTileRows * kStep + room * 8 * kStep) * 2, sums = kTileRows * room * 8 * sizeof(float);
  return sizeof(ShrinkShared) + kStages * stage + 2 * sums + sums / peers;
}

// Looks up the rows and rank blocks of an item; false if there is nothing to do.
template <typename T, bool kShared>
__device__ __forceinline__ bool prepare(const ShrinkParams& p, ShrinkShared& s, const Tile& tile, int group) {
  __syncthreads();
  const int i = threadIdx.x;
  if (i == 0) s.blocks = 0;
  int row = -1;
  if (i < kTileRows && i < tile.rows) {
    row = p.t.perm[tile.begin + i];
    if constexpr (kShared) {
      bool shares = false;
      for (int slice = 0; slice < p.t.slices; ++slice) shares |= sharing_entry(p.t, row, slice) != nullptr;
      if (!shares) row = -1;
    }
  }
  if (i < kTileRows) s.row[i] = row;
  __syncthreads();
  if (row >= 0 && i < kTileRows) s.blocks = -1;  // any row: the set's A may be smaller than a layer nobody adapts
  __syncthreads();
  const bool any = s.blocks != 0;
  __syncthreads();
  if (any && i < kGroup) {
    int block = group * kGroup + i;
    if constexpr (kShared) {
      const SharedSet& set = p.t.sets[tile.slot];
      if (block < set.rank / 8) {
        s.a[i] = reinterpret_cast<const T*>(p.t.arena + set.a) + (block * set.in + p.in_begin) * 8;
        s.column[i] = block * 8;
        atomicMax(&s.blocks, i + 1);
      }
    } else {
      for (int slice = 0; slice < p.t.slices && block >= 0; ++slice) {
        const Entry* entry = slot_entry(p.t, tile.slot, slice);
        const int64_t a = entry->a, meta = entry->meta;
        const int blocks = a == kAbsent ? 0 : entry_rank(meta) / 8;
        if (block < blocks) {
          s.a[i] = reinterpret_cast<const T*>(p.t.arena + a) + static_cast<int64_t>(block) * p.in * 8;
          s.column[i] = slice * static_cast<int>(p.v_slice) + block * 8;
          atomicMax(&s.blocks, i + 1);
        }
        block -= blocks;
      }
    }
  }
  __syncthreads();
  return s.blocks > 0;
}

// One stage: 64 inputs of 64 rows, and of the group's rank blocks. In 16-byte units, placed so that neither the copies
// nor the reads of `multiply` meet in a bank: unit u of row r at u ^ 4 (r % 2), rank r of core matrix c at r ^ 2 (c %
// 4).
template <typename T>
struct Loader {
  const ShrinkParams& p;
  const ShrinkShared& s;
  const T* rows[4];  // those this thread copies; null: zeros
  int unit;

  __device__ __forceinline__ Loader(const ShrinkParams& p, const ShrinkShared& s) : p(p), s(s), unit(threadIdx.x % 8) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = s.row[threadIdx.x / 8 + 16 * i];
      rows[i] = row < 0 ? nullptr : static_cast<const T*>(p.x) + row * p.x_stride;
    }
  }

  __device__ __forceinline__ void load(uint4* stage, int input) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = threadIdx.x / 8 + 16 * i, k = input + unit * 8;
      const bool valid = rows[i] && k < p.in;
      cp_async16(stage + row * 8 + (unit ^ row % 2 * 4), valid ? rows[i] + k : p.x, valid);
    }
    const int core = threadIdx.x % 64 / 8, rank = threadIdx.x % 8;
    const bool valid = input + core * 8 < p.in;
    uint4* weights = stage + kTileRows * 8 + core * 8 + (rank ^ core % 4 * 2);
    for (int block = threadIdx.x / 64; block < s.blocks; block += kShrinkThreads / 64) {
      const T* a = static_cast<const T*>(s.a[block]) + static_cast<int64_t>(input) * 8 + (core * 8 + rank) * 8;
      cp_async16(weights + block * 64, valid ? a : s.a[block], valid);
    }
  }
};

template <typename T>
__device__ __forceinline__ void multiply(const uint4* stage, int blocks, float (&sums)[kGroup][4]) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint4* x = stage + (threadIdx.x / 32 * 16 + g) * 8;
  const uint4* weights = stage + kTileRows * 8 + (g ^ t * 2);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int unit = half * 4 + t;
    const uint4 low = x[unit ^ g % 2 * 4], high = x[64 + (unit ^ g % 2 * 4)];
#pragma unroll
    for (int block = 0; block < kGroup; ++block)
      if (block < blocks) mma32<T>(sums[block], low, high, weights[block * 64 + unit * 8]);
  }
}

__device__ __forceinline__ void store4(float* to, const float4& value, bool aligned) {
  if (aligned) {
    *reinterpret_cast<float4*>(to) = value;
  } else {
    to[0] = value.x, to[1] = value.y, to[2] = value.z, to[3] = value.w;
  }
}

template <typename T, bool kShared>
__global__ void __launch_bounds__(kShrinkThreads, 4) shrink_kernel(const __grid_constant__ ShrinkParams p) {
  extern __shared__ __align__(16) unsigned char staging[];
  ShrinkShared& s = *reinterpret_cast<ShrinkShared*>(staging);
  uint4* stages = reinterpret_cast<uint4*>(staging + sizeof(ShrinkShared));
  const int stage_units = kTileRows * 8 + p.room * 64, sum_floats = kTileRows * p.room * 8;
  float* buffers = reinterpret_cast<float*>(stages + kStages * stage_units);
  float4* totals = reinterpret_cast<float4*>(buffers + 2 * sum_floats);

  const int peers = cluster_size(), peer = cluster_rank(), lane = threadIdx.x % 32;
  const int all_chunks = (p.in + kRound - 1) / kRound, rounds = (all_chunks + peers - 1) / peers;
  const int steps = (all_chunks - peer + peers - 1) / peers * kSteps;  // of this CTA
  const int owned = kTileRows / peers;                                 // rows whose totals this CTA adds up
  int turn = 0;
  pdl_trigger();
  pdl_wait();
  const int items = *p.t.count * p.groups;
  for (int item = blockIdx.x / peers; item < items; item += gridDim.x / peers) {
    if (!prepare<T, kShared>(p, s, p.t.tiles[item / p.groups], item % p.groups)) continue;
    const Loader<T> loader(p, s);
    const int blocks = s.blocks, width = blocks * 8;
    int ahead = 0;
    const auto fetch = [&] {
      const int input = (ahead / kSteps * peers + peer) * kRound + ahead % kSteps * kStep;
      if (ahead < steps) loader.load(stages + ahead % kStages * stage_units, input);
      cp_async_commit();
      ++ahead;
    };
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) fetch();

    for (int round = 0; round < rounds; ++round, turn ^= 1) {
      const int chunk = round * peers + peer;
      float* mine = buffers + turn * sum_floats;
      if (chunk < all_chunks) {
        float sums[kGroup][4] = {};
        for (int step = 0; step < kSteps; ++step) {
          cp_async_wait<kStages - 2>();
          __syncthreads();  // the oldest stage is there for all, and the one before it is free
          const int current = ahead - (kStages - 1);
          fetch();
          multiply<T>(stages + current % kStages * stage_units, blocks, sums);
        }
        float* to = mine + (threadIdx.x / 32 * 16 + lane / 4) * width + lane % 4 * 2;
#pragma unroll
        for (int block = 0; block < kGroup; ++block)
          if (block < blocks) {
            *reinterpret_cast<float2*>(to + block * 8) = make_float2(sums[block][0], sums[block][1]);
            *reinterpret_cast<float2*>(to + block * 8 + 8 * width) = make_float2(sums[block][2], sums[block][3]);
          }
      }
      // A buffer is written again two rounds later: behind the barrier of the round between, which nobody passes
      // before everybody has read this one.
      if (peers == 1) __syncthreads();
      else cluster_sync();
      const bool last = round + 1 == rounds;
      for (int i = threadIdx.x; i < owned * width / 4; i += kShrinkThreads) {
        const int at = peer * owned * width / 4 + i, row = s.row[at / (width / 4)], rank = at % (width / 4) * 4;
        if (row < 0) continue;
        float4 total = round ? totals[i] : make_float4(0, 0, 0, 0);
        for (int other = 0; other < peers && round * peers + other < all_chunks; ++other) {
          const float* from = peers == 1 ? mine : peer_address(mine, other);
          const float4 sum = reinterpret_cast<const float4*>(from)[at];
          total.x += sum.x, total.y += sum.y, total.z += sum.z, total.w += sum.w;
        }
        if (last) {
          store4(p.v + row * p.v_row + s.column[rank / 8] + rank % 8, total, p.v_aligned);
        } else {
          totals[i] = total;
        }
      }
    }
  }
  if (peers > 1) cluster_sync();  // nobody leaves while its sums may still be read
}

// CTAs of a cluster: as many as it takes to give every multiprocessor two.
inline int cluster_for(int64_t items, int chunks) {
  int peers = 1;
  while (peers < kMaxCluster && 2 * peers <= chunks && items * peers < 2 * multiprocessors()) peers *= 2;
  return peers;
}

// One slice of v serves all of the layer's if the factors are shared.
template <bool kShared>
void launch_shrink(const at::Tensor& x, const Tenants& t, int in_begin, at::Tensor& v) {
  const int64_t v_slices = kShared ? 1 : t.slices, rows = x.size(0);
  ShrinkParams p{t, x.const_data_ptr(), x.stride(0), v.data_ptr<float>(), v.stride(1)};
  p.v_slice = v.size(2) / v_slices;
  p.v_aligned = reinterpret_cast<uintptr_t>(p.v) % 16 == 0 && (p.v_row | p.v_slice) % 4 == 0;
  p.in = static_cast<int>(x.size(1));
  p.in_begin = in_begin;
  const int most = std::max(1, static_cast<int>(p.v_slice / 8 * v_slices));
  p.groups = (most + kGroup - 1) / kGroup;
  p.room = std::min(most, kGroup);
  const int64_t items = most_tiles(rows, t.slots) * p.groups;
  const int64_t likely = (rows + kTileRows - 1) / kTileRows * p.groups;
  SCUTE_PREFILL_DISPATCH(x.scalar_type(), [&] {
    static const bool clusters = has_code_for_90(shrink_kernel<scalar_t, kShared>);
    const int peers = clusters ? cluster_for(likely, (p.in + kRound - 1) / kRound) : 1;
    const int64_t count = std::min<int64_t>(items, 64 * multiprocessors() / peers);
    launch_clusters(shrink_kernel<scalar_t, kShared>, count, peers, kShrinkThreads, shrink_bytes(p.room, peers), p);
  });
}

// False if this path does not serve what is asked for.
inline bool shrink(const at::Tensor& x, const at::Tensor& arena, const at::Tensor& table, const at::Tensor& plan,
                   int64_t tile_rows, int64_t module, int64_t slices, at::Tensor& v) {
  if (!serves(x, tile_rows, slices) || !rows_aligned(x) || v.size(0) > 1) return false;
  launch_shrink<false>(x, tenants_of(arena, table, plan, x.size(0), module, slices), 0, v);
  return true;
}
inline bool project(const at::Tensor& x, const at::Tensor& row_slot, const at::Tensor& arena, const at::Tensor& table,
                    const at::Tensor& sets, const at::Tensor& plan, int64_t tile_rows, int64_t module, int64_t slices,
                    int64_t in_begin, at::Tensor& v) {
  if (!serves(x, tile_rows, slices) || !rows_aligned(x) || v.size(0) > 1) return false;
  const Tenants t = tenants_of(arena, table, plan, x.size(0), module, slices, &sets, &row_slot);
  launch_shrink<true>(x, t, static_cast<int>(in_begin), v);
  return true;
}

}  // namespace scute::cuda::prefill
