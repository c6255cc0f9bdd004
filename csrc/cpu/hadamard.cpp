#include <map>

#include "../ops.h"
#include "common.h"

namespace scute::cpu {
namespace {

// One tenant's block in one slice.
template <typename T>
struct Factors {
  int64_t outputs, inputs, rank;
  const T *a, *b;  // [rank / 8][inputs / 8][8][8], [rank / 8][outputs][8]
};

template <typename T>
Factors<T> factors_of(const Arena& tensors, int64_t offset, const Structure& s) {
  const auto [outputs, inputs, rank] = s.hadamard;
  TORCH_CHECK(rank >= 0 && rank % kRankStep == 0, "a structured block has rank ", rank, "; want a multiple of 8");
  const int64_t values = static_cast<int64_t>(rank) * inputs, begin = offset + static_cast<int64_t>(sizeof(Structure));
  const int64_t b_begin = begin + aligned(values * static_cast<int64_t>(sizeof(T)));
  return {outputs, inputs, rank, tensors.at<T>(begin, values),
          tensors.at<T>(b_begin, static_cast<int64_t>(rank) * outputs)};
}

// w[i] = W[output][i] * sum_k B[output][k] A[k][i]
template <typename T>
void scaled_weights(const Factors<T>& f, int64_t output, const T* weight, std::vector<float>& w) {
  std::fill(w.begin(), w.end(), 0.0f);
  for (int64_t k = 0; k < f.rank / 8; ++k) {
    const T* b = f.b + (k * f.outputs + output) * 8;
    for (int64_t j = 0; j < f.inputs; j += 8) {
      const T* core = f.a + (k * f.inputs + j) * 8;
      for (int r = 0; r < 8; ++r)
        for (int i = 0; i < 8; ++i) w[j + i] += static_cast<float>(b[r]) * static_cast<float>(core[r * 8 + i]);
    }
  }
  for (int64_t i = 0; i < f.inputs; ++i) w[i] *= static_cast<float>(weight[i]);
}

template <typename T>
float dot(const T* x, const std::vector<float>& w) {
  float lanes[8] = {};  // independent sums, so that the compiler can use vectors
  for (size_t j = 0; j < w.size(); j += 8)
    for (int i = 0; i < 8; ++i) lanes[i] += static_cast<float>(x[j + i]) * w[j + i];
  float sum = 0;
  for (float lane : lanes) sum += lane;
  return sum;
}

}  // namespace

void hadamard(const Tensor& x, const Tensor& weight, const Tensor& row_slot, const Tensor& arena, const Tensor& table,
              int64_t module, IntArrayRef columns, Tensor& y) {
  check_hadamard(x, weight, row_slot, arena, table, module, columns, y);
  const Arena tensors(arena);
  const Entries entries(table, module);
  const int64_t slices = columns.size() - 1;
  std::map<int32_t, std::vector<int64_t>> tenants;  // slot -> its rows
  for (int64_t row = 0; row < x.size(0); ++row) {
    const int32_t slot = row_slot.const_data_ptr<int32_t>()[row];
    if (entries.of(slot)) tenants[slot].push_back(row);
  }

  SCUTE_DISPATCH(x.scalar_type(), "scute::hadamard", [&] {
    for (const auto& [slot, rows] : tenants) {
      for (int64_t slice = 0; slice < slices; ++slice) {
        const int64_t offset = entries.of(slot)[slice].structure, begin = columns[slice];
        if (offset == kAbsent) continue;
        const Structure& s = *tensors.at<Structure>(offset, 1);
        if (s.kind != kHadamard) continue;
        const Factors<scalar_t> f = factors_of<scalar_t>(tensors, offset, s);
        TORCH_CHECK(f.outputs == columns[slice + 1] - begin, "slot ", slot, " has a structured block of ", f.outputs,
                    " outputs; want slice ", slice, "'s ", columns[slice + 1] - begin);
        TORCH_CHECK(f.inputs == x.size(1), "slot ", slot, " has a structured block of ", f.inputs,
                    " inputs; want x's ", x.size(1));
        const std::vector<int64_t>& own = rows;
        at::parallel_for(0, f.outputs, 1, [&](int64_t from, int64_t to) {
          std::vector<float> w(f.inputs);
          for (int64_t j = from; j < to; ++j) {
            scaled_weights(f, j, weight.const_data_ptr<scalar_t>() + (begin + j) * weight.stride(0), w);
            for (const int64_t row : own) {
              scalar_t& out = y.data_ptr<scalar_t>()[row * y.stride(0) + begin + j];
              out = static_cast<scalar_t>(static_cast<float>(out) +
                                          dot(x.const_data_ptr<scalar_t>() + row * x.stride(0), w));
            }
          }
        });
      }
    }
  });
}

}  // namespace scute::cpu
