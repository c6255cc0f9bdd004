#include "expand_kernel.cuh"
#include "ops.h"
#include "prefill_expand.cuh"

namespace scute::cuda {

void expand(const std::optional<Tensor>& v, const std::optional<Tensor>& shared_v, const Tensor& row_slot,
            const Tensor& arena, const Tensor& table, const Tensor& sets, const Tensor& plan, int64_t tile_rows,
            int64_t module, IntArrayRef columns, IntArrayRef out_begin, Tensor& y) {
  check_expand(v, shared_v, row_slot, arena, table, sets, plan, tile_rows, module, columns, out_begin, y);
  if (y.size(0) == 0 || (!v && !shared_v)) return;
  const c10::cuda::CUDAGuard guard(y.device());
  const int64_t slices = columns.size() - 1;
  if (prefill::expand(v, shared_v, row_slot, arena, table, sets, plan, tile_rows, module, columns, out_begin, y))
    return;

  ExpandParams p = expand_params(row_slot, arena, table, sets, plan, module, columns, out_begin);
  if (v) p.own = own_sums(*v, slices);
  if (shared_v) p.shared = shared_sums(*shared_v);
  p.y = y.data_ptr();
  p.y_stride = y.stride(0);
  p.y_pairs = reinterpret_cast<uintptr_t>(p.y) % 4 == 0 && p.y_stride % 2 == 0;
  for (int i = 0; i < p.slices; ++i) p.y_pairs &= p.columns[i] % 2 == 0;
  TORCH_CHECK(p.units[p.slices] < (int64_t{1} << 31) / kWorkers, "y has ", y.size(1), " columns; want fewer than 2^27");
  if (p.units[p.slices] == 0) return;
  p.operand = operand_row(static_cast<int>(std::max(p.own.room, p.shared.room)));
  const size_t smem = kTokens * p.operand;
  const int64_t grid = std::min<int64_t>(p.workers, static_cast<int64_t>(multiprocessors()) * kExpandCtas);
  SCUTE_CUDA_DISPATCH(y.scalar_type(), [&] {
    if constexpr (sizeof(scalar_t) == 2) {
      launch(expand_kernel<scalar_t>, grid, kExpandThreads, smem, true, p);
    } else {
      launch(expand_fp32_kernel, grid, kExpandThreads, 0, true, p);
    }
  });
}

}  // namespace scute::cuda
