#include "expand_kernel.cuh"
#include "ops.h"
#include "prefill_expand.cuh"

namespace scute::cuda {

void expand(const Tensor& v, const Tensor& arena, const Tensor& table, const Tensor& plan, int64_t tile_rows,
            int64_t module, IntArrayRef columns, Tensor& y) {
  check_expand(v, arena, table, plan, tile_rows, module, columns, y);
  const int64_t slices = columns.size() - 1;
  TORCH_CHECK(slices <= kMaxSlices, "slices is ", slices, "; want at most ", kMaxSlices);
  if (y.size(0) == 0) return;
  const c10::cuda::CUDAGuard guard(y.device());
  if (prefill::expand(v, arena, table, plan, tile_rows, module, columns, y)) return;  // what follows serves tiles of any size
  const Plan view = plan_view(plan.data_ptr<int32_t>(), y.size(0));

  ExpandParams p{};
  p.v = v.const_data_ptr<float>();
  p.v_chunk = v.stride(0);
  p.v_row = v.stride(1);
  p.v_slice = v.size(2) / slices;
  p.chunks = static_cast<int>(v.size(0));
  p.room = static_cast<int>(p.v_slice / 8 * 8);
  p.arena = reinterpret_cast<const char*>(arena.const_data_ptr());
  p.table = reinterpret_cast<const Entry*>(table.const_data_ptr<int64_t>()) + module;
  p.modules = static_cast<int>(table.size(1));
  p.slices = static_cast<int>(slices);
  p.list.count = view.header;
  p.list.tiles = view.tiles;
  p.list.perm = view.perm;
  launch_expand<false>(y, columns, tile_rows, table.size(0), p);
}

}  // namespace scute::cuda
