#include <utility>

#include "../ops.h"
#include "common.h"

namespace scute::cpu {
namespace {

using KeyedRows = std::vector<std::pair<int32_t, int32_t>>;  // (slot or shared set, row)

// Sorts the rows by (key, row), cuts them into tiles of one key and returns how many tiles there are.
int32_t write_tiles(KeyedRows rows, int64_t tile_rows, int32_t* perm, Tile* tiles) {
  std::sort(rows.begin(), rows.end());
  int32_t count = 0;
  for (int32_t i = 0; i < static_cast<int32_t>(rows.size()); ++i) {
    const auto [key, row] = rows[i];
    perm[i] = row;
    if (i == 0 || tiles[count - 1].slot != key || tiles[count - 1].rows == tile_rows) tiles[count++] = {key, i, 0, 0};
    ++tiles[count - 1].rows;
  }
  return count;
}

}  // namespace

void plan(const Tensor& row_slot, const Tensor& slots, int64_t tile_rows, Tensor& plan) {
  check_plan(row_slot, slots, tile_rows, plan);
  const int64_t rows = row_slot.numel();
  const int32_t* slot_of = row_slot.data_ptr<int32_t>();
  const Slot* tenants = reinterpret_cast<const Slot*>(slots.data_ptr<int32_t>());

  KeyedRows with_delta, with_shared;
  int32_t live = 0;
  for (int32_t row = 0; row < rows; ++row) {
    const int32_t slot = slot_of[row];
    if (slot < 0) continue;
    TORCH_CHECK(slot < slots.size(0), "row_slot[", row, "] is ", slot, "; want it below the ", slots.size(0), " slots");
    const Slot& tenant = tenants[slot];
    live |= tenant.live;
    if (tenant.live & kDelta) with_delta.emplace_back(slot, row);
    if (tenant.live & kShared) with_shared.emplace_back(tenant.shared_set, row);
  }

  const Plan out = plan_view(plan.data_ptr<int32_t>(), rows);
  out.header[0] = write_tiles(std::move(with_delta), tile_rows, out.perm, out.tiles);
  out.header[1] = write_tiles(std::move(with_shared), tile_rows, out.shared_perm, out.shared_tiles);
  out.header[2] = live;
}

}  // namespace scute::cpu
