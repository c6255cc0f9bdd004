// v[part][row][rank] = A x over a part of the inputs, for private factors (shrink) and for shared ones (project).
#pragma once
#include "check.h"
#include "launch.h"
#include "ops.h"
#include "work.cuh"

namespace scute::cuda {

struct ShrinkParams {
  const void* x;  // (rows, in), x_stride elements between rows
  int64_t x_stride;
  const char* arena;
  const Entry* table;  // of the first slice's module; modules entries between slots
  int modules;
  WorkList list;  // turn: a span of ranks; unit: a slice and a part of the inputs
  int span;       // ranks of an item
  int part;       // inputs of an item
  Divisor parts;
  float* v;  // (parts, rows, slices * stride)
  int64_t v_part, v_row, stride;
  int in;
  // project only: one matrix for all slices, of which the layer uses inputs in_begin ..
  const SharedSet* sets;
  int in_begin;
};

struct ShrinkItem {
  const void* a;    // first rank block, first input
  int block;        // elements from one rank block to the next
  int begin, rows;  // of the piece
  int ranks;
  int first, inputs;  // first input
  float* v;           // at the part and column
};

// A tenant's or a set's matrix, if it reaches the item's ranks and inputs.
template <typename T, bool kShared>
struct ShrinkResolve {
  const ShrinkParams& p;

  __device__ bool operator()(const Place& place, ShrinkItem& item) const {
    int part = place.unit;
    const int slice = p.parts.split(part), first = part * p.part, rank = place.turn * p.span;
    int64_t a, in;
    int rank8;
    if constexpr (kShared) {
      const SharedSet& set = p.sets[place.slot];
      a = set.a;
      in = set.in;
      rank8 = p.in_begin + p.in <= in ? static_cast<int>(set.rank) : 0;
    } else {
      const uint4* entry =
          reinterpret_cast<const uint4*>(p.table + static_cast<int64_t>(place.slot) * p.modules + slice);
      const uint4 factors = load_kept(entry), meta = load_kept(entry + 3);
      a = word64(factors.x, factors.y);
      in = p.in;
      rank8 = a == kAbsent ? 0 : entry_rank(word64(meta.z, meta.w));
    }
    item.a = reinterpret_cast<const T*>(p.arena + a) + (rank / kRankStep * in + p.in_begin + first) * 8;
    item.block = static_cast<int>(in) * 8;
    item.begin = place.begin;
    item.rows = place.rows;
    item.ranks = min(p.span, rank8 - rank);
    item.v = p.v + part * p.v_part + slice * p.stride + rank;
    item.first = first;
    item.inputs = min(p.part, p.in - first);
    return item.ranks > 0;
  }
};

// In all CTAs: a successor may start as soon as x is there. A linear reads the same x, and does not wait for the sums to do
// so. What comes before reads the plan, the table and the arena, which no kernel of the pass writes after the plan's.
__device__ __forceinline__ void input_wait() {
  pdl_wait();
  pdl_trigger();
}

constexpr int kShrinkThreads = 128, kShrinkWarps = kShrinkThreads / 32;
constexpr int kShrinkCtas = 6;                          // of a multiprocessor
constexpr int kShrinkCtasBefore = 3;                    // the same before a linear, which starts beside them
constexpr int kGroups = 2;                              // of 16 ranks, in a span of a private factor
constexpr int kStretch = 512;                           // inputs that a CTA does at a time
constexpr int kSteps = kStretch / (kShrinkWarps * 32);  // products of 32 inputs that a warp does of them

// A warp's share of one stretch of one group of 16 ranks.
template <typename T>
struct ShrinkLoad {
  const T* a;
  int block;
  int eights;   // inputs / 8 from this lane's first on
  bool second;  // the group has a second rank block

  __device__ ShrinkLoad(const ShrinkItem& item, int group, int chunk) {
    const int lane = threadIdx.x % 32, first = (chunk * kShrinkWarps + threadIdx.x / 32) * kSteps * 4 + lane % 4;
    a = static_cast<const T*>(item.a) + (group * 2 * item.block + first * 64 + lane / 4 * 8);
    block = item.block;
    eights = item.inputs / 8 - first;
    second = group * 16 + 8 < item.ranks;
  }
  __device__ __forceinline__ void operator()(int step, uint4 (&w)[2]) const {
    w[0] = w[1] = make_uint4(0, 0, 0, 0);
    if (step * 4 < eights) {
      w[0] = load_weights(a + step * 256);
      if (second) w[1] = load_weights(a + step * 256 + block);
    }
  }
};

// 16 bit. A group's 16 ranks are the rows of the product, 8 tokens its columns; each warp sums a quarter of a stretch.
// Eight 16-byte loads a lane are under way at any time: a step's registers are filled again as soon as it is done.
template <typename T>
__global__ void __launch_bounds__(kShrinkThreads, kShrinkCtas) shrink_kernel(const __grid_constant__ ShrinkParams p) {
  __shared__ ItemsShared<ShrinkItem> work;
  __shared__ float partial[2][kShrinkWarps][kTokens][kGroups * 16 + 4];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  Items<ShrinkItem, ShrinkResolve<T, false>> items(work, {p});

  const ShrinkItem* next;
  uint4 w[kSteps][2];
  int row = 0;  // of token g
  const auto look_up = [&] {
    if (!items.look_up()) return false;
    if ((next = items.next())) {
      const ShrinkLoad<T> load(*next, 0, 0);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) load(step, w[step]);
      row = p.list.perm[next->begin + min(g, next->rows - 1)];
    }
    return true;
  };
  bool found = look_up();
  input_wait();
  for (int turn = 0; found; found = look_up()) {
    for (; next; turn ^= 1) {
      const ShrinkItem& item = *next;
      const int chunks = (item.inputs + kStretch - 1) / kStretch, groups = (item.ranks + 15) / 16;
      for (int chunk = 0; chunk < chunks; ++chunk) {
        const int first = (chunk * kShrinkWarps + warp) * kSteps * 4 + t;
        const int eights = g < item.rows ? item.inputs / 8 - first : 0;
        const T* x_row = static_cast<const T*>(p.x) + row * p.x_stride + item.first + first * 8;
        uint4 x[kSteps];
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          x[step] = make_uint4(0, 0, 0, 0);
          if (step * 4 < eights) x[step] = *reinterpret_cast<const uint4*>(x_row + step * 32);
        }
#pragma unroll 1
        for (int group = 0; group < groups; ++group) {
          const bool last_group = group + 1 == groups, final = last_group && chunk + 1 == chunks;
          if (final) next = items.next();
          const ShrinkLoad<T> load(final && next ? *next : item, last_group ? 0 : group + 1,
                                   final ? 0 : chunk + last_group);
          float* own = &partial[turn][warp][2 * t][group * 16 + g];
          constexpr int kRow = kGroups * 16 + 4;
          float sums[4] = {};
          if (chunk) sums[0] = own[0], sums[1] = own[kRow], sums[2] = own[8], sums[3] = own[kRow + 8];
#pragma unroll
          for (int step = 0; step < kSteps; ++step) {
            mma32<T>(sums, w[step][0], w[step][1], x[step]);
            if (next) load(step, w[step]);
          }
          own[0] = sums[0], own[kRow] = sums[1], own[8] = sums[2], own[kRow + 8] = sums[3];
        }
      }
      __syncthreads();
#pragma unroll
      for (int token = warp; token < kTokens; token += kShrinkWarps) {
        const int to = __shfl_sync(~0u, row, token * 4);
        if (token >= item.rows || lane >= item.ranks) continue;
        float sum = partial[turn][0][token][lane];
#pragma unroll
        for (int other = 1; other < kShrinkWarps; ++other) sum += partial[turn][other][token][lane];
        item.v[to * p.v_row + lane] = sum;
      }
      if (next) row = p.list.perm[next->begin + min(g, next->rows - 1)];
    }
  }
}

// Any dtype and alignment: plain multiply-adds, one (rank, token) a thread. What fp32 uses.
template <typename T, bool kShared>
__global__ void __launch_bounds__(kShrinkThreads) shrink_simple_kernel(const __grid_constant__ ShrinkParams p) {
  __shared__ ItemsShared<ShrinkItem> work;
  input_wait();
  Items<ShrinkItem, ShrinkResolve<T, kShared>> items(work, {p});
  const int token = threadIdx.x / 16;
  const ShrinkItem* next = nullptr;
  while ((next = items.next()) || items.look_up()) {
    if (!next || token >= next->rows) continue;
    const ShrinkItem& item = *next;
    const int row = p.list.perm[item.begin + token];
    const T* x = static_cast<const T*>(p.x) + row * p.x_stride + item.first;
    for (int r = threadIdx.x % 16; r < item.ranks; r += 16) {
      const T* a = static_cast<const T*>(item.a) + r / 8 * item.block + r % 8 * 8;
      float total = 0;
      for (int chunk = 0; chunk < item.inputs; chunk += kChunk) {
        float sums[8] = {};
        for (int k = chunk; k < min(item.inputs, chunk + kChunk); k += 8)
#pragma unroll
          for (int i = 0; i < 8; ++i)
            sums[i] = fmaf(to_float(a[static_cast<int64_t>(k) * 8 + i]), to_float(x[k + i]), sums[i]);
        const float sum = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
        total = chunk ? total + sum : sum;
      }
      item.v[row * p.v_row + r] = total;
    }
  }
}

// CTAs for a pass of so many rows; few are, but for an output head, followed by a linear where there is one.
inline bool before_linear(int64_t rows) {
  static const bool runs = linear_runs();
  return runs && rows <= kLinearRows;
}
inline int64_t sums_grid(const ShrinkParams& p, int64_t rows) {
  const int each = before_linear(rows) ? kShrinkCtasBefore : kShrinkCtas;
  return std::min<int64_t>(p.list.items, static_cast<int64_t>(multiprocessors()) * each);
}

// Reads x and v off their tensors. Whether 16-byte loads may be used on x.
inline bool set_operands(ShrinkParams& p, const at::Tensor& x, const at::Tensor& v, int64_t slices) {
  p.v = v.data_ptr<float>();
  p.v_part = v.stride(0);
  p.v_row = v.stride(1);
  p.stride = v.size(2) / slices;
  p.parts = Divisor(v.size(0));
  p.x = x.const_data_ptr();
  p.x_stride = x.stride(0);
  p.in = static_cast<int>(x.size(1));
  p.part = v.size(0) == 1 ? p.in : kChunk;
  return x.element_size() == 2 && reinterpret_cast<uintptr_t>(p.x) % 16 == 0 && p.x_stride % 8 == 0;
}

}  // namespace scute::cuda
