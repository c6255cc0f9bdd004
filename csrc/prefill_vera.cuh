// Shared factors for many rows: x A for all slices at once, then for each slice d, B and e.
#pragma once
#include "prefill_expand.cuh"
#include "prefill_shrink.cuh"

namespace scute::cuda::prefill {

// False if this path does not serve what is asked for.
inline bool vera(const at::Tensor& x, const at::Tensor& row_slot, const at::Tensor& arena, const at::Tensor& table,
                 const at::Tensor& sets, const at::Tensor& plan, int64_t tile_rows, int64_t module,
                 at::IntArrayRef columns, int64_t in_begin, at::IntArrayRef out_begin, at::Tensor& v, at::Tensor& y) {
  const int64_t slices = columns.size() - 1;
  if (!serves(x, tile_rows, slices) || !rows_aligned(x) || !expand_fits(v.size(2))) return false;
  const Tenants t = tenants_of(arena, table, plan, x.size(0), module, slices, &sets, &row_slot);
  launch_shrink<true>(x, t, static_cast<int>(in_begin), v);
  launch_expand<true>(v, t, columns, out_begin, y);
  return true;
}

}  // namespace scute::cuda::prefill
