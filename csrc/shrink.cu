#include "ops.h"
#include "shrink.cuh"

namespace scute::cuda {

void shrink(const Tensor& x, const Tensor& arena, const Tensor& table, const Tensor& plan, int64_t tile_rows,
            int64_t module, int64_t slices, Tensor& v) {
  check_shrink(x, arena, table, plan, tile_rows, module, slices, v);
  TORCH_CHECK(slices <= kMaxSlices, "slices is ", slices, "; want at most ", kMaxSlices);
  if (x.size(0) == 0) return;
  const c10::cuda::CUDAGuard guard(x.device());
  const int rows = static_cast<int>(x.size(0));
  const Plan view = plan_view(plan.data_ptr<int32_t>(), rows);

  ShrinkParams p{};
  p.arena = reinterpret_cast<const char*>(arena.const_data_ptr());
  p.table = reinterpret_cast<const Entry*>(table.const_data_ptr<int64_t>()) + module;
  p.modules = static_cast<int>(table.size(1));
  p.slices = static_cast<int>(slices);
  p.list = {view.header, view.tiles, view.perm, rows};
  p.v = v.data_ptr<float>();
  p.v_chunk = v.stride(0);
  p.v_row = v.stride(1);
  p.stride = v.size(2) / slices;
  p.chunks = static_cast<int>(v.size(0));
  launch_shrink<false>(x, p);
}

}  // namespace scute::cuda
