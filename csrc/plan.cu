#include <mutex>

#include "check.h"
#include "common.cuh"
#include "launch.h"
#include "ops.h"

namespace scute::cuda {
namespace {

constexpr int kPlanThreads = 1024;
constexpr int kBlockRows = 2048;  // rows sorted at a time

struct PlanParams {
  const int32_t* row_slot;  // (rows,)
  const Slot* slots;        // (keys,); shared sets are fewer than slots
  int rows, keys, tile_rows;
  Plan out;
};

__device__ __forceinline__ void row_keys(const PlanParams& p, int row, int (&key)[2], int& live) {
  key[0] = key[1] = -1;
  live = 0;
  const int slot = p.row_slot[row];
  if (slot < 0 || slot >= p.keys) return;
  const Slot tenant = p.slots[slot];
  live = tenant.live;
  if (live & kDelta) key[0] = slot;
  if (live & kShared && tenant.shared_set >= 0 && tenant.shared_set < p.keys) key[1] = tenant.shared_set;
}

// Exclusive sums over the CTA's threads of two counts packed in one word; `total` gets the sum of all.
__device__ unsigned long long exclusive_sum(unsigned long long value, unsigned long long* warps,
                                            unsigned long long& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  unsigned long long sum = value;
  for (int step = 1; step < 32; step *= 2) {
    const unsigned long long other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  __syncthreads();
  if (lane == 31) warps[warp] = sum;
  __syncthreads();
  unsigned long long before = 0;
  total = 0;
  for (int w = 0; w < kPlanThreads / 32; ++w) {
    if (w < warp) before += warps[w];
    total += warps[w];
  }
  return before + sum - value;
}

// One CTA. A counting sort for each list, private tiles by slot and shared tiles by set: count the keys, sum the counts,
// then one warp a list puts the rows in place, 32 at a time and in order, so that the result is stable.
__global__ void __launch_bounds__(kPlanThreads) plan_kernel(const __grid_constant__ PlanParams p) {
  extern __shared__ int32_t places[];  // [2][keys]: rows with the key, then where the next one goes
  __shared__ int block_key[2][kBlockRows];
  __shared__ unsigned long long warps[kPlanThreads / 32];
  __shared__ int live_bits;
  for (int i = threadIdx.x; i < 2 * p.keys; i += kPlanThreads) places[i] = 0;
  if (threadIdx.x == 0) live_bits = 0;
  __syncthreads();

  int bits = 0;
  for (int row = threadIdx.x; row < p.rows; row += kPlanThreads) {
    int key[2], live;
    row_keys(p, row, key, live);
    bits |= live;
    for (int list = 0; list < 2; ++list)
      if (key[list] >= 0) atomicAdd(&places[list * p.keys + key[list]], 1);
  }
  if (bits) atomicOr(&live_bits, bits);
  __syncthreads();

  const int each = (p.keys + kPlanThreads - 1) / kPlanThreads;
  const int first = threadIdx.x * each, last = min(p.keys, first + each);
  for (int list = 0; list < 2; ++list) {
    int32_t* place = places + list * p.keys;
    unsigned long long mine = 0, total;  // rows, and tiles << 32
    for (int key = first; key < last; ++key)
      mine += place[key] | static_cast<unsigned long long>((place[key] + p.tile_rows - 1) / p.tile_rows) << 32;
    const unsigned long long sum = exclusive_sum(mine, warps, total);
    int row = static_cast<int>(sum), tile = static_cast<int>(sum >> 32);
    Tile* tiles = list ? p.out.shared_tiles : p.out.tiles;
    for (int key = first; key < last; ++key) {
      const int count = place[key];
      for (int done = 0; done < count; done += p.tile_rows)
        tiles[tile++] = {key, row + done, min(p.tile_rows, count - done), 0};
      place[key] = row;
      row += count;
    }
    if (threadIdx.x == 0) p.out.header[list] = static_cast<int>(total >> 32);
  }
  if (threadIdx.x == 0) p.out.header[2] = live_bits;

  const int list = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int block = 0; block < p.rows; block += kBlockRows) {
    __syncthreads();
    for (int i = threadIdx.x; i < kBlockRows; i += kPlanThreads) {
      int key[2] = {-1, -1}, live;
      if (block + i < p.rows) row_keys(p, block + i, key, live);
      block_key[0][i] = key[0];
      block_key[1][i] = key[1];
    }
    __syncthreads();
    if (list >= 2) continue;
    int32_t* place = places + list * p.keys;
    int32_t* perm = list ? p.out.shared_perm : p.out.perm;
    for (int i = lane; i < kBlockRows && block + i - lane < p.rows; i += 32) {
      const int key = block_key[list][i];
      const unsigned same = __match_any_sync(~0u, key);
      const int before = __popc(same & ((1u << lane) - 1)), count = __popc(same);
      const int base = key >= 0 ? place[key] : 0;
      __syncwarp();
      if (key >= 0) {
        perm[base + before] = block + i;
        if (before == 0) place[key] = base + count;
      }
      __syncwarp();
    }
  }
}

// Runs alone after the plan: kernels that start early may start only when the plan is there for all to see.
__global__ void edge_kernel(int) {}

}  // namespace

bool dependent_launch() {
  static const bool wanted = tuned("SCUTE_PDL", 1) != 0;
  if (!wanted) return false;
  static std::once_flag once;
  static bool able = false;
  std::call_once(once, [] {
    cudaFuncAttributes attributes{};
    C10_CUDA_CHECK(cudaFuncGetAttributes(&attributes, edge_kernel));
    able = attributes.ptxVersion >= 90 && device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9;
  });
  return able;
}

void plan(const Tensor& row_slot, const Tensor& slots, int64_t tile_rows, Tensor& plan) {
  check_plan(row_slot, slots, tile_rows, plan);
  const c10::cuda::CUDAGuard guard(row_slot.device());
  PlanParams p{};
  p.row_slot = row_slot.const_data_ptr<int32_t>();
  p.slots = reinterpret_cast<const Slot*>(slots.const_data_ptr<int32_t>());
  p.rows = static_cast<int>(row_slot.numel());
  p.keys = static_cast<int>(slots.size(0));
  p.tile_rows = static_cast<int>(tile_rows);
  p.out = plan_view(plan.data_ptr<int32_t>(), p.rows);
  const size_t smem = 2 * sizeof(int32_t) * p.keys;
  TORCH_CHECK(smem <= 64 * 1024, "slots has ", p.keys, " rows; want at most 8192");
  launch(plan_kernel, 1, kPlanThreads, smem, false, p);
  if (dependent_launch() && capturing(c10::cuda::getCurrentCUDAStream())) launch(edge_kernel, 1, 32, 0, false, 0);
}

}  // namespace scute::cuda
