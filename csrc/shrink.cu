#include "shrink.cuh"

#include "ops.h"
#include "prefill_shrink.cuh"

namespace scute::cuda {

void shrink(const Tensor& x, const Tensor& arena, const Tensor& table, const Tensor& plan, int64_t tile_rows,
            int64_t module, int64_t slices, Tensor& v) {
  check_shrink(x, arena, table, plan, tile_rows, module, slices, v);
  if (x.size(0) == 0) return;
  const c10::cuda::CUDAGuard guard(x.device());
  if (prefill::shrink(x, arena, table, plan, tile_rows, module, slices, v))
    return;  // what follows serves tiles of any size
  const int64_t rows = x.size(0);
  const Plan view = plan_view(plan.data_ptr<int32_t>(), rows);

  ShrinkParams p{};
  const bool aligned = set_operands(p, x, v, slices);
  p.arena = reinterpret_cast<const char*>(arena.const_data_ptr());
  p.table = reinterpret_cast<const Entry*>(table.const_data_ptr<int64_t>()) + module;
  p.modules = static_cast<int>(table.size(1));
  p.span = kGroups * 16;
  p.list = {view.header + kTiles, view.header + kLargestRank, p.span, view.tiles, view.perm};
  divide_work(p.list, rows, tile_rows, table.size(0), slices * v.size(0), (p.stride + p.span - 1) / p.span);
  const int64_t grid = sums_grid(p, rows);
  if (grid == 0) return;
  SCUTE_CUDA_DISPATCH(x.scalar_type(), [&] {
    auto* kernel = shrink_simple_kernel<scalar_t, false>;
    if constexpr (sizeof(scalar_t) == 2) {
      if (aligned) kernel = shrink_kernel<scalar_t>;
    }
    launch(kernel, grid, kShrinkThreads, 0, true, p, before_linear(rows));
  });
}

}  // namespace scute::cuda
