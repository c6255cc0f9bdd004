// The work of the prefill expand, cut into blocks of columns of tiles, and the loads of such a block.
#pragma once
#include "prefill.cuh"

namespace scute::cuda::prefill {

constexpr int kExpandThreads = 256;
constexpr int kColumns = 256;  // of a block
constexpr int kPieces = 8;     // a lane's 16-byte pieces of y: rows 8 i + lane / 4, columns 8 (lane % 4) ...
constexpr int kScale = kPieces, kBias = kPieces + 1, kHeld = kPieces + 2;  // and of what goes with its columns

struct ExpandParams {
  Tenants t;
  const float* v;  // (rows, ...); slices v_slice apart
  int64_t v_row, v_slice;
  int room;  // rank blocks that v has, rounded up to an even number
  void* y;   // (rows, ...), y_stride elements between rows
  int64_t y_stride;
  bool y_aligned;  // every slice's first column in every row, to 16 bytes
  int columns[kSlices + 1];
  int blocks[kSlices + 1];     // of columns, before each slice
  int64_t out_begin[kSlices];  // shared factors: the rows of B at which the slices begin
};

// A block of columns and what its tile's tenant has for it; the same in every thread of the CTA.
template <typename T>
struct Work {
  int tile = -1, slice = -1, column;  // of the slice
  int begin, rows, slot;              // of the tile
  int blocks;                         // rank blocks; -1: nothing to do
  const T* b;                         // of the slice's first column
  int64_t b_block;                    // elements from one rank block to the next
};

template <typename T, bool kShared>
__device__ __forceinline__ void locate(const ExpandParams& p, int64_t at, Work<T>& w) {
  const int each = p.blocks[p.t.slices], tile = static_cast<int>(at / each), block = static_cast<int>(at % each);
  int slice = 0;
  while (slice + 1 < p.t.slices && block >= p.blocks[slice + 1]) ++slice;
  w.column = (block - p.blocks[slice]) * kColumns;
  if (tile == w.tile && slice == w.slice) return;
  const Tile held = p.t.tiles[tile];
  w.tile = tile, w.slice = slice, w.begin = held.begin, w.rows = held.rows, w.slot = held.slot;
  w.blocks = -1;
  if constexpr (kShared) {
    bool any = false, shares = false;
    for (int i = threadIdx.x % 32; i < held.rows; i += 32) {
      const Entry* entry = row_entry(p.t, p.t.perm[held.begin + i], slice);
      if (!entry) continue;
      shares |= entry->d != kAbsent;
      any |= entry->d != kAbsent || entry->scale != kAbsent || entry->bias != kAbsent;
    }
    if (!__ballot_sync(~0u, any)) return;
    const SharedSet& set = p.t.sets[held.slot];
    w.blocks = __ballot_sync(~0u, shares) ? static_cast<int>(set.rank) / 8 : 0;
    w.b_block = set.out * 8;
    w.b = reinterpret_cast<const T*>(p.t.arena + set.b) + p.out_begin[slice] * 8;
  } else {
    const Entry* entry = slot_entry(p.t, held.slot, slice);
    const int64_t b = entry->b;
    if (b != kAbsent) {
      w.blocks = entry_rank(entry->meta) / 8;
      w.b_block = static_cast<int64_t>(p.columns[slice + 1] - p.columns[slice]) * 8;
      w.b = reinterpret_cast<const T*>(p.t.arena + b);
    } else if (entry->scale != kAbsent || entry->bias != kAbsent) {
      w.blocks = 0;
    }
  }
}

template <typename T>
__device__ __forceinline__ int warp_column(const Work<T>& w) {
  return w.column + static_cast<int>(threadIdx.x / 32) * 32;
}

template <typename T>
__device__ __forceinline__ int width_of(const ExpandParams& p, const Work<T>& w) {
  return p.columns[w.slice + 1] - p.columns[w.slice];
}

// Whether the lane's eight columns from `column` on are there and can be had in one access.
template <typename T>
__device__ __forceinline__ bool whole(const ExpandParams& p, const Work<T>& w, int column) {
  return p.y_aligned && column + 8 <= width_of(p, w);
}

template <typename T>
__device__ __forceinline__ T* output(const ExpandParams& p, const Work<T>& w, int row, int column) {
  return static_cast<T*>(p.y) + row * p.y_stride + p.columns[w.slice] + column;
}

template <typename T, bool kShared>
__device__ __forceinline__ void fetch(const ExpandParams& p, const Work<T>& w, uint4* held) {
  const int lane = threadIdx.x % 32, column = warp_column(w) + lane % 4 * 8;
  if (w.blocks < 0 || column >= width_of(p, w)) return;
  if constexpr (!kShared) {  // the arena rounds every vector up to 16 bytes
    const Entry* entry = slot_entry(p.t, w.slot, w.slice);
    const int64_t scale = entry->scale, bias = entry->bias;
    if (scale != kAbsent)
      cp_async16(held + kScale * kExpandThreads, reinterpret_cast<const T*>(p.t.arena + scale) + column, true);
    if (bias != kAbsent)
      cp_async16(held + kBias * kExpandThreads, reinterpret_cast<const T*>(p.t.arena + bias) + column, true);
  }
  if (!whole(p, w, column)) return;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int at = i * 8 + lane / 4;
    if (at < w.rows) cp_async16(held + i * kExpandThreads, output(p, w, p.t.perm[w.begin + at], column), true);
  }
}

// Weights of 16 ranks and the warp's 32 columns. Column n of product i is 8 (n / 2) + 2 i + n % 2, which gives a lane
// eight columns in a row of the results.
template <typename T>
__device__ __forceinline__ void load_b(const ExpandParams& p, const Work<T>& w, int step, uint32_t (&b)[4][2]) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, width = width_of(p, w);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int column = warp_column(w) + g / 2 * 8 + 2 * i + g % 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int block = step * 2 + half;
      b[i][half] = 0;
      if (block < w.blocks && column < width)
        b[i][half] =
            *reinterpret_cast<const uint32_t*>(w.b + block * w.b_block + static_cast<int64_t>(column) * 8 + t * 2);
    }
  }
}

}  // namespace scute::cuda::prefill
