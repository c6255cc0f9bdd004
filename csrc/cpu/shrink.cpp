#include "../ops.h"
#include "common.h"

namespace scute::cpu {

void shrink(const Tensor& x, const Tensor& arena, const Tensor& table, const Tensor& plan, int64_t tile_rows,
            int64_t module, int64_t slices, Tensor& v) {
  check_shrink(x, arena, table, plan, tile_rows, module, slices, v);
  if (x.size(0) == 0) return;
  const Arena tensors(arena);
  const Entries entries(table, module);
  const Tiles tiles = private_tiles(plan);
  const int64_t inputs = x.size(1), stride = v.size(2) / slices;

  SCUTE_DISPATCH(x.scalar_type(), "scute::shrink", [&] {
    for_each_tile_slice(tiles.count, slices, [&](int64_t t, int64_t slice) {
      const Tile& tile = tiles[t];
      const Entry& entry = entries.of(tile.slot)[slice];
      if (entry.a == kAbsent) return;
      const int64_t rank8 = entry_rank(entry.meta);
      TORCH_CHECK(rank8 <= stride, "v has ", stride, " columns a slice; want at least the rank ", rank8, " of slot ",
                  tile.slot);
      const scalar_t* a = tensors.at<scalar_t>(entry.a, rank8 * inputs);
      for (int64_t i = 0; i < tile.rows; ++i) {
        const int64_t row = tiles.row(tile, i);
        multiply_a(x.const_data_ptr<scalar_t>() + row * x.stride(0), inputs, a, inputs, 0, rank8, v.size(0),
                   v.stride(0), v.data_ptr<float>() + row * v.stride(1) + slice * stride);
      }
    });
  });
}

}  // namespace scute::cpu
