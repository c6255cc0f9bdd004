// Partial sums v[chunk][row][rank] = A x, for private factors (shrink) and for shared ones (vera).
#pragma once
#include "check.h"
#include "launch.h"
#include "work.cuh"

namespace scute::cuda {

struct ShrinkParams {
  const void* x;        // (rows, in), x_stride elements between rows
  int64_t x_stride;
  const char* arena;
  const Entry* table;   // of the first slice's module; modules entries between slots
  int modules, slices;
  WorkList list;
  float* v;             // (chunks, rows, slices * stride)
  int64_t v_chunk, v_row, stride;
  int in, chunks;
  // vera only: one matrix for all slices, of which the layer uses inputs in_begin ..
  const SharedSet* sets;
  const int32_t* row_slot;
  int slots, in_begin;
};

// Whether a row's tenant has a shared term for this slice of the layer.
__device__ __forceinline__ bool row_shares(const Entry* table, int modules, int slots, const int32_t* row_slot, int row,
                                           int slice) {
  const int slot = row_slot[row];
  return slot >= 0 && slot < slots && table[static_cast<int64_t>(slot) * modules + slice].d != kAbsent;
}

__device__ __forceinline__ bool row_shares(const ShrinkParams& p, int row) {
  bool any = false;
  for (int i = 0; i < p.slices; ++i) any |= row_shares(p.table, p.modules, p.slots, p.row_slot, row, i);
  return any;
}

__device__ __forceinline__ int groups_of(int rank8) { return (rank8 + 15) / 16; }

// Units of work of one piece: (chunk, group of 16 ranks of one slice); without chunks in v, a unit does them all.
template <bool kShared>
struct ShrinkCost {
  const ShrinkParams& p;

  __device__ int operator()(const Tile& tile, const int32_t* perm, Slice (&slice)[kMaxSlices]) const {
    int groups = 0;
    if constexpr (kShared) {
      bool any = false;
      for (int i = 0; i < tile.rows; ++i) any |= row_shares(p, perm[tile.begin + i]);
      const SharedSet& set = p.sets[tile.slot];
      slice[0] = {set.a, any ? static_cast<int>(set.rank) : -1};
      for (int i = 1; i < kMaxSlices; ++i) slice[i].rank8 = -1;
      if (any) groups = groups_of(slice[0].rank8);
    } else {
      const Entry* entry = p.table + static_cast<int64_t>(tile.slot) * p.modules;
#pragma unroll
      for (int i = 0; i < kMaxSlices; ++i) {
        slice[i].offset = kAbsent;
        if (i < p.slices) slice[i] = {entry[i].a, entry_rank(entry[i].meta)};
      }
#pragma unroll
      for (int i = 0; i < kMaxSlices; ++i) {
        if (slice[i].offset == kAbsent) slice[i].rank8 = -1;
        else groups += groups_of(slice[i].rank8);
      }
    }
    return groups * p.chunks;
  }
};

struct ShrinkUnit {
  const void* a;      // first rank block of the group, at the layer's first input
  int64_t block;      // elements from one rank block to the next
  bool second;        // the group has a second rank block
  int column, chunk;  // of v
  int begin, rows;    // of the piece
};

template <typename T, bool kShared>
__device__ bool next_unit(const ShrinkParams& p, Cursor<ShrinkCost<kShared>>& cursor, ShrinkUnit& unit) {
  Piece piece;
  if (!cursor.find(piece)) return false;
  ++cursor.position;
  // Chunks innermost: a group's follow one another in memory.
  int group = p.chunks == 1 ? piece.offset : quotient(piece.offset, p.chunks);
  unit.chunk = piece.offset - group * p.chunks;
  unit.begin = piece.begin;
  unit.rows = piece.rows;
  Slice slice{};
  int column = 0;
#pragma unroll
  for (int i = 0; i < kMaxSlices; ++i) {
    const Slice here = cursor.shared.slice[i][piece.index];
    const int size = here.rank8 < 0 ? 0 : groups_of(here.rank8);
    if (group >= 0 && group < size) {
      slice = here;
      column = i * static_cast<int>(p.stride) + group * 16;
      unit.second = group * 16 + 8 < here.rank8;
      unit.block = group * 2;
    }
    group -= size;
  }
  const int64_t in = kShared ? p.sets[piece.slot].in : p.in;
  unit.a = reinterpret_cast<const T*>(p.arena + slice.offset) + (unit.block * in + p.in_begin) * 8;
  unit.block = in * 8;
  unit.column = column;
  return true;
}

constexpr int kSteps = kChunk / (kWarps * 32);  // products of 32 inputs a warp does for one chunk

// A warp's share of one chunk of the group's weights: eight 16-byte loads in flight a lane.
template <typename T>
__device__ __forceinline__ void load_unit(const ShrinkParams& p, const ShrinkUnit& unit, uint4 (&w)[kSteps][2]) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int eight = (unit.chunk * kWarps + threadIdx.x / 32) * kSteps * 4 + step * 4 + t;
    const T* a = static_cast<const T*>(unit.a) + static_cast<int64_t>(eight) * 64 + g * 8;
    w[step][0] = w[step][1] = make_uint4(0, 0, 0, 0);
    if (eight < p.in / 8) {
      w[step][0] = load_weights(a);
      if (unit.second) w[step][1] = load_weights(a + unit.block);
    }
  }
}

// 16 bit. The group's 16 ranks are the rows of the product, 8 tokens its columns. Each warp sums a quarter of the chunk.
template <typename T, bool kShared>
__global__ void __launch_bounds__(kThreads, 5) shrink_kernel(const __grid_constant__ ShrinkParams p) {
  __shared__ WorkShared work;
  __shared__ float partial[2][kWarps][kTokens][16 + 1];
  pdl_trigger();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  Cursor<ShrinkCost<kShared>> cursor(work, p.list, {p});
  const int passes = p.chunks == 1 ? (p.in + kChunk - 1) / kChunk : 1;

  ShrinkUnit unit;
  uint4 w[kSteps][2];
  float total = 0;
  bool fetched = false;
  for (int turn = 0;; turn ^= 1) {
    const ShrinkUnit done = unit;
    bool last = true;
    if (fetched) {
      const T* row = nullptr;
      if (g < unit.rows) row = static_cast<const T*>(p.x) + p.list.perm[unit.begin + g] * p.x_stride;
      uint4 x[kSteps];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int eight = (unit.chunk * kWarps + warp) * kSteps * 4 + step * 4 + t;
        x[step] = make_uint4(0, 0, 0, 0);
        if (row && eight < p.in / 8) x[step] = *reinterpret_cast<const uint4*>(row + eight * 8);
      }
      float even[4] = {}, odd[4] = {};
#pragma unroll
      for (int step = 0; step < kSteps; step += 2) {
        mma32<T>(even, w[step][0], w[step][1], x[step]);
        mma32<T>(odd, w[step + 1][0], w[step + 1][1], x[step + 1]);
      }
      partial[turn][warp][2 * t][g] = even[0] + odd[0];
      partial[turn][warp][2 * t + 1][g] = even[1] + odd[1];
      partial[turn][warp][2 * t][g + 8] = even[2] + odd[2];
      partial[turn][warp][2 * t + 1][g + 8] = even[3] + odd[3];
      last = ++unit.chunk == passes || passes == 1;
    }
    // The next weights are under way while the warps' sums are added up.
    const bool more = !last || next_unit<T, kShared>(p, cursor, unit);
    if (more) load_unit<T>(p, unit, w);
    if (!fetched) {
      pdl_wait();
      if (!more) return;
      fetched = true;
      continue;
    }
    __syncthreads();
    const int r = threadIdx.x % 16, token = threadIdx.x / 16;
    float sum = partial[turn][0][token][r];
#pragma unroll
    for (int other = 1; other < kWarps; ++other) sum += partial[turn][other][token][r];
    total = passes == 1 || done.chunk == 0 ? sum : total + sum;
    if (last && token < done.rows && (r < 8 || done.second)) {
      const int row = p.list.perm[done.begin + token];
      if (!kShared || row_shares(p, row))
        p.v[(passes == 1 ? done.chunk : 0) * p.v_chunk + row * p.v_row + done.column + r] = total;
    }
    if (!more) return;
  }
}

// Any dtype and alignment: plain multiply-adds, one (rank, token) a thread. What fp32 uses.
template <typename T, bool kShared>
__global__ void __launch_bounds__(kThreads) shrink_simple_kernel(const __grid_constant__ ShrinkParams p) {
  __shared__ WorkShared work;
  pdl_trigger();
  Cursor<ShrinkCost<kShared>> cursor(work, p.list, {p});
  pdl_wait();
  const int r = threadIdx.x % 16, token = threadIdx.x / 16;
  ShrinkUnit unit;
  while (next_unit<T, kShared>(p, cursor, unit)) {
    if (token >= unit.rows || (r >= 8 && !unit.second)) continue;
    const int row = p.list.perm[unit.begin + token];
    if (kShared && !row_shares(p, row)) continue;
    const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
    const T* a = static_cast<const T*>(unit.a) + r / 8 * unit.block + r % 8 * 8;
    const int first = unit.chunk * kChunk, end = p.chunks == 1 ? p.in : min(p.in, first + kChunk);
    float total = 0;
    for (int chunk = first; chunk < end; chunk += kChunk) {
      float sums[8] = {};
      for (int k = chunk; k < min(end, chunk + kChunk); k += 8)
#pragma unroll
        for (int i = 0; i < 8; ++i)
          sums[i] = fmaf(to_float(a[static_cast<int64_t>(k) * 8 + i]), to_float(x[k + i]), sums[i]);
      const float sum = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
      total = chunk == first ? sum : total + sum;
    }
    p.v[unit.chunk * p.v_chunk + row * p.v_row + unit.column + r] = total;
  }
}

// Used by shrink and by vera, which set everything but what is read off the tensors here.
template <bool kShared>
void launch_shrink(const at::Tensor& x, ShrinkParams p) {
  p.x = x.const_data_ptr();
  p.x_stride = x.stride(0);
  p.in = static_cast<int>(x.size(1));
  const bool aligned = reinterpret_cast<uintptr_t>(p.x) % 16 == 0 && p.x_stride * x.element_size() % 16 == 0;
  static const int ctas = tuned("SCUTE_SHRINK_CTAS", 4);
  const int64_t grid = static_cast<int64_t>(multiprocessors()) * ctas;
  SCUTE_CUDA_DISPATCH(x.scalar_type(), [&] {
    auto* kernel = shrink_simple_kernel<scalar_t, kShared>;
    if constexpr (sizeof(scalar_t) == 2) {
      if (aligned) kernel = shrink_kernel<scalar_t, kShared>;
    }
    launch(kernel, grid, kThreads, 0, true, p);
  });
}

}  // namespace scute::cuda
