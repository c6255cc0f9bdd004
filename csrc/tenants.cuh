// Whose a row of the batch is, and where to find what its tenant does: for the ops that go by rows and need no plan.
#pragma once
#include <ATen/core/Tensor.h>

#include "layout.h"

namespace scute::cuda {

struct Tenants {
  const int32_t* row_slot;
  const char* arena;
  const Entry* table;  // of the first slice's module; modules entries between slots
  int modules, slots;
};

inline Tenants tenants_of(const at::Tensor& row_slot, const at::Tensor& arena, const at::Tensor& table, int64_t module) {
  return {row_slot.const_data_ptr<int32_t>(), reinterpret_cast<const char*>(arena.const_data_ptr()),
          reinterpret_cast<const Entry*>(table.const_data_ptr<int64_t>()) + module, static_cast<int>(table.size(1)),
          static_cast<int>(table.size(0))};
}

// Whether every row of a tensor, `stride` elements apart, begins at a multiple of 16 bytes.
inline bool rows_aligned(const at::Tensor& t, int64_t stride) {
  return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0 && stride * t.element_size() % 16 == 0;
}
inline bool rows_aligned(const at::Tensor& t) { return rows_aligned(t, t.stride(0)); }

template <typename T>
__device__ __forceinline__ const T* optional(const char* arena, int64_t offset) {
  return offset == kAbsent ? nullptr : reinterpret_cast<const T*>(arena + offset);
}

}  // namespace scute::cuda
