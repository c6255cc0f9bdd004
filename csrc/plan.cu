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

struct RowKeys {
  int key[2];  // slot of a private list, shared set of the other; -1: neither
  int live, rank;
};

__device__ __forceinline__ RowKeys row_keys(const PlanParams& p, int row) {
  const int slot = p.row_slot[row];
  if (slot < 0 || slot >= p.keys) return {{-1, -1}, 0, 0};
  const Slot tenant = p.slots[slot];
  if (tenant.live & kShared)
    return {
        {-1, tenant.shared_set >= 0 && tenant.shared_set < p.keys ? tenant.shared_set : -1}, tenant.live, tenant.rank};
  return {{tenant.live & kDelta ? slot : -1, -1}, tenant.live, tenant.rank};
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

// One CTA. A counting sort for each list, private tiles by slot and shared tiles by set: count the keys, sum the
// counts, then one warp a list puts the rows in place, 32 at a time and in order, so that the result is stable.
__global__ void __launch_bounds__(kPlanThreads) plan_kernel(const __grid_constant__ PlanParams p) {
  extern __shared__ int32_t places[];  // [2][keys]: rows with the key, then where the next one goes; [2][keys]: ranks
  __shared__ int block_key[2][kBlockRows];
  __shared__ unsigned long long warps[kPlanThreads / 32];
  __shared__ int live_bits, largest[2];
  int32_t* ranks = places + 2 * p.keys;
  for (int i = threadIdx.x; i < 4 * p.keys; i += kPlanThreads) places[i] = 0;
  if (threadIdx.x == 0) live_bits = largest[0] = largest[1] = 0;
  __syncthreads();

  int bits = 0;
  for (int row = threadIdx.x; row < p.rows; row += kPlanThreads) {
    const RowKeys keys = row_keys(p, row);
    bits |= keys.live;
    for (int list = 0; list < 2; ++list) {
      if (keys.key[list] < 0) continue;
      atomicAdd(&places[list * p.keys + keys.key[list]], 1);
      atomicMax(&ranks[list * p.keys + keys.key[list]], keys.rank);
      atomicMax(&largest[list], keys.rank);
    }
  }
  if (bits) atomicOr(&live_bits, bits);
  __syncthreads();

  const int each = (p.keys + kPlanThreads - 1) / kPlanThreads;
  const int first = threadIdx.x * each, last = min(p.keys, first + each);
  const auto tiles_of = [&](int at) { return (places[at] + p.tile_rows - 1) / p.tile_rows; };
  unsigned long long mine = 0, all;  // weights, and tiles << 40
  for (int list = 0; list < 2; ++list)
    for (int at = list * p.keys + first; at < list * p.keys + last; ++at) {
      const unsigned long long tiles = tiles_of(at);
      mine += tiles << 40 | tiles * (kTileWeight + ranks[at]);
    }
  exclusive_sum(mine, warps, all);
  const auto workers_of = [&](int at) {
    return tile_workers(kTileWeight + ranks[at], all & ((1ull << 40) - 1), all >> 40);
  };
  int workers = 0;  // of the lists before
  for (int list = 0; list < 2; ++list) {
    unsigned long long total;  // rows, tiles << 20 and workers << 40
    mine = 0;
    for (int at = list * p.keys + first; at < list * p.keys + last; ++at) {
      if (!places[at]) continue;
      const unsigned long long tiles = tiles_of(at);
      mine += places[at] | tiles << 20 | tiles * workers_of(at) << 40;
    }
    const unsigned long long sum = exclusive_sum(mine, warps, total);
    int row = sum & 0xfffff, tile = sum >> 20 & 0xfffff, worker = workers + static_cast<int>(sum >> 40);
    Tile* tiles = list ? p.out.shared_tiles : p.out.tiles;
    for (int key = first; key < last; ++key) {
      const int at = list * p.keys + key, count = places[at];
      if (!count) continue;
      const int each_tile = workers_of(at);
      for (int done = 0; done < count; done += p.tile_rows, worker += each_tile)
        tiles[tile++] = {key, row + done, min(p.tile_rows, count - done), worker};
      places[at] = row;
      row += count;
    }
    if (threadIdx.x == 0) p.out.header[list] = total >> 20 & 0xfffff;
    workers += static_cast<int>(total >> 40);
  }
  if (threadIdx.x == 0) {
    p.out.header[kLiveBits] = live_bits;
    p.out.header[kWorkersUsed] = workers;
    p.out.header[kLargestRank] = largest[0];
    p.out.header[kLargestSharedRank] = largest[1];
  }
  __syncthreads();
  const int counts[2] = {p.out.header[kTiles], p.out.header[kSharedTiles]};
  for (int worker = threadIdx.x; worker < shares_of(p.rows); worker += kPlanThreads) {
    if (worker >= workers) {
      p.out.shares[worker] = Share{};
      continue;
    }
    const int shared = counts[1] && worker >= p.out.shared_tiles[0].worker;
    const Tile* tiles = shared ? p.out.shared_tiles : p.out.tiles;
    int low = 0, high = counts[shared];  // the last tile that begins at or before this worker
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (tiles[middle].worker <= worker ? low : high) = middle;
    }
    const int end = low + 1 < counts[shared] ? tiles[low + 1].worker
                    : !shared && counts[1]   ? p.out.shared_tiles[0].worker
                                             : workers;
    p.out.shares[worker] = share_of(tiles[low], shared, worker - tiles[low].worker, end - tiles[low].worker);
  }

  const int list = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int block = 0; block < p.rows; block += kBlockRows) {
    __syncthreads();
    for (int i = threadIdx.x; i < kBlockRows; i += kPlanThreads) {
      const RowKeys keys = block + i < p.rows ? row_keys(p, block + i) : RowKeys{{-1, -1}, 0, 0};
      block_key[0][i] = keys.key[0];
      block_key[1][i] = keys.key[1];
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
  std::call_once(once, [] { able = has_code_for_90(edge_kernel); });
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
  const size_t smem = 4 * sizeof(int32_t) * p.keys;
  TORCH_CHECK(smem <= 64 * 1024, "slots has ", p.keys, " rows; want at most 4096");
  launch(plan_kernel, 1, kPlanThreads, smem, false, p);
  if (dependent_launch() && capturing(c10::cuda::getCurrentCUDAStream())) launch(edge_kernel, 1, 32, 0, false, 0);
}

}  // namespace scute::cuda
