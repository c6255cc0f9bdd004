// y += y * scale + bias + B v for private factors (expand); y += e * (B (d * v)) for shared ones (vera).
#pragma once
#include "check.h"
#include "launch.h"
#include "work.cuh"

namespace scute::cuda {

struct ExpandParams {
  const float* v;       // (chunks, rows, slices * stride), or (chunks, rows, stride) of a shared factor
  int64_t v_chunk, v_row, v_slice;
  int chunks, room;     // room: ranks that fit in v, a multiple of 8
  const char* arena;
  const Entry* table;   // of the first slice's module; modules entries between slots
  int modules, slices;
  WorkList list;
  void* y;              // (rows, ...), y_stride elements between rows
  int64_t y_stride;
  int columns[kMaxSlices + 1];
  // vera only: the rows of the shared B at which the layer's slices begin
  const SharedSet* sets;
  const int32_t* row_slot;
  int slots;
  int64_t out_begin[kMaxSlices];
};

__device__ __forceinline__ const Entry* row_entry(const ExpandParams& p, int row, int slice) {
  const int slot = p.row_slot[row];
  return slot >= 0 && slot < p.slots ? p.table + static_cast<int64_t>(slot) * p.modules + slice : nullptr;
}

constexpr int kColumns = kThreads;  // of a unit of work: one a thread
constexpr int kTensorBlocks = 4;    // rank blocks a step of a tensor-core product covers

// From rank 32 on, products go to the tensor cores; those of shared factors, which have many rows, always.
template <bool kShared>
__host__ __device__ constexpr bool uses_tensor(int blocks) {
  return kShared || blocks >= kTensorBlocks;
}

// Work of one piece: for every slice, every unit of columns weighs its rank blocks and one for y itself.
template <bool kShared>
struct ExpandCost {
  const ExpandParams& p;

  __device__ int units(int i) const { return (p.columns[i + 1] - p.columns[i] + kColumns - 1) / kColumns; }

  __device__ int operator()(const Tile& tile, const int32_t* perm, Slice (&slice)[kMaxSlices]) const {
    const Entry* entry = p.table + static_cast<int64_t>(tile.slot) * p.modules;
    int cost = 0;
#pragma unroll
    for (int i = 0; i < kMaxSlices; ++i) {
      slice[i] = {kAbsent, -1};
      if (i >= p.slices) continue;
      if constexpr (kShared) {
        bool any = false;
        for (int row = 0; row < tile.rows; ++row) {
          const Entry* own = row_entry(p, perm[tile.begin + row], i);
          any |= own && own->d != kAbsent;
        }
        if (any) slice[i] = {p.sets[tile.slot].b, static_cast<int>(p.sets[tile.slot].rank)};
      } else {
        const int64_t b = entry[i].b, scale = entry[i].scale, bias = entry[i].bias, meta = entry[i].meta;
        if (b != kAbsent) slice[i] = {b, entry_rank(meta)};
        else if (scale != kAbsent || bias != kAbsent) slice[i].rank8 = 0;
      }
      if (slice[i].rank8 >= 0) cost += units(i) * (slice[i].rank8 / 8 + 1);
    }
    return cost;
  }
};

// Consecutive units of one piece and slice.
struct ExpandItem {
  int begin, rows, slot;     // of the piece
  int slice, column, width;  // first column and number of columns of the slice
  int blocks, units;         // rank blocks; units taken
  const void* b;             // block 0, column 0
  int64_t block;             // elements from one rank block to the next
};

// Units that a pass takes at most: what fits the eight 16-byte registers a lane has for weights.
__host__ __device__ constexpr int column_units(int blocks) { return blocks == 3 ? 2 : 4; }
template <bool kShared>
__device__ __forceinline__ int pass_units(int blocks) {
  return !uses_tensor<kShared>(blocks) ? column_units(blocks) : blocks <= kTensorBlocks ? 2 : 1;
}

// A unit belongs to the CTA in whose stretch it begins.
template <typename T, bool kShared>
__device__ bool next_item(const ExpandParams& p, Cursor<ExpandCost<kShared>>& cursor, ExpandItem& item) {
  for (;;) {
    Piece piece;
    if (!cursor.find(piece)) return false;
    int rest = piece.offset;
    bool found = false;
#pragma unroll
    for (int i = 0; i < kMaxSlices; ++i) {
      const Slice slice = cursor.shared.slice[i][piece.index];
      if (found || slice.rank8 < 0) continue;
      const int blocks = slice.rank8 / 8, weight = blocks + 1, units = cursor.cost.units(i);
      if (rest >= units * weight) {
        rest -= units * weight;
        continue;
      }
      const int unit = quotient(rest + weight - 1, weight);
      cursor.position += unit * weight - rest;
      rest = 0;
      if (unit == units) continue;
      found = true;
      if (cursor.position >= cursor.limit) return false;
      const int left = quotient(min(cursor.limit - cursor.position, 8 * weight) + weight - 1, weight);
      item.units = min(min(pass_units<kShared>(blocks), units - unit), left);
      cursor.position += item.units * weight;
      item.begin = piece.begin;
      item.rows = piece.rows;
      item.slot = piece.slot;
      item.slice = i;
      item.column = unit * kColumns;
      item.width = p.columns[i + 1] - p.columns[i];
      item.blocks = blocks;
      item.block = (kShared ? p.sets[piece.slot].out : item.width) * 8;
      item.b = reinterpret_cast<const T*>(p.arena + slice.offset) + (kShared ? p.out_begin[i] * 8 : 0);
    }
    if (found) return true;
  }
}

// What the threads of a CTA share about the piece and slice at hand.
struct Staged {
  int begin, slice;
  int row[kTokens];
  bool live[kTokens];
  float unscale[kTokens];
  const void *scale, *bias;
  const void* e[kTokens];
};

// v as the tensor cores take it: 16 bit, a high and a low part, rows padded against bank conflicts.
__host__ __device__ inline int operand_units(int room) { return 4 * ((room + 31) / 32 | 1); }  // of 16 bytes, a row
inline size_t staging_bytes(int room) {
  return kTokens * (room * sizeof(float) + 2 * operand_units(room) * sizeof(uint4));
}

template <typename T>
__device__ __forceinline__ const T* optional(const char* arena, int64_t offset) {
  return offset == kAbsent ? nullptr : reinterpret_cast<const T*>(arena + offset);
}

// Sums the chunks of v in order into values[token][room]; for tensor cores also as high + low, times a power of two.
template <typename T, bool kShared>
__device__ __forceinline__ void stage(const ExpandParams& p, const ExpandItem& item, Staged& s, float* values,
                                      uint4* high, uint4* low, bool tensor) {
  if (s.begin == item.begin && s.slice == item.slice) return;
  __syncthreads();
  const int rank8 = item.blocks * 8;
  if (threadIdx.x < item.rows) {
    const int token = threadIdx.x, row = p.list.perm[item.begin + token];
    s.row[token] = row;
    if constexpr (kShared) {
      const Entry* entry = row_entry(p, row, item.slice);
      s.live[token] = entry && entry->d != kAbsent;
      s.e[token] = s.live[token] ? p.arena + entry->e : nullptr;
    }
  }
  if (!kShared && threadIdx.x == kThreads - 1) {
    const Entry& entry = p.table[static_cast<int64_t>(item.slot) * p.modules + item.slice];
    s.scale = optional<T>(p.arena, entry.scale);
    s.bias = optional<T>(p.arena, entry.bias);
  }
  for (int i = threadIdx.x; i < item.rows * rank8; i += kThreads) {
    const int token = quotient(i, rank8), r = i - token * rank8, row = p.list.perm[item.begin + token];
    const float* from = p.v + row * p.v_row + item.slice * p.v_slice + r;
    float sum = from[0];
#pragma unroll 4
    for (int c = 1; c < p.chunks; ++c) sum += from[c * p.v_chunk];
    if constexpr (kShared) {
      const Entry* entry = row_entry(p, row, item.slice);
      const T* d = entry ? optional<T>(p.arena, entry->d) : nullptr;
      sum = d ? sum * to_float(d[r]) : 0;
    }
    values[token * p.room + r] = sum;
  }
  __syncthreads();
  if (sizeof(T) == 2 && tensor) {
    const int lane = threadIdx.x % 32, padded = (rank8 + 31) / 32 * 32, units = operand_units(p.room);
    for (int token = threadIdx.x / 32; token < kTokens; token += kWarps) {
      int shift = 0;
      if constexpr (std::is_same_v<T, __half>) {
        // fp16 has few exponents: bring the row's largest value near 2^10. A row's scale depends on that row only.
        float largest = 0;
        if (token < item.rows)
          for (int r = lane; r < rank8; r += 32) largest = fmaxf(largest, fabsf(values[token * p.room + r]));
        for (int step = 16; step; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
        const int exponent = __float_as_int(largest) >> 23 & 0xff;  // biased by 127
        if (largest > 0 && exponent < 255) shift = max(-126, min(126, 127 + 10 - exponent));
      }
      const float scale = __int_as_float((127 + shift) << 23);
      if (lane == 0) s.unscale[token] = __int_as_float((127 - shift) << 23);
      T* high_row = reinterpret_cast<T*>(high + token * units);
      T* low_row = reinterpret_cast<T*>(low + token * units);
      for (int r = lane; r < padded; r += 32) {
        const float value = token < item.rows && r < rank8 ? values[token * p.room + r] * scale : 0;
        high_row[r] = from_float<T>(value);
        low_row[r] = from_float<T>(value - to_float(high_row[r]));
      }
    }
  }
  if (threadIdx.x == 0) s.begin = item.begin, s.slice = item.slice;
  __syncthreads();
}

template <typename T>
__device__ __forceinline__ T* output(const ExpandParams& p, const ExpandItem& item, int row, int column) {
  return static_cast<T*>(p.y) + row * p.y_stride + p.columns[item.slice] + column;
}

// One read (`before`) and one rounding of y.
template <typename T, bool kShared>
__device__ __forceinline__ void finish(const Staged& s, int token, int column, float before, float delta, T* y) {
  if constexpr (kShared) {
    if (!s.live[token]) return;
    delta *= to_float(static_cast<const T*>(s.e[token])[column]);
  } else {
    if (s.scale) delta = fmaf(before, to_float(static_cast<const T*>(s.scale)[column]), delta);
    if (s.bias) delta += to_float(static_cast<const T*>(s.bias)[column]);
  }
  *y = from_float<T>(before + delta);
}

}  // namespace scute::cuda
