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
  int fit;              // numbers of a chunk of v that fit in shared memory, a multiple of 8
  bool v_aligned, y_aligned;  // v for 16-byte, y for 8-byte accesses
  const char* arena;
  const Entry* table;   // of the first slice's module; modules entries between slots
  int modules, slices;
  WorkList list;        // turn: see Shape; unit: 512 columns of a slice
  int turn_step;
  void* y;              // (rows, ...), y_stride elements between rows
  int64_t y_stride;
  int columns[kMaxSlices + 1], units[kMaxSlices];
  // vera only: the rows of the shared B at which the layer's slices begin
  const SharedSet* sets;
  const int32_t* row_slot;
  int slots;
  int64_t out_begin[kMaxSlices];
};

constexpr int kExpandThreads = 128, kExpandWarps = kExpandThreads / 32;
constexpr int kUnitColumns = 512;                    // columns of an item of the smallest ranks
constexpr int kStripe = 64;                          // columns of an item of the largest
constexpr int kUnitStripes = kUnitColumns / kStripe; // one a turn, if any tenant may need so many

// An item is 16 KB of B, more only beyond rank 128: the larger the rank, the fewer the columns.
enum Shape { kNarrow, kMiddle, kWide, kDeep };  // ranks up to 16, 32, 64 and any
__host__ __device__ __forceinline__ int shape_of(int rank8) {
  return rank8 <= 16 ? kNarrow : rank8 <= 32 ? kMiddle : rank8 <= 64 ? kWide : kDeep;
}
__host__ __device__ __forceinline__ int shape_columns(int shape) { return kUnitColumns >> shape; }
// Ranks that an item's products cover: what the operand is padded to with zeros.
__host__ __device__ __forceinline__ int shape_ranks(int shape, int rank8) {
  return shape == kDeep ? (rank8 + 127) / 128 * 128 : 16 << shape;
}

struct ExpandItem {
  const void* b;             // block 0, the item's first column
  int block;                 // elements from one rank block to the next
  const void *scale, *bias;  // at the item's first column; null: absent
  int slot, begin, rows;     // of the piece
  int slice, column, width;  // first column in the slice; columns from there to the slice's end
  int blocks;                // rank blocks
};

template <typename T>
__device__ __forceinline__ const T* optional(const char* arena, int64_t offset) {
  return offset == kAbsent ? nullptr : reinterpret_cast<const T*>(arena + offset);
}

template <typename T, bool kShared>
struct ExpandResolve {
  const ExpandParams& p;

  __device__ bool operator()(const Place& place, ExpandItem& item) const {
    int slice = 0, unit = place.unit;
#pragma unroll
    for (int i = 0; i + 1 < kMaxSlices; ++i)
      if (slice == i && unit >= p.units[i]) unit -= p.units[i], ++slice;
    const int stripe = place.turn * p.turn_step, column = unit * kUnitColumns + stripe * kStripe;
    const int width = p.columns[slice + 1] - p.columns[slice];
    int64_t b, out = width, scale = kAbsent, bias = kAbsent;
    int rank8;
    if constexpr (kShared) {
      const SharedSet& set = p.sets[place.slot];
      out = set.out;
      if (p.out_begin[slice] + width > out) return false;  // then no tenant of the set adapts this slice
      rank8 = static_cast<int>(set.rank);
      b = set.b + p.out_begin[slice] * 8 * sizeof(T);
    } else {
      const uint4* entry = reinterpret_cast<const uint4*>(p.table + static_cast<int64_t>(place.slot) * p.modules + slice);
      const uint4 factors = load_kept(entry), vectors = load_kept(entry + 1), meta = load_kept(entry + 3);
      b = word64(factors.z, factors.w);
      scale = word64(vectors.x, vectors.y);
      bias = word64(vectors.z, vectors.w);
      rank8 = b == kAbsent ? 0 : entry_rank(word64(meta.z, meta.w));
      if (rank8 == 0 && scale == kAbsent && bias == kAbsent) return false;
    }
    item.b = reinterpret_cast<const T*>(p.arena + b) + static_cast<int64_t>(column) * 8;
    item.block = static_cast<int>(out) * 8;
    item.scale = scale == kAbsent ? nullptr : optional<T>(p.arena, scale) + column;
    item.bias = bias == kAbsent ? nullptr : optional<T>(p.arena, bias) + column;
    item.slot = place.slot;
    item.begin = place.begin;
    item.rows = place.rows;
    item.slice = slice;
    item.column = column;
    item.width = width - column;
    item.blocks = rank8 / kRankStep;
    const int stripes = sizeof(T) == 2 ? kUnitStripes >> shape_of(rank8) : kUnitStripes;
    return item.width > 0 && (stripe & (stripes - 1)) == 0;
  }
};

// What the threads of a CTA share about an item's rows.
struct ExpandRows {
  int row[kTokens];
  float unscale[kTokens];
  const void *d[kTokens], *e[kTokens];  // vera only; null: the row's tenant has none for this slice
};

// Called by kTokens threads.
template <typename T, bool kShared>
__device__ __forceinline__ void look_up_row(const ExpandParams& p, const ExpandItem& item, ExpandRows& rows, int token) {
  if (token >= item.rows) return;
  const int row = p.list.perm[item.begin + token];
  rows.row[token] = row;
  if constexpr (kShared) {
    const int slot = p.row_slot[row];
    rows.d[token] = rows.e[token] = nullptr;
    if (slot < 0 || slot >= p.slots) return;
    const uint4* entry = reinterpret_cast<const uint4*>(p.table + static_cast<int64_t>(slot) * p.modules + item.slice);
    const uint4 vectors = load_kept(entry + 2);
    const int64_t d = word64(vectors.x, vectors.y);
    if (d == kAbsent) return;
    rows.d[token] = p.arena + d;
    rows.e[token] = reinterpret_cast<const T*>(p.arena + word64(vectors.z, vectors.w)) + item.column;
    prefetch(rows.d[token], item.blocks * 8 * sizeof(T));
    prefetch(rows.e[token], min(item.width, shape_columns(shape_of(item.blocks * 8))) * sizeof(T));
  }
}

// Shared memory: operands, then v's chunks, whose place the results take. A row of operands is [blocks of 8 ranks]
// [high, low][8 ranks] in 16 bit, made in place of a row of 32-bit sums; 16 bytes more keep rows off each other's banks.
__host__ __device__ __forceinline__ int operand_row(int room) { return shape_ranks(shape_of(room), room) * 4 + 16; }
constexpr int kResultBytes = kTokens * (kUnitColumns + 4) * sizeof(float);

// Adds up the chunks of v in order, one sum for each (token, rank), into `sums` (rows `sum_row` floats apart). v comes
// through `space`, in pieces of as many tokens and ranks as fit there. Warp w does tokens w, w + 4.
template <typename T, bool kShared>
__device__ __forceinline__ void sum_chunks(const ExpandParams& p, const ExpandItem& item, const ExpandRows& rows, float* space,
                                           float* sums, int sum_row) {
  const int rank8 = item.blocks * 8, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (rank8 == 0) return;
  const int ranks = min(rank8, p.fit), tokens = ranks < rank8 ? 1 : quotient(p.fit, ranks);
  const float* v = p.v + item.slice * p.v_slice;
  for (int token0 = 0; token0 < item.rows; token0 += tokens) {
    const int last = min(item.rows, token0 + tokens);
    for (int rank0 = 0; rank0 < rank8; rank0 += ranks) {
      if (token0 + rank0) __syncthreads();
      const int fours = min(ranks, rank8 - rank0) / 4, all = (last - token0) * fours;
      for (int i = lane; i < all; i += 32) {
        const int token = quotient(i, fours);
        const float* from = v + rows.row[token0 + token] * p.v_row + rank0 + (i - token * fours) * 4;
#pragma unroll 2
        for (int chunk = warp; chunk < p.chunks; chunk += kExpandWarps) {
          float* to = space + (chunk * all + i) * 4;
          if (p.v_aligned) {
            cp_async16(to, from + chunk * p.v_chunk, true);
          } else {
#pragma unroll 1
            for (int j = 0; j < 4; ++j) to[j] = from[chunk * p.v_chunk + j];
          }
        }
      }
      cp_async_commit();
      cp_async_wait<0>();
      __syncthreads();
      for (int token = warp; token < last; token += kExpandWarps) {
        if (token < token0) continue;
        for (int r = lane; r < fours * 4; r += 32) {
          const float* from = space + (token - token0) * fours * 4 + r;
          float sum = from[0];
#pragma unroll 4
          for (int c = 1; c < p.chunks; ++c) sum += from[c * all * 4];
          if constexpr (kShared) {
            const T* d = static_cast<const T*>(rows.d[token]);
            sum = d ? sum * to_float(d[rank0 + r]) : 0;
          }
          sums[token * sum_row + rank0 + r] = sum;
        }
      }
    }
  }
  __syncwarp();
}

// Turns each row's sums, in place, into two 16-bit numbers that add up to the sum times a power of two. A row's power
// depends on that row only. Each warp does the tokens that it summed; rows that are not there stay garbage, as do their
// results.
template <typename T>
__device__ __forceinline__ void split_sums(const ExpandItem& item, ExpandRows& rows, float* sums, int sum_row, int padded) {
  const int rank8 = item.blocks * 8, lane = threadIdx.x % 32;
  for (int token = threadIdx.x / 32; token < item.rows; token += kExpandWarps) {
    float* row = sums + token * sum_row;
    int shift = 0;
    if constexpr (std::is_same_v<T, __half>) {
      // fp16 has few exponents: bring the row's largest value near 2^10.
      float largest = 0;
      for (int r = lane; r < rank8; r += 32) largest = fmaxf(largest, fabsf(row[r]));
      for (int step = 16; step; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
      const int exponent = __float_as_int(largest) >> 23 & 0xff;  // biased by 127
      if (largest > 0 && exponent < 255) shift = max(-126, min(126, 127 + 10 - exponent));
    }
    const float scale = __int_as_float((127 + shift) << 23);
    if (lane == 0) rows.unscale[token] = __int_as_float((127 - shift) << 23);
    for (int r = lane; r < (padded + 31) / 32 * 32; r += 32) {
      const float value = r < rank8 ? row[r] * scale : 0;
      __syncwarp();
      if (r < padded) {
        T* high = reinterpret_cast<T*>(row) + r / 8 * 16 + r % 8;
        high[0] = from_float<T>(value);
        high[8] = from_float<T>(value - to_float(high[0]));
      }
      __syncwarp();
    }
  }
}

}  // namespace scute::cuda
