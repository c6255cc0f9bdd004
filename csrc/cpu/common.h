// What the CPU ops share: guarded views of device-side structures, and the two products.
#pragma once
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <vector>

#include "../check.h"
#include "../layout.h"

namespace scute::cpu {

// Adapter tensors. A range that leaves the arena is an error, whatever the table says.
struct Arena {
  const uint8_t* data;
  int64_t bytes;

  explicit Arena(const at::Tensor& arena) : data(arena.data_ptr<uint8_t>()), bytes(arena.numel()) {}

  template <typename T>
  const T* at(int64_t offset, int64_t count) const {
    const int64_t end = offset + count * static_cast<int64_t>(sizeof(T));
    TORCH_CHECK(offset >= 0 && end <= bytes, "table points at arena bytes ", offset, " to ", end, "; want them within ",
                bytes);
    return reinterpret_cast<const T*>(data + offset);
  }
};

// A tenant's own rows of the vocabulary.
template <typename T>
struct Tokens {
  const int32_t* ids;
  const T* rows;  // [count][width]
  int64_t count;

  Tokens(const Arena& arena, int64_t offset, int64_t width) {
    const TokenRows& head = *arena.at<TokenRows>(offset, 1);
    TORCH_CHECK(head.kind == kRows && head.count >= 0, "the block at arena byte ", offset, " is of kind ", head.kind,
                " with ", head.count, " rows; want kind ", kRows, " and none or more");
    count = head.count;
    ids = arena.at<int32_t>(offset + static_cast<int64_t>(sizeof(TokenRows)), count);
    rows = arena.at<T>(offset + token_rows_at(count), count * width);
  }
};

// The device table's rows for one layer; null for a slot of nobody.
struct Entries {
  const Entry* data;
  int64_t slots, modules, module;

  Entries(const at::Tensor& table, int64_t module)
      : data(reinterpret_cast<const Entry*>(table.data_ptr<int64_t>())),
        slots(table.size(0)),
        modules(table.size(1)),
        module(module) {}

  const Entry* of(int32_t slot) const {
    TORCH_CHECK(slot < slots, "slot is ", slot, "; want it below table's ", slots);
    return slot < 0 ? nullptr : data + slot * modules + module;
  }
};

// One of the two lists of a plan.
struct Tiles {
  const int32_t* perm;
  const Tile* tiles;
  int64_t count;

  const Tile& operator[](int64_t i) const { return tiles[i]; }
  int64_t row(const Tile& tile, int64_t i) const { return perm[tile.begin + i]; }
};

inline Tiles private_tiles(const at::Tensor& plan) {
  const Plan view = plan_view(plan.data_ptr<int32_t>(), plan_rows(plan.numel()));
  return {view.perm, view.tiles, view.header[0]};
}

inline Tiles shared_tiles(const at::Tensor& plan) {
  const Plan view = plan_view(plan.data_ptr<int32_t>(), plan_rows(plan.numel()));
  return {view.shared_perm, view.shared_tiles, view.header[1]};
}

// Calls work(tile index, slice) for every pair, on all threads.
template <typename Work>
void for_each_tile_slice(int64_t tiles, int64_t slices, const Work& work) {
  at::parallel_for(0, tiles * slices, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) work(i / slices, i % slices);
  });
}

// The shared set that a tile of the plan names.
inline const SharedSet& shared_set(const at::Tensor& sets, int32_t index, int64_t room) {
  TORCH_CHECK(index >= 0 && index < sets.size(0), "the plan names shared set ", index, "; want it below sets' ",
              sets.size(0));
  const SharedSet& set = reinterpret_cast<const SharedSet*>(sets.const_data_ptr<int64_t>())[index];
  TORCH_CHECK(set.rank % kRankStep == 0 && set.rank <= room, "shared set ", index, " has rank ", set.rank,
              "; want a multiple of 8 within v's ", room, " columns");
  return set;
}

// Partial sums of x A^T for one row: out[c * chunk_stride + k] sums the inputs of chunk c, or out[k] sums these
// partials in order if chunks is 1. A is [rank8 / 8][a_inputs / 8][8][8]; its inputs from a_begin on are used.
template <typename T>
void multiply_a(const T* x, int64_t inputs, const T* a, int64_t a_inputs, int64_t a_begin, int64_t rank8,
                int64_t chunks, int64_t chunk_stride, float* out) {
  for (int64_t k = 0; k < rank8; k += kRankStep, a += kRankStep * a_inputs, out += kRankStep) {
    for (int64_t begin = 0; begin < inputs; begin += kChunk) {
      const int64_t end = std::min<int64_t>(begin + kChunk, inputs);
      float lanes[8][8] = {};  // [rank][input % 8]: independent sums, so that the compiler can use vectors
      for (int64_t j = begin; j < end; j += 8) {
        const T* core = a + (a_begin + j) * kRankStep;
        for (int r = 0; r < 8; ++r)
          for (int i = 0; i < 8; ++i) lanes[r][i] += static_cast<float>(core[r * 8 + i]) * static_cast<float>(x[j + i]);
      }
      float* partial = out + (chunks == 1 ? 0 : begin / kChunk * chunk_stride);
      for (int r = 0; r < 8; ++r) {
        float sum = 0;
        for (float lane : lanes[r]) sum += lane;
        partial[r] = chunks == 1 && begin > 0 ? partial[r] + sum : sum;
      }
    }
  }
}

// u[k] = the sum over chunks, in order, of v[c * chunk_stride + k].
inline std::vector<float> sum_chunks(const float* v, int64_t rank8, int64_t chunks, int64_t chunk_stride) {
  std::vector<float> u(v, v + rank8);
  for (int64_t c = 1; c < chunks; ++c)
    for (int64_t k = 0; k < rank8; ++k) u[k] += v[c * chunk_stride + k];
  return u;
}

// sum_k B[col][k] u[k], for B [rank8 / 8][outputs][8].
template <typename T>
float dot_b(const T* b, int64_t outputs, int64_t col, const std::vector<float>& u) {
  float lanes[8] = {};
  for (size_t k = 0; k < u.size(); k += 8) {
    const T* eight = b + (static_cast<int64_t>(k) / 8 * outputs + col) * 8;
    for (int i = 0; i < 8; ++i) lanes[i] += static_cast<float>(eight[i]) * u[k + i];
  }
  float sum = 0;
  for (float lane : lanes) sum += lane;
  return sum;
}

// sum_j a[j] b[j] for j below n, a multiple of 8.
template <typename A, typename B>
float dot(const A* a, const B* b, int64_t n) {
  float lanes[8] = {}, sum = 0;  // independent sums, so that the compiler can use vectors
  for (int64_t j = 0; j < n; j += 8)
    for (int i = 0; i < 8; ++i) lanes[i] += static_cast<float>(a[j + i]) * static_cast<float>(b[j + i]);
  for (float lane : lanes) sum += lane;
  return sum;
}

}  // namespace scute::cpu
