#include "../ops.h"
#include "common.h"

namespace scute::cpu {

void lookup(const Tensor& ids, const Tensor& arena, const Tensor& table, const Tensor& plan, int64_t tile_rows,
            int64_t module, int64_t first_id, int64_t held_ids, at::ScalarType dtype, Tensor& v) {
  check_lookup(ids, arena, table, plan, tile_rows, module, held_ids, dtype, v);
  if (ids.size(0) == 0) return;
  const Arena tensors(arena);
  const Entries entries(table, module);
  const Tiles tiles = private_tiles(plan);

  SCUTE_DISPATCH(dtype, "scute::lookup", [&] {
    for_each_tile_slice(tiles.count, 1, [&](int64_t t, int64_t) {
      const Tile& tile = tiles[t];
      const Entry& entry = *entries.of(tile.slot);
      if (entry.a == kAbsent) return;
      const int64_t rank8 = entry_rank(entry.meta);
      TORCH_CHECK(rank8 <= v.size(2), "v has ", v.size(2), " columns; want at least the rank ", rank8, " of slot ",
                  tile.slot);
      const scalar_t* a = tensors.at<scalar_t>(entry.a, rank8 * held_ids);
      for (int64_t i = 0; i < tile.rows; ++i) {
        const int64_t row = tiles.row(tile, i);
        const int64_t id = ids.const_data_ptr<int64_t>()[row] - first_id;
        float* out = v.data_ptr<float>() + row * v.stride(1);
        if (id >= 0 && id < held_ids) std::copy_n(a + id * rank8, rank8, out);
        else  // another tensor-parallel rank holds this id
          std::fill_n(out, rank8, 0.0f);
      }
    });
  });
}

}  // namespace scute::cpu
