#include "../ops.h"
#include "common.h"

namespace scute::cpu {
namespace {

// out = x + x D, for the blocks of D = R - I on the diagonal; a stride of 0 makes the first block serve all.
template <typename T>
void rotate_row(const T* x, int64_t inputs, const T* blocks, int64_t size, int64_t block_stride, T* out) {
  std::vector<float> sums(size);
  for (int64_t begin = 0; begin < inputs; begin += size, blocks += block_stride) {
    std::fill(sums.begin(), sums.end(), 0.0f);
    for (int64_t k = 0; k < size; ++k)
      for (int64_t j = 0; j < size; ++j)
        sums[j] += static_cast<float>(x[begin + k]) * static_cast<float>(blocks[k * size + j]);
    for (int64_t j = 0; j < size; ++j) out[begin + j] = static_cast<T>(static_cast<float>(x[begin + j]) + sums[j]);
  }
}

}  // namespace

void rotate(const Tensor& x, const Tensor& row_slot, const Tensor& arena, const Tensor& table, int64_t module,
            int64_t slices, Tensor& out) {
  check_rotate(x, row_slot, arena, table, module, slices, out);
  if (x.size(0) == 0) return;
  const Arena tensors(arena);
  const Entries entries(table, module);
  const int64_t rows = x.size(0), inputs = x.size(1);

  SCUTE_DISPATCH(x.scalar_type(), "scute::rotate", [&] {
    for_each_tile_slice(rows, slices, [&](int64_t row, int64_t slice) {
      const scalar_t* from = x.const_data_ptr<scalar_t>() + row * x.stride(0);
      scalar_t* to = out.data_ptr<scalar_t>() + (slice * rows + row) * inputs;
      const Entry* entry = entries.of(row_slot.const_data_ptr<int32_t>()[row]);
      if (!entry || entry[slice].rotation == kAbsent) {
        std::copy_n(from, inputs, to);
        return;
      }
      const int64_t size = entry_block(entry[slice].meta);
      TORCH_CHECK(size >= 1 && inputs % size == 0, "slot ", row_slot.const_data_ptr<int32_t>()[row],
                  " has rotation blocks of ", size, "; want a divisor of x's ", inputs, " columns");
      const bool one_block = entry_one_block(entry[slice].meta);
      const scalar_t* blocks =
          tensors.at<scalar_t>(entry[slice].rotation, (one_block ? 1 : inputs / size) * size * size);
      rotate_row(from, inputs, blocks, size, one_block ? 0 : size * size, to);
    });
  });
}

}  // namespace scute::cpu
