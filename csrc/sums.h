// Sums of parts of the inputs, as shrink and project leave them to whoever multiplies them by B.
#pragma once
#include <ATen/core/Tensor.h>

namespace scute::cuda {

// Of private factors (parts, rows, slices * slice), of shared ones (parts, rows, room).
struct PartialSums {
  const float* v;  // null: none are served
  int64_t part, row, slice;
  int parts;
  int64_t room;  // ranks of a slice
};

inline PartialSums own_sums(const at::Tensor& v, int64_t slices) {
  const int64_t room = v.size(2) / slices;
  return {v.const_data_ptr<float>(), v.stride(0), v.stride(1), room, static_cast<int>(v.size(0)), room};
}
// All parts have been added up in the first.
inline PartialSums shared_sums(const at::Tensor& v) {
  return {v.const_data_ptr<float>(), 0, v.stride(1), 0, 1, v.size(2)};
}

}  // namespace scute::cuda
