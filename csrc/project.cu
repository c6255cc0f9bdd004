#include "ops.h"
#include "prefill_shrink.cuh"
#include "shrink.cuh"

namespace scute::cuda {
namespace {

constexpr int kProjectThreads = 128, kProjectWarps = kProjectThreads / 32;
constexpr int kProjectSteps = 8;                                    // products of 32 inputs of a warp
constexpr int kProjectInputs = kProjectWarps * kProjectSteps * 32;  // of an item; its ranks are one block of 8
static_assert(kProjectInputs == kChunk);

// 16 bit. One burst of eight 16-byte loads a lane; half of each tensor-core product stays empty. A and B are the same
// for all of the model's layers of a width, so they are asked to stay in the L2 cache.
template <typename T>
__global__ void __launch_bounds__(kProjectThreads, 6) project_kernel(const __grid_constant__ ShrinkParams p) {
  __shared__ ItemsShared<ShrinkItem> work;
  __shared__ float partial[2][kProjectWarps][kTokens][kRankStep];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  Items<ShrinkItem, ShrinkResolve<T, true>> items(work, {p});
  items.look_up();
  input_wait();
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
        if (step * 4 < eights)
          w[step] = load_weights<true>(static_cast<const T*>(item.a) + (first + step * 4) * 64 + g * 8);
      }
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
}

// v[0] += v[1] + ... for all rows of shared tiles: many CTAs of the expand would add them up again.
__global__ void __launch_bounds__(kProjectThreads) add_parts_kernel(const __grid_constant__ ShrinkParams p) {
  pdl_trigger();
  pdl_wait();
  const int tiles = *p.list.count, parts = p.parts.value;
  constexpr int kEach = 8;  // CTAs of a tile
  for (int tile = blockIdx.x / kEach; tile < tiles; tile += gridDim.x / kEach) {
    const Tile listed = p.list.tiles[tile];
    const int rank8 = static_cast<int>(p.sets[listed.slot].rank);
    for (int i = blockIdx.x % kEach * kProjectThreads + threadIdx.x; i < listed.rows * rank8;
         i += kEach * kProjectThreads) {
      float* v = p.v + p.list.perm[listed.begin + i / rank8] * p.v_row + i % rank8;
      float sum = *v;
#pragma unroll 7
      for (int part = 1; part < parts; ++part) sum += v[part * p.v_part];
      *v = sum;
    }
  }
}

}  // namespace

void project(const Tensor& x, const Tensor& row_slot, const Tensor& arena, const Tensor& table, const Tensor& sets,
             const Tensor& plan, int64_t tile_rows, int64_t module, int64_t slices, int64_t in_begin, Tensor& v) {
  check_project(x, row_slot, arena, table, sets, plan, tile_rows, module, slices, in_begin, v);
  if (x.size(0) == 0) return;
  const c10::cuda::CUDAGuard guard(x.device());
  if (prefill::project(x, row_slot, arena, table, sets, plan, tile_rows, module, slices, in_begin, v)) return;
  const int64_t rows = x.size(0);
  const Plan view = plan_view(plan.data_ptr<int32_t>(), rows);

  ShrinkParams p{};
  const bool aligned = set_operands(p, x, v, 1);
  p.arena = reinterpret_cast<const char*>(arena.const_data_ptr());
  p.sets = reinterpret_cast<const SharedSet*>(sets.const_data_ptr<int64_t>());
  p.in_begin = static_cast<int>(in_begin);
  p.span = kRankStep;
  p.list = {view.header + kSharedTiles, view.header + kLargestSharedRank, p.span, view.shared_tiles, view.shared_perm};
  divide_work(p.list, rows, tile_rows, sets.size(0), v.size(0), p.stride / kRankStep);
  if (p.list.items == 0) return;
  SCUTE_CUDA_DISPATCH(x.scalar_type(), [&] {
    if constexpr (sizeof(scalar_t) == 2) {
      if (aligned) {
        return launch(project_kernel<scalar_t>, sums_grid(p, rows), kProjectThreads, 0, true, p, before_linear(rows));
      }
    }
    const int64_t grid = std::min<int64_t>(p.list.items, static_cast<int64_t>(multiprocessors()) * 7);
    launch(shrink_simple_kernel<scalar_t, true>, grid, kShrinkThreads, 0, true, p);
  });
  if (v.size(0) > 1)
    launch(add_parts_kernel, 8 * std::min<int64_t>(p.list.capacity, 64), kProjectThreads, 0, true, p,
           before_linear(rows));
}

}  // namespace scute::cuda
