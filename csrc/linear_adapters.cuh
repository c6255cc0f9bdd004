// What the adapters of few rows add to a tile of the base's GEMM: looked up while its weights stream past, multiplied
// by the tenants' B when that streams past.
#pragma once
#include "linear.h"

namespace scute::cuda {

// The B of one tenant or of one shared set.
struct LinearFactor {
  const char* b;   // the tile's first column
  int64_t block;   // bytes from one rank block to the next
  int begin, end;  // its blocks among those of all factors
};

template <typename T>
struct LinearRow {
  const T *scale, *bias, *e;  // null: absent; at the slice's first column
  int begin, end;             // its factor's blocks; none: equal
};

template <typename T>
struct LinearAdapters {
  LinearFactor factors[kLinearRows];
  LinearRow<T> rows[kLinearRows];
  int blocks;  // of all factors
};

// One tile: some columns of one slice.
struct LinearTile {
  int slice, column, width;  // from the slice's first column on
};

// Whose a row is and what its tenant has for the tile's slice.
template <typename T>
struct LinearTenant {
  int slot, set;  // -1: none; a row with a set has shared factors
  int blocks;     // of its B
  const char* b;
  int64_t block;
  const T *scale, *bias, *d, *e;

  __device__ __forceinline__ LinearTenant(const LinearParams& p, const LinearTile& tile, int row)
      : slot(-1), set(-1), blocks(0), b(p.t.arena), block(0), scale(nullptr), bias(nullptr), d(nullptr), e(nullptr) {
    const int listed = row < p.rows ? load_kept(p.t.row_slot + row) : -1;
    if (listed < 0 || listed >= p.t.slots) return;
    const uint4* entry =
        reinterpret_cast<const uint4*>(p.t.table + static_cast<int64_t>(listed) * p.t.modules + tile.slice);
    const Slot tenant = p.tenants[listed];
    const uint4 factors = load_kept(entry), vectors = load_kept(entry + 1), shared = load_kept(entry + 2),
                meta = load_kept(entry + 3);
    const bool is_shared = tenant.live & kShared;
    if (is_shared ? !p.shared.v || tenant.shared_set < 0 || tenant.shared_set >= p.shared_sets
                  : !p.own.v || !(tenant.live & kDelta))
      return;
    slot = listed;
    const auto at = [&](uint32_t low, uint32_t high) { return optional<T>(p.t.arena, word64(low, high)); };
    scale = at(vectors.x, vectors.y), bias = at(vectors.z, vectors.w);
    const int width = p.columns[tile.slice + 1] - p.columns[tile.slice];
    int64_t first = tile.column;
    if (is_shared) {
      set = tenant.shared_set;
      const SharedSet& factor = p.sets[set];
      d = at(shared.x, shared.y);
      if (!d || p.out_begin[tile.slice] + width > factor.out) {  // nothing but scale and bias
        d = nullptr;
        return;
      }
      e = at(shared.z, shared.w);
      b = p.t.arena + factor.b, block = factor.out * 8, blocks = static_cast<int>(factor.rank) / 8;
      first += p.out_begin[tile.slice];
    } else if (const int64_t offset = word64(factors.z, factors.w); offset != kAbsent) {
      b = p.t.arena + offset, block = static_cast<int64_t>(width) * 8, blocks = entry_rank(word64(meta.z, meta.w)) / 8;
    }
    b += first * 8 * static_cast<int64_t>(sizeof(T));
    blocks = min(blocks, static_cast<int>((is_shared ? p.shared : p.own).room) / 8);  // v has no more
  }
};

// One warp: every B once, whose blocks follow one another. Lane: row.
template <typename T>
__device__ __forceinline__ void list_factors(const LinearParams& p, const LinearTile& tile, LinearAdapters<T>& s) {
  const int lane = threadIdx.x % 32;
  const LinearTenant<T> mine(p, tile, lane);
  const int key = mine.blocks == 0 ? -1 : mine.set >= 0 ? p.t.slots + mine.set : mine.slot;
  const unsigned same = __match_any_sync(~0u, key);
  const int leader = __ffs(same) - 1;
  const bool leads = mine.blocks > 0 && leader == lane;
  const unsigned leaders = __ballot_sync(~0u, leads);
  int end = leads ? mine.blocks : 0;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, end, step);
    if (lane >= step) end += other;
  }
  if (leads)
    s.factors[__popc(leaders & ((1u << lane) - 1))] = {mine.b, mine.block * static_cast<int64_t>(sizeof(T)),
                                                       end - mine.blocks, end};
  const int all = __shfl_sync(~0u, end, 31);
  end = __shfl_sync(~0u, end, leader);
  if (lane < p.rows) s.rows[lane] = {mine.scale, mine.bias, mine.e, end - mine.blocks, end};
  if (lane == 0) s.blocks = all;
}

// The sums of v's parts, from `rank` on, times d, to shared memory. Eight loads are under way at a time, kParts to a
// rank: what the compiler leaves over of an unrolled loop would wait for one another.
template <typename T, int kParts>
__device__ __forceinline__ void add_parts(const PartialSums& from, const float* v, int rank, int ranks,
                                          const T* d, float* to) {
  constexpr int kRanks = 8 / kParts, kStep = 16;
#pragma unroll 1
  for (; rank < ranks; rank += kRanks * kStep) {
    float4 totals[kRanks] = {};
    uint2 factors[kRanks];
#pragma unroll
    for (int i = 0; i < kRanks; ++i)
      if (d && rank + i * kStep < ranks) factors[i] = *reinterpret_cast<const uint2*>(d + rank + i * kStep);
#pragma unroll 1
    for (int part = 0; part < from.parts; part += kParts) {
      float4 parts[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int of = part + i % kParts, at = rank + i / kParts * kStep;
        parts[i] = make_float4(0, 0, 0, 0);
        if (of < from.parts && at < ranks) parts[i] = *reinterpret_cast<const float4*>(v + of * from.part + at);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float4& total = totals[i / kParts];
        total.x += parts[i].x, total.y += parts[i].y, total.z += parts[i].z, total.w += parts[i].w;
      }
    }
#pragma unroll
    for (int i = 0; i < kRanks; ++i) {
      const int at = rank + i * kStep;
      if (at >= ranks) break;
      float4& total = totals[i];
      if (d) {
        const float2 low = unpack<T>(factors[i].x), high = unpack<T>(factors[i].y);
        total.x *= low.x, total.y *= low.y, total.z *= high.x, total.w *= high.y;
      }
      *reinterpret_cast<float4*>(to + at) = total;
    }
  }
}

// One warp, eight rows, four lanes to a row: v, when it is there.
template <typename T>
__device__ __forceinline__ void gather_sums(const LinearParams& p, const LinearTile& tile, int first_row, float* sums) {
  const int lane = threadIdx.x % 32, row = first_row + lane / 4, rank = lane % 4 * 4;
  const LinearTenant<T> mine(p, tile, row);
  pdl_wait();
  const PartialSums& from = mine.set >= 0 ? p.shared : p.own;
  const float* v = from.v + row * from.row + tile.slice * from.slice;
  float* to = sums + row * p.sums_row;
  if (from.parts == 1) add_parts<T, 1>(from, v, rank, mine.blocks * 8, mine.d, to);
  else if (from.parts <= 4) add_parts<T, 4>(from, v, rank, mine.blocks * 8, mine.d, to);
  else add_parts<T, 8>(from, v, rank, mine.blocks * 8, mine.d, to);
}

// In shared memory, [rows][the tile's columns]: what is added to the GEMM's sums, at first the tenants' biases; scales
// and factors e, where there are some.
template <typename T>
struct LinearVectors {
  float* added;
  T *scales, *factors;
};

// Rows first, first + warps, ... All loads of a row are under way together: one that waits for another takes long while
// W streams past.
template <int kColumns, typename T>
__device__ __forceinline__ void copy_vectors(const LinearParams& p, const LinearTile& tile, const LinearAdapters<T>& s,
                                             const LinearVectors<T>& to, int first, int warps) {
  constexpr int kGroups = (kColumns + 31) / 32;
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int index = first; index < p.rows; index += warps) {
    const LinearRow<T>& row = s.rows[index];
    T scale[kGroups], bias[kGroups], e[kGroups];
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const int column = tile.column + i * 32 + lane;
      const bool there = i * 32 + lane < tile.width;
      scale[i] = bias[i] = e[i] = from_float<T>(0);
      if (there && row.scale) scale[i] = __ldg(row.scale + column);
      if (there && row.bias) bias[i] = __ldg(row.bias + column);
      if (there && row.e) e[i] = __ldg(row.e + column);
    }
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const int at = index * kColumns + i * 32 + lane;
      if (i * 32 + lane >= tile.width) break;
      to.added[at] = to_float(bias[i]);
      if (row.scale) to.scales[at] = scale[i];
      if (row.e) to.factors[at] = e[i];
    }
  }
}

// The bulk copy engine takes as long for 256 bytes as for 2 KB, so lanes copy the blocks of narrow tiles.
constexpr bool lanes_copy(int columns) { return columns <= 64; }

// The producer warp: blocks first .. of all factors to a stage, kColumns x 16 bytes each. `factor`: the lane's last one.
template <int kColumns, int kBlocks, typename T>
__device__ __forceinline__ void copy_blocks(const LinearTile& tile, const LinearAdapters<T>& s, int first, int& factor,
                                            char* stage, uint64_t* full) {
  const int lane = threadIdx.x % 32, count = min(kBlocks, s.blocks - first), bytes = tile.width * 16;
  const char* mine = nullptr;
  if (lane < count) {
    while (first + lane >= s.factors[factor].end) ++factor;
    const LinearFactor& from = s.factors[factor];
    mine = from.b + (first + lane - from.begin) * from.block;
  }
  if constexpr (lanes_copy(kColumns)) {
    for (int block = 0; block < count; ++block) {
      const char* from = reinterpret_cast<const char*>(__shfl_sync(~0u, reinterpret_cast<uintptr_t>(mine), block));
#pragma unroll
      for (int column = lane; column < kColumns; column += 32)
        if (column < tile.width) cp_async16(stage + (block * kColumns + column) * 16, from + column * 16, true);
    }
    barrier_arrive_copied(full);
    __syncwarp();
    if (lane == 0) barrier_arrive(full);
  } else {
    if (lane == 0) barrier_expect(full, count * bytes);
    __syncwarp();
    if (lane < count) copy_bytes(stage + lane * kColumns * 16, mine, bytes, full);
  }
}

// What a warp that multiplies has to do: lane by lane some rows of one factor, one to four, and 32 columns, or more of
// them kWarps groups of 32 apart.
template <int kColumns, int kWarps>
struct LinearShare {
  static constexpr int kGroups = (kColumns + 31) / 32, kTogether = kGroups > 2 ? 4 : 2;  // enough for all warps to do
  int begin, end;     // of the factor's blocks
  unsigned rows;      // a byte for each
  int count, group;   // of rows; the first group of columns
  bool takes;         // there is something

  template <typename T>
  __device__ __forceinline__ LinearShare(const LinearParams& p, const LinearAdapters<T>& s)
      : begin(0), end(0), rows(0), count(0) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const unsigned before = (1u << lane) - 1;
    if (lane < p.rows) begin = s.rows[lane].begin, end = s.rows[lane].end;
    const unsigned same = __match_any_sync(~0u, begin < end ? begin : -1);
    const bool first = begin < end && __popc(same & before) % kTogether == 0;
    unsigned left = same & ~before;
#pragma unroll
    for (int i = 0; i < kTogether; ++i, left &= left - 1)
      if (left) rows |= (__ffs(left) - 1) << 8 * i, ++count;
    group = (warp - __popc(__ballot_sync(~0u, first) & before) * kGroups) & (kWarps - 1);
    takes = first && group < kGroups;
  }
};

// kRows rows of one factor, and a lane's column: adds the products of blocks begin .. end, which lie from `b` on, with v.
template <int kColumns, int kRows, typename T>
__device__ __forceinline__ void multiply_rows(const LinearParams& p, const LinearAdapters<T>& s,
                                              const LinearVectors<T>& vectors, const float* sums, unsigned rows,
                                              int column, const char* b, int begin, int end) {
  const float* v[kRows];
  float delta[kRows], e[kRows];
#pragma unroll
  for (int j = 0; j < kRows; ++j) {
    const int row = rows >> 8 * j & 255, at = row * kColumns + column;
    v[j] = sums + row * p.sums_row;
    delta[j] = vectors.added[at];
    e[j] = s.rows[row].e ? to_float(vectors.factors[at]) : 1;
  }
#pragma unroll(kColumns > 64 ? 2 : 4)
  for (int block = begin; block < end; ++block, b += kColumns * 16) {
    const uint4 words = *reinterpret_cast<const uint4*>(b);
    const float2 b01 = unpack<T>(words.x), b23 = unpack<T>(words.y), b45 = unpack<T>(words.z), b67 = unpack<T>(words.w);
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      const float4 low = *reinterpret_cast<const float4*>(v[j] + block * 8);
      const float4 high = *reinterpret_cast<const float4*>(v[j] + block * 8 + 4);
      float sum = b01.x * low.x;
      sum = fmaf(b01.y, low.y, sum), sum = fmaf(b23.x, low.z, sum), sum = fmaf(b23.y, low.w, sum);
      sum = fmaf(b45.x, high.x, sum), sum = fmaf(b45.y, high.y, sum), sum = fmaf(b67.x, high.z, sum);
      delta[j] = fmaf(e[j], fmaf(b67.y, high.w, sum), delta[j]);
    }
  }
#pragma unroll
  for (int j = 0; j < kRows; ++j) vectors.added[(rows >> 8 * j & 255) * kColumns + column] = delta[j];
}

// The warp's share of the products with a stage's blocks. It is the same share for all stages, and a row's blocks are added
// one after another.
template <int kColumns, int kBlocks, int kWarps, typename T>
__device__ __forceinline__ void multiply_blocks(const LinearParams& p, const LinearTile& tile,
                                                const LinearShare<kColumns, kWarps>& mine, const LinearAdapters<T>& s,
                                                const LinearVectors<T>& vectors, int first, const char* stage,
                                                const float* sums) {
  using Share = LinearShare<kColumns, kWarps>;
  unsigned left = __ballot_sync(~0u, mine.takes && mine.begin < first + kBlocks && mine.end > first);
#pragma unroll 1
  for (; left; left &= left - 1) {
    const int lane = __ffs(left) - 1, from = __shfl_sync(~0u, mine.begin, lane);
    const int begin = max(first, from), end = min(first + kBlocks, __shfl_sync(~0u, mine.end, lane));
    const unsigned rows = __shfl_sync(~0u, mine.rows, lane);
    const int count = __shfl_sync(~0u, mine.count, lane);
#pragma unroll 1
    for (int group = __shfl_sync(~0u, mine.group, lane); group < Share::kGroups; group += kWarps) {
      const int column = group * 32 + threadIdx.x % 32;
      if (column >= tile.width) continue;
      const char* b = stage + ((begin - first) * kColumns + column) * 16;
      const auto multiply = [&](auto number) {
        multiply_rows<kColumns, decltype(number)::value>(p, s, vectors, sums, rows, column, b, begin - from, end - from);
      };
      if (count == 1) {
        multiply(std::integral_constant<int, 1>());
      } else if (Share::kTogether == 2 || count == 2) {
        multiply(std::integral_constant<int, 2>());
      } else if constexpr (Share::kTogether > 2) {
        if (count == 3) multiply(std::integral_constant<int, 3>());
        else multiply(std::integral_constant<int, Share::kTogether>());
      }
    }
  }
}

// kThreads threads: y's columns of the tile. `base(row, column)`: the GEMM's.
template <int kColumns, int kThreads, typename T, typename Base>
__device__ __forceinline__ void finish_tile(const LinearParams& p, const LinearTile& tile, const LinearAdapters<T>& s,
                                            const LinearVectors<T>& vectors, const Base& base) {
  const int first = p.columns[tile.slice] + tile.column;  // in y
  for (int item = threadIdx.x; item < p.rows * kColumns; item += kThreads) {
    const int row = item / kColumns, column = item % kColumns;
    if (column >= tile.width) continue;
    float was = base(row, column), more = vectors.added[item];
    if (p.bias) was += to_float(static_cast<const T*>(p.bias)[first + column]);
    if (s.rows[row].scale) more = fmaf(was, to_float(vectors.scales[item]), more);
    static_cast<T*>(p.y)[row * p.y_stride + first + column] = from_float<T>(was + more);
  }
}

}  // namespace scute::cuda
