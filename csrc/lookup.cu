#include "check.h"
#include "common.cuh"
#include "launch.h"
#include "ops.h"

namespace scute::cuda {
namespace {

struct LookupParams {
  const int64_t* ids;  // (rows,)
  int64_t first_id, held_ids;
  const char* arena;
  const Entry* table;  // of the module
  int modules;
  const int32_t* tile_count;
  const Tile* tiles;
  const int32_t* perm;
  float* v;  // (1, rows, ...), v_row between rows
  int64_t v_row;
};

constexpr int kLookupThreads = 128;

// Tiles go round the CTAs, a tile's rows round the warps.
template <typename T>
__global__ void __launch_bounds__(kLookupThreads) lookup_kernel(const __grid_constant__ LookupParams p) {
  pdl_trigger();
  pdl_wait();
  const int lane = threadIdx.x % 32;
  for (int t = blockIdx.x; t < *p.tile_count; t += gridDim.x) {
    const Tile tile = p.tiles[t];
    const Entry& entry = p.table[static_cast<int64_t>(tile.slot) * p.modules];
    if (entry.a == kAbsent) continue;
    const int rank8 = entry_rank(entry.meta);
    const T* a = reinterpret_cast<const T*>(p.arena + entry.a);
    for (int i = threadIdx.x / 32; i < tile.rows; i += kLookupThreads / 32) {
      const int row = p.perm[tile.begin + i];
      const int64_t id = p.ids[row] - p.first_id;
      const bool held = id >= 0 && id < p.held_ids;  // else another tensor-parallel rank holds it
      for (int r = lane; r < rank8; r += 32) p.v[row * p.v_row + r] = held ? to_float(a[id * rank8 + r]) : 0;
    }
  }
}

}  // namespace

void lookup(const Tensor& ids, const Tensor& arena, const Tensor& table, const Tensor& plan, int64_t tile_rows,
            int64_t module, int64_t first_id, int64_t held_ids, at::ScalarType dtype, Tensor& v) {
  check_lookup(ids, arena, table, plan, tile_rows, module, held_ids, dtype, v);
  if (ids.size(0) == 0) return;
  const c10::cuda::CUDAGuard guard(ids.device());
  const Plan view = plan_view(plan.data_ptr<int32_t>(), ids.size(0));
  LookupParams p{};
  p.ids = ids.const_data_ptr<int64_t>();
  p.first_id = first_id;
  p.held_ids = held_ids;
  p.arena = reinterpret_cast<const char*>(arena.const_data_ptr());
  p.table = reinterpret_cast<const Entry*>(table.const_data_ptr<int64_t>()) + module;
  p.modules = static_cast<int>(table.size(1));
  p.tile_count = view.header;
  p.tiles = view.tiles;
  p.perm = view.perm;
  p.v = v.data_ptr<float>();
  p.v_row = v.stride(1);
  const int64_t grid = std::min<int64_t>(ids.size(0), multiprocessors() * 4);
  SCUTE_CUDA_DISPATCH(dtype, [&] { launch(lookup_kernel<scalar_t>, grid, kLookupThreads, 0, true, p); });
}

}  // namespace scute::cuda
