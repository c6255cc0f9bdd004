#include "expand_kernel.cuh"
#include "ops.h"
#include "shrink.cuh"

namespace scute::cuda {

// Two launches: x A for all slices at once, then for each slice d, B and e.
void vera(const Tensor& x, const Tensor& row_slot, const Tensor& arena, const Tensor& table, const Tensor& sets,
          const Tensor& plan, int64_t tile_rows, int64_t module, IntArrayRef columns, int64_t in_begin,
          IntArrayRef out_begin, Tensor& v, Tensor& y) {
  check_vera(x, row_slot, arena, table, sets, plan, tile_rows, module, columns, in_begin, out_begin, v, y);
  const int64_t slices = columns.size() - 1;
  TORCH_CHECK(slices <= kMaxSlices, "slices is ", slices, "; want at most ", kMaxSlices);
  if (x.size(0) == 0) return;
  const c10::cuda::CUDAGuard guard(x.device());
  const int rows = static_cast<int>(x.size(0));
  const Plan view = plan_view(plan.data_ptr<int32_t>(), rows);

  const auto fill = [&](auto& p) {
    p.v_chunk = v.stride(0);
    p.v_row = v.stride(1);
    p.chunks = static_cast<int>(v.size(0));
    p.arena = reinterpret_cast<const char*>(arena.const_data_ptr());
    p.table = reinterpret_cast<const Entry*>(table.const_data_ptr<int64_t>()) + module;
    p.modules = static_cast<int>(table.size(1));
    p.slices = static_cast<int>(slices);
    p.list = {view.header + 1, view.shared_tiles, view.shared_perm, rows};
    p.sets = reinterpret_cast<const SharedSet*>(sets.const_data_ptr<int64_t>());
    p.row_slot = row_slot.const_data_ptr<int32_t>();
    p.slots = static_cast<int>(table.size(0));
  };
  ShrinkParams project{};
  fill(project);
  project.v = v.data_ptr<float>();
  project.in_begin = static_cast<int>(in_begin);
  launch_shrink<true>(x, project);

  ExpandParams deliver{};
  fill(deliver);
  deliver.v = v.const_data_ptr<float>();
  deliver.v_slice = 0;  // all slices start from the same product
  deliver.room = static_cast<int>(v.size(2) / 8 * 8);
  std::copy(out_begin.begin(), out_begin.end(), deliver.out_begin);
  launch_expand<true>(y, columns, deliver);
}

}  // namespace scute::cuda
