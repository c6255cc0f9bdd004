#include <map>

#include "../ops.h"
#include "common.h"

namespace scute::cpu {
namespace {

// The rows of one tenant in one slice; row i of x and of y is x + i * x_stride and y + i * y_stride.
template <typename T>
struct Part {
  const T *x, *weight;
  T* y;
  int64_t x_stride, weight_stride, y_stride;
  const std::vector<int64_t>& rows;

  void add(int64_t row, int64_t output, float sum) const {
    T& out = y[row * y_stride + output];
    out = static_cast<T>(static_cast<float>(out) + sum);
  }
};

// S = W o (B A), a row of it at a time: a is [rank / 8][inputs / 8][8][8], b is [rank / 8][outputs][8].
template <typename T>
void hadamard(const Part<T>& part, int64_t outputs, int64_t inputs, int64_t rank, const T* a, const T* b) {
  at::parallel_for(0, outputs, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> scaled(inputs);
    for (int64_t output = begin; output < end; ++output) {
      std::fill(scaled.begin(), scaled.end(), 0.0f);
      for (int64_t k = 0; k < rank / 8; ++k) {
        const T* eight = b + (k * outputs + output) * 8;
        for (int64_t j = 0; j < inputs; j += 8) {
          const T* core = a + (k * inputs + j) * 8;
          for (int r = 0; r < 8; ++r)
            for (int i = 0; i < 8; ++i)
              scaled[j + i] += static_cast<float>(eight[r]) * static_cast<float>(core[r * 8 + i]);
        }
      }
      const T* weight = part.weight + output * part.weight_stride;
      for (int64_t i = 0; i < inputs; ++i) scaled[i] *= static_cast<float>(weight[i]);
      for (const int64_t row : part.rows)
        part.add(row, output, dot(part.x + row * part.x_stride, scaled.data(), inputs));
    }
  });
}

// A block of side outputs has W's blocks of side inputs times M, and M: with u the blocks of x times M^T, output j adds
// u W_j up, and of each block of u the element that j is in its own. m is [outputs / side][of x][of u].
template <typename T>
void block_affine(const Part<T>& part, int64_t outputs, int64_t inputs, int64_t side, const T* m) {
  at::parallel_for(0, outputs / side, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> u(inputs);
    for (int64_t block = begin; block < end; ++block) {
      for (const int64_t row : part.rows) {
        const T* x = part.x + row * part.x_stride;
        std::fill(u.begin(), u.end(), 0.0f);
        for (int64_t j = 0; j < inputs; ++j) {
          const T* of_m = m + (block * side + j % side) * side;
          float* to = u.data() + j / side * side;
          for (int64_t i = 0; i < side; ++i) to[i] += static_cast<float>(x[j]) * static_cast<float>(of_m[i]);
        }
        for (int64_t own = 0; own < side; ++own) {
          const int64_t output = block * side + own;
          float sum = dot(u.data(), part.weight + output * part.weight_stride, inputs);
          for (int64_t i = own; i < inputs; i += side) sum += u[i];
          part.add(row, output, sum);
        }
      }
    }
  });
}

template <typename T>
void apply(const Part<T>& part, const Structure& s, const Arena& tensors, int64_t begin, int64_t outputs,
           int64_t inputs) {
  if (s.kind == kHadamard) {
    const int64_t rank = s.hadamard.rank;
    TORCH_CHECK(rank >= 0 && rank % kRankStep == 0, "a structured block has rank ", rank, "; want a multiple of 8");
    const T* a = tensors.at<T>(begin, rank * inputs);
    begin += aligned(rank * inputs * static_cast<int64_t>(sizeof(T)));
    hadamard(part, outputs, inputs, rank, a, tensors.at<T>(begin, rank * outputs));
  } else {
    const int64_t side = s.block_affine.side;
    TORCH_CHECK(side >= 1 && side <= kBlockAffineInputs && outputs % side == 0 && inputs % side == 0,
                "a structured block has blocks of ", side, "; want a divisor of ", outputs, " and ", inputs, ", up to ",
                kBlockAffineInputs);
    block_affine(part, outputs, inputs, side, tensors.at<T>(begin, outputs * side));
  }
}

}  // namespace

void reweigh(const Tensor& x, const Tensor& weight, const Tensor& row_slot, const Tensor& arena, const Tensor& table,
             int64_t module, IntArrayRef columns, Tensor& y) {
  check_reweigh(x, weight, row_slot, arena, table, module, columns, y);
  const Arena tensors(arena);
  const Entries entries(table, module);
  const int64_t slices = columns.size() - 1;
  std::map<int32_t, std::vector<int64_t>> tenants;  // slot -> its rows
  for (int64_t row = 0; row < x.size(0); ++row) {
    const int32_t slot = row_slot.const_data_ptr<int32_t>()[row];
    if (entries.of(slot)) tenants[slot].push_back(row);
  }

  SCUTE_DISPATCH(x.scalar_type(), "scute::reweigh", [&] {
    for (const auto& [slot, rows] : tenants) {
      for (int64_t slice = 0; slice < slices; ++slice) {
        const int64_t offset = entries.of(slot)[slice].structure, begin = columns[slice];
        if (offset == kAbsent) continue;
        const Structure& s = *tensors.at<Structure>(offset, 1);
        if (s.kind < kHadamard) continue;
        const int64_t outputs = s.sizes[0], inputs = s.kind == kHadamard ? s.hadamard.inputs : x.size(1);
        TORCH_CHECK(outputs == columns[slice + 1] - begin, "slot ", slot, " has a structured block of ", outputs,
                    " outputs; want slice ", slice, "'s ", columns[slice + 1] - begin);
        TORCH_CHECK(inputs == x.size(1), "slot ", slot, " has a structured block of ", inputs, " inputs; want x's ",
                    x.size(1));
        const Part<scalar_t> part{x.const_data_ptr<scalar_t>(),
                                  weight.const_data_ptr<scalar_t>() + begin * weight.stride(0),
                                  y.data_ptr<scalar_t>() + begin,
                                  x.stride(0),
                                  weight.stride(0),
                                  y.stride(0),
                                  rows};
        apply(part, s, tensors, offset + static_cast<int64_t>(sizeof(Structure)), outputs, inputs);
      }
    }
  });
}

}  // namespace scute::cpu
