#include "expand_kernel.cuh"
#include "ops.h"
#include "prefill_vera.cuh"
#include "shrink.cuh"

namespace scute::cuda {
namespace {

constexpr int kProjectThreads = 256, kProjectWarps = kProjectThreads / 32;
constexpr int kProjectSteps = 8;                                     // products of 32 inputs of a warp
constexpr int kProjectInputs = kProjectWarps * kProjectSteps * 32;   // of an item; its ranks are one block of 8

// 16 bit. One burst of eight 16-byte loads a lane; half of each tensor-core product stays empty. A and B are the same
// for all of the model's layers of a width, so they are asked to stay in the L2 cache.
template <typename T>
__global__ void __launch_bounds__(kProjectThreads, 3) project_kernel(const __grid_constant__ ShrinkParams p) {
  __shared__ ItemsShared<ShrinkItem> work;
  __shared__ float partial[2][kProjectWarps][kTokens][kRankStep];
  pdl_trigger();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  Items<ShrinkItem, ShrinkResolve<T, true>> items(work, {p});
  bool waited = false;
  const ShrinkItem* next = nullptr;
  for (int turn = 0; (next = items.next()) || items.look_up(); turn ^= 1) {
    if (!next) continue;
    const ShrinkItem& item = *next;
    const int row = p.list.perm[item.begin + min(g, item.rows - 1)];
    const T* x_row = static_cast<const T*>(p.x) + row * p.x_stride + item.first;
    float sums[2][4] = {};
    for (int begin = 0; begin < item.inputs; begin += kProjectInputs) {  // once, unless v has room for one part only
      const int first = begin / 8 + warp * kProjectSteps * 4 + t, eights = item.inputs / 8 - first;
      uint4 w[kProjectSteps];
#pragma unroll
      for (int step = 0; step < kProjectSteps; ++step) {
        w[step] = make_uint4(0, 0, 0, 0);
        if (step * 4 < eights) w[step] = load_weights<true>(static_cast<const T*>(item.a) + (first + step * 4) * 64 + g * 8);
      }
      if (!waited) pdl_wait();
      waited = true;
#pragma unroll
      for (int step = 0; step < kProjectSteps; ++step) {
        uint4 x = make_uint4(0, 0, 0, 0);
        if (g < item.rows && step * 4 < eights) x = *reinterpret_cast<const uint4*>(x_row + (first + step * 4) * 8);
        mma32<T>(sums[step % 2], w[step], make_uint4(0, 0, 0, 0), x);
      }
    }
    partial[turn][warp][2 * t][g] = sums[0][0] + sums[1][0];
    partial[turn][warp][2 * t + 1][g] = sums[0][1] + sums[1][1];
    __syncthreads();
    const int token = threadIdx.x / kRankStep, r = threadIdx.x % kRankStep;
    const int to = __shfl_sync(~0u, row, token % kTokens * 4);
    if (token < item.rows) {
      float sum = partial[turn][0][token][r];
#pragma unroll
      for (int other = 1; other < kProjectWarps; ++other) sum += partial[turn][other][token][r];
      item.v[to * p.v_row + r] = sum;
    }
  }
  if (!waited) pdl_wait();
}

}  // namespace

// Two launches: x A for all slices at once, then for each slice d, B and e.
void vera(const Tensor& x, const Tensor& row_slot, const Tensor& arena, const Tensor& table, const Tensor& sets,
          const Tensor& plan, int64_t tile_rows, int64_t module, IntArrayRef columns, int64_t in_begin,
          IntArrayRef out_begin, Tensor& v, Tensor& y) {
  check_vera(x, row_slot, arena, table, sets, plan, tile_rows, module, columns, in_begin, out_begin, v, y);
  const int64_t slices = columns.size() - 1;
  TORCH_CHECK(slices <= kMaxSlices, "slices is ", slices, "; want at most ", kMaxSlices);
  if (x.size(0) == 0) return;
  const c10::cuda::CUDAGuard guard(x.device());
  if (prefill::vera(x, row_slot, arena, table, sets, plan, tile_rows, module, columns, in_begin, out_begin, v,
                    y)) return;  // what follows serves tiles of any size
  const int64_t rows = x.size(0), room = v.size(2) / 8 * 8;
  const Plan view = plan_view(plan.data_ptr<int32_t>(), rows);

  const auto fill = [&](auto& p) {
    p.v_row = v.stride(1);
    p.arena = reinterpret_cast<const char*>(arena.const_data_ptr());
    p.table = reinterpret_cast<const Entry*>(table.const_data_ptr<int64_t>()) + module;
    p.modules = static_cast<int>(table.size(1));
    p.list.count = view.header + 1;
    p.list.tiles = view.shared_tiles;
    p.list.perm = view.shared_perm;
    p.sets = reinterpret_cast<const SharedSet*>(sets.const_data_ptr<int64_t>());
  };
  ShrinkParams project{};
  fill(project);
  const bool aligned = set_input(project, x);
  project.v = v.data_ptr<float>();
  project.v_part = v.stride(0);
  project.in_begin = static_cast<int>(in_begin);
  project.span = kRankStep;
  // Fewer partial sums than v has room for: each of the many CTAs of the second launch has to add them up.
  const int64_t parts = v.size(0) == 1 ? 1 : (project.in + kProjectInputs - 1) / kProjectInputs;
  project.part = parts == 1 ? project.in : kProjectInputs;
  project.parts = Divisor(parts);
  divide_work(project.list, rows, tile_rows, sets.size(0), parts, room / kRankStep);
  if (project.list.items == 0) return;
  SCUTE_CUDA_DISPATCH(x.scalar_type(), [&] {
    if constexpr (sizeof(scalar_t) == 2) {
      if (aligned) {
        const int64_t grid = std::min<int64_t>(project.list.items, static_cast<int64_t>(multiprocessors()) * 3);
        return launch(project_kernel<scalar_t>, grid, kProjectThreads, 0, true, project);
      }
    }
    const int64_t grid = std::min<int64_t>(project.list.items, static_cast<int64_t>(multiprocessors()) * 7);
    launch(shrink_simple_kernel<scalar_t, true>, grid, kShrinkThreads, 0, true, project);
  });

  ExpandParams deliver{};
  fill(deliver);
  deliver.v = v.const_data_ptr<float>();
  deliver.v_chunk = v.stride(0);
  deliver.v_slice = 0;  // all slices start from the same product
  deliver.chunks = static_cast<int>(parts);
  deliver.room = static_cast<int>(room);
  deliver.slices = static_cast<int>(slices);
  deliver.row_slot = row_slot.const_data_ptr<int32_t>();
  deliver.slots = static_cast<int>(table.size(0));
  std::copy(out_begin.begin(), out_begin.end(), deliver.out_begin);
  launch_expand<true>(y, columns, tile_rows, sets.size(0), deliver);
}

}  // namespace scute::cuda
