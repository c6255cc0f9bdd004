#include <utility>

#include "../ops.h"
#include "common.h"

namespace scute::cpu {
namespace {

struct KeyedRow {
  int32_t key, row, rank;  // key: slot or shared set
  bool operator<(const KeyedRow& other) const { return std::pair(key, row) < std::pair(other.key, other.row); }
};

struct TileList {
  Tile* tiles;
  int32_t count = 0, largest = 0;
  std::vector<int64_t> weights;  // of the tiles

  // Sorts the rows by (key, row) and cuts those of each key into tiles.
  void write(std::vector<KeyedRow> rows, int64_t tile_rows, int32_t* perm) {
    std::sort(rows.begin(), rows.end());
    const int32_t end = static_cast<int32_t>(rows.size()),
                  step = static_cast<int32_t>(std::min<int64_t>(tile_rows, end));
    for (int32_t begin = 0, next; begin < end; begin = next) {
      int32_t rank = 0;
      for (next = begin; next < end && rows[next].key == rows[begin].key; ++next) {
        perm[next] = rows[next].row;
        rank = std::max(rank, rows[next].rank);
      }
      for (int32_t i = begin; i < next; i += step) {
        tiles[count++] = {rows[begin].key, i, std::min(step, next - i), 0};
        weights.push_back(kTileWeight + rank);
      }
      largest = std::max(largest, rank);
    }
  }
};

}  // namespace

void plan(const Tensor& row_slot, const Tensor& slots, int64_t tile_rows, Tensor& plan) {
  check_plan(row_slot, slots, tile_rows, plan);
  const int64_t rows = row_slot.numel();
  const int32_t* slot_of = row_slot.data_ptr<int32_t>();
  const Slot* tenants = reinterpret_cast<const Slot*>(slots.data_ptr<int32_t>());

  std::vector<KeyedRow> with_delta, with_shared;
  int32_t live = 0;
  for (int32_t row = 0; row < rows; ++row) {
    const int32_t slot = slot_of[row];
    if (slot < 0) continue;
    TORCH_CHECK(slot < slots.size(0), "row_slot[", row, "] is ", slot, "; want it below the ", slots.size(0), " slots");
    const Slot& tenant = tenants[slot];
    live |= tenant.live;
    if (tenant.live & kShared) with_shared.push_back({tenant.shared_set, row, tenant.rank});
    else if (tenant.live & kDelta) with_delta.push_back({slot, row, tenant.rank});
  }

  const Plan out = plan_view(plan.data_ptr<int32_t>(), rows);
  TileList lists[2] = {{out.tiles}, {out.shared_tiles}};
  lists[0].write(std::move(with_delta), tile_rows, out.perm);
  lists[1].write(std::move(with_shared), tile_rows, out.shared_perm);
  int64_t all_weights = 0;
  for (const TileList& list : lists)
    for (int64_t weight : list.weights) all_weights += weight;
  int32_t worker = 0;
  for (TileList& list : lists)
    for (int32_t t = 0; t < list.count; ++t) {
      Tile& tile = list.tiles[t];
      tile.worker = worker;
      const int workers = tile_workers(list.weights[t], all_weights, lists[0].count + lists[1].count);
      for (int i = 0; i < workers; ++i) out.shares[worker++] = share_of(tile, &list == &lists[1], i, workers);
    }
  std::fill(out.shares + worker, out.shares + shares_of(rows), Share{});
  out.header[kTiles] = lists[0].count;
  out.header[kSharedTiles] = lists[1].count;
  out.header[kLiveBits] = live;
  out.header[kWorkersUsed] = worker;
  out.header[kLargestRank] = lists[0].largest;
  out.header[kLargestSharedRank] = lists[1].largest;
}

}  // namespace scute::cpu
