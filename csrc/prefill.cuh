// What the kernels for many rows share. They serve tiles of up to 64 rows: tokens are the 16-row operand of the
// tensor-core products, four of them a tile, so that a tenant's weights are read once a tile.
#pragma once
#include "check.h"
#include "common.cuh"
#include "launch.h"

namespace scute::cuda::prefill {

constexpr int kTileRows = 64;
constexpr int kSlices = 4;  // of a fused layer, at most

// Tiles of rows, and what their tenants do to the layer.
struct Tenants {
  const int32_t* count;  // tiles in use
  const Tile* tiles;
  const int32_t* perm;
  const char* arena;
  const Entry* table;  // of the first slice's module; modules entries between slots
  int modules, slices, slots;
  // Shared factors only: a tile's slot names a set, a row's tenant is row_slot[row].
  const SharedSet* sets;
  const int32_t* row_slot;
};

__device__ __forceinline__ const Entry* slot_entry(const Tenants& t, int slot, int slice) {
  return t.table + static_cast<int64_t>(slot) * t.modules + slice;
}

// Shared factors: the entry of a row's own tenant, null if it has none; and of one that has a shared term in the slice.
__device__ __forceinline__ const Entry* row_entry(const Tenants& t, int row, int slice) {
  const int slot = t.row_slot[row];
  return slot < 0 || slot >= t.slots ? nullptr : slot_entry(t, slot, slice);
}
__device__ __forceinline__ const Entry* sharing_entry(const Tenants& t, int row, int slice) {
  const Entry* entry = row_entry(t, row, slice);
  return !entry || entry->d == kAbsent ? nullptr : entry;
}

// What the host half has in hand; `sets` and `row_slot` are null for private factors.
inline Tenants tenants_of(const at::Tensor& arena, const at::Tensor& table, const at::Tensor& plan, int64_t rows,
                          int64_t module, int64_t slices, const at::Tensor* sets = nullptr,
                          const at::Tensor* row_slot = nullptr) {
  const Plan view = plan_view(plan.data_ptr<int32_t>(), rows);
  Tenants t{view.header, view.tiles, view.perm};
  if (sets) {
    t = {view.header + 1, view.shared_tiles, view.shared_perm};
    t.sets = reinterpret_cast<const SharedSet*>(sets->const_data_ptr<int64_t>());
    t.row_slot = row_slot->const_data_ptr<int32_t>();
  }
  t.arena = reinterpret_cast<const char*>(arena.const_data_ptr());
  t.table = reinterpret_cast<const Entry*>(table.const_data_ptr<int64_t>()) + module;
  t.modules = static_cast<int>(table.size(1));
  t.slices = static_cast<int>(slices);
  t.slots = static_cast<int>(table.size(0));
  return t;
}

// Tiles that a plan for so many rows can hold.
inline int64_t most_tiles(int64_t rows, int64_t slots) { return std::min(rows, rows / kTileRows + slots); }

inline bool rows_aligned(const at::Tensor& t) {
  return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0 && t.stride(0) * t.element_size() % 16 == 0;
}

// Whether this path serves a plan and dtype. fp32, for which there are no such products, stays with the general
// kernels.
inline bool serves(const at::Tensor& like, int64_t tile_rows, int64_t slices) {
  return tile_rows == kTileRows && like.element_size() == 2 && slices <= kSlices;
}

// Runs a lambda with scalar_t set to the CUDA type of a 16-bit dtype.
#define SCUTE_PREFILL_DISPATCH(dtype, ...) \
  [&] {                                    \
    if ((dtype) == at::kHalf) {            \
      using scalar_t = __half;             \
      return (__VA_ARGS__)();              \
    }                                      \
    using scalar_t = __nv_bfloat16;        \
    return (__VA_ARGS__)();                \
  }()

}  // namespace scute::cuda::prefill
