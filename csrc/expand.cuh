// Decode: y += y * scale + bias + B v, with B a tenant's own or a shared one, for which v is scaled by d and B v by e.
//
// What counts for few rows is how many instructions follow one another, and how many loads wait for others. The plan
// says what each CTA works on: an equal part of a tile's columns, more CTAs for a tenant of a larger rank. A warp has
// 64 columns at a time; its weights go from memory to registers as tensor cores take them.
#pragma once
#include "check.h"
#include "launch.h"
#include "sums.h"
#include "tenants.cuh"
#include "work.cuh"

namespace scute::cuda {

struct ExpandParams {
  PartialSums own, shared;
  const char* arena;
  const Entry* table;  // of the first slice's module; modules entries between slots
  int modules, slots, slices;
  const SharedSet* sets;
  const int32_t* row_slot;
  const Share* shares;
  const int32_t *perm, *shared_perm;
  int workers;  // shares that there may be
  void* y;      // (rows, ...), y_stride elements between rows
  int64_t y_stride;
  bool y_pairs;  // whether two of y may be read at once, from every second column of a slice on
  int columns[kMaxSlices + 1];
  int units[kMaxSlices + 1];      // of kUnit columns, before each slice
  int64_t out_begin[kMaxSlices];  // the rows of a shared B at which the slices begin
  int operand;                    // bytes of a row of operands
};

constexpr int kExpandThreads = 128, kExpandWarps = kExpandThreads / 32, kExpandCtas = 4;  // of a multiprocessor
constexpr int kUnit = 64;                                                                 // columns

// A share of the plan, unpacked; no rows: no work.
struct Job {
  int slot, begin, rows;  // as in Tile
  bool shared;
  int first, last;  // units of the layer
};

__device__ __forceinline__ Job job_of(const ExpandParams& p, int worker) {
  const uint4 share = load_kept(reinterpret_cast<const uint4*>(p.shares + worker));
  const auto unit = [&](uint32_t part) {
    return static_cast<int>(static_cast<uint64_t>(p.units[p.slices]) * part >> 31);
  };
  return {static_cast<int>(share.x),
          static_cast<int>(share.y & (kMostRows - 1)),
          static_cast<int>(share.y >> 20 & kMostTileRows),
          (share.y >> 31) != 0,
          unit(share.z),
          unit(share.w)};
}

// The weights of one slice of a job: [blocks][out][8].
struct Weights {
  const char* b;
  int64_t block;  // elements from one rank block to the next
  int blocks;
};

// What a row's tenant has for a slice, apart from its own A and B; null: absent. d and e: shared factors only.
template <typename T>
struct Row {
  int row;  // -1: there is none
  bool shared;
  const T *scale, *bias, *d, *e;
};

__device__ __forceinline__ const uint4* entry_of(const ExpandParams& p, int slot, int slice) {
  return reinterpret_cast<const uint4*>(p.table + static_cast<int64_t>(slot) * p.modules + slice);
}

template <typename T>
__device__ __forceinline__ Row<T> row_of(const ExpandParams& p, const Job& job, int row, const uint4& vectors,
                                         const uint4& shared) {
  Row<T> r{row,
           job.shared,
           optional<T>(p.arena, word64(vectors.x, vectors.y)),
           optional<T>(p.arena, word64(vectors.z, vectors.w)),
           nullptr,
           nullptr};
  if (job.shared) {
    r.d = optional<T>(p.arena, word64(shared.x, shared.y));
    r.e = r.d ? optional<T>(p.arena, word64(shared.z, shared.w)) : nullptr;
  }
  return r;
}

// Of a row of a shared tile, which may have tenants that have nothing for the slice.
template <typename T>
__device__ __forceinline__ Row<T> shared_row(const ExpandParams& p, const Job& job, int token, int slice) {
  const int row = token < job.rows ? p.shared_perm[job.begin + token] : -1;
  const int slot = row >= 0 ? p.row_slot[row] : -1;
  if (slot < 0 || slot >= p.slots) return {row, true, nullptr, nullptr, nullptr, nullptr};
  const uint4 *entry = entry_of(p, slot, slice), vectors = load_kept(entry + 1), shared = load_kept(entry + 2);
  return row_of<T>(p, job, row, vectors, shared);
}

template <typename T>
__device__ __forceinline__ Weights shared_weights(const ExpandParams& p, const Job& job, int slice) {
  const SharedSet& set = p.sets[job.slot];
  const bool whole =
      p.out_begin[slice] + p.columns[slice + 1] - p.columns[slice] <= set.out;  // else nobody adapts this slice
  return {p.arena + set.b + p.out_begin[slice] * 8 * sizeof(T), set.out * 8,
          whole ? static_cast<int>(set.rank) / 8 : 0};
}

// What a job has for a slice: its weights, and the row of one token. Everything that is known is asked for at once.
template <typename T>
__device__ __forceinline__ void look_up(const ExpandParams& p, const Job& job, int token, int slice, Weights& weights,
                                        Row<T>& mine) {
  if (job.shared) {
    weights = shared_weights<T>(p, job, slice);
    mine = shared_row<T>(p, job, token, slice);
    return;
  }
  const uint4* entry = entry_of(p, job.slot, slice);
  const uint4 factors = load_kept(entry), vectors = load_kept(entry + 1), meta = load_kept(entry + 3);
  const int row = token < job.rows ? load_kept(p.perm + job.begin + token) : -1;
  const int64_t b = word64(factors.z, factors.w);
  const bool there = b != kAbsent;
  weights = {p.arena + (there ? b : 0), static_cast<int64_t>(p.columns[slice + 1] - p.columns[slice]) * 8,
             there ? entry_rank(word64(meta.z, meta.w)) / 8 : 0};
  mine = row_of<T>(p, job, row, vectors, vectors);
}

// Calls work(slice, first unit, last unit) for what a job has of every slice.
template <typename Work>
__device__ __forceinline__ void for_each_slice(const ExpandParams& p, const Job& job, const Work& work) {
#pragma unroll 1
  for (int slice = 0; slice < p.slices; ++slice) {
    const int begin = max(job.first, p.units[slice]), end = min(job.last, p.units[slice + 1]);
    if (begin < end) work(slice, begin - p.units[slice], end - p.units[slice]);
  }
}

// Everything but the sums and y.
inline ExpandParams expand_params(const at::Tensor& row_slot, const at::Tensor& arena, const at::Tensor& table,
                                  const at::Tensor& sets, const at::Tensor& plan, int64_t module,
                                  at::IntArrayRef columns, at::IntArrayRef out_begin) {
  const int64_t rows = row_slot.numel();
  const Plan view = plan_view(plan.data_ptr<int32_t>(), rows);
  ExpandParams p{};
  p.arena = reinterpret_cast<const char*>(arena.const_data_ptr());
  p.table = reinterpret_cast<const Entry*>(table.const_data_ptr<int64_t>()) + module;
  p.modules = static_cast<int>(table.size(1));
  p.slots = static_cast<int>(table.size(0));
  p.slices = static_cast<int>(columns.size()) - 1;
  p.sets = reinterpret_cast<const SharedSet*>(sets.const_data_ptr<int64_t>());
  p.row_slot = row_slot.const_data_ptr<int32_t>();
  p.shares = view.shares;
  p.workers = static_cast<int>(shares_of(rows));
  p.perm = view.perm;
  p.shared_perm = view.shared_perm;
  std::copy(columns.begin(), columns.end(), p.columns);
  std::copy(out_begin.begin(), out_begin.end(), p.out_begin);
  for (int i = 0; i < p.slices; ++i)
    p.units[i + 1] = p.units[i] + (p.columns[i + 1] - p.columns[i] + kUnit - 1) / kUnit;
  return p;
}

}  // namespace scute::cuda
