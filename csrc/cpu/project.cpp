#include "../ops.h"
#include "common.h"

namespace scute::cpu {
namespace {

bool any_live(const Entry* entries, int64_t slices) {
  return std::any_of(entries, entries + slices, [](const Entry& entry) { return entry.d != kAbsent; });
}

}  // namespace

void project(const Tensor& x, const Tensor& row_slot, const Tensor& arena, const Tensor& table, const Tensor& sets,
             const Tensor& plan, int64_t tile_rows, int64_t module, int64_t slices, int64_t in_begin, Tensor& v) {
  check_project(x, row_slot, arena, table, sets, plan, tile_rows, module, slices, in_begin, v);
  if (x.size(0) == 0) return;
  const Arena tensors(arena);
  const Entries entries(table, module);
  const Tiles tiles = shared_tiles(plan);
  const int64_t inputs = x.size(1);

  SCUTE_DISPATCH(x.scalar_type(), "scute::project", [&] {
    for_each_tile_slice(tiles.count, 1, [&](int64_t t, int64_t) {
      const Tile& tile = tiles[t];
      const SharedSet& set = shared_set(sets, tile.slot, v.size(2));
      const scalar_t* a = tensors.at<scalar_t>(set.a, set.rank * set.in);
      for (int64_t i = 0; i < tile.rows; ++i) {
        const int64_t row = tiles.row(tile, i);
        const Entry* entry = entries.of(row_slot.const_data_ptr<int32_t>()[row]);
        // The set may be smaller than a layer that this tenant leaves alone.
        if (!entry || !any_live(entry, slices)) continue;
        TORCH_CHECK(in_begin + inputs <= set.in, "x has the set's inputs ", in_begin, " to ", in_begin + inputs,
                    "; want them within the ", set.in, " of shared set ", tile.slot);
        multiply_a(x.const_data_ptr<scalar_t>() + row * x.stride(0), inputs, a, set.in, in_begin, set.rank, 1, 0,
                   v.data_ptr<float>() + row * v.stride(1));
      }
    });
  });
}

}  // namespace scute::cpu
