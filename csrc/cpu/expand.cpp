#include "../ops.h"
#include "common.h"

namespace scute::cpu {

void expand(const Tensor& v, const Tensor& arena, const Tensor& table, const Tensor& plan, int64_t tile_rows,
            int64_t module, IntArrayRef columns, Tensor& y) {
  check_expand(v, arena, table, plan, tile_rows, module, columns, y);
  if (y.size(0) == 0) return;
  const Arena tensors(arena);
  const Entries entries(table, module);
  const Tiles tiles = private_tiles(plan);
  const int64_t slices = columns.size() - 1, stride = v.size(2) / slices;

  SCUTE_DISPATCH(y.scalar_type(), "scute::expand", [&] {
    for_each_tile_slice(tiles.count, slices, [&](int64_t t, int64_t slice) {
      const Tile& tile = tiles[t];
      const Entry& entry = entries.of(tile.slot)[slice];
      const int64_t outputs = columns[slice + 1] - columns[slice];
      const auto vector = [&](int64_t offset) {
        return offset == kAbsent ? nullptr : tensors.at<scalar_t>(offset, outputs);
      };
      const scalar_t* scale = vector(entry.scale);
      const scalar_t* bias = vector(entry.bias);
      const int64_t rank8 = entry.b == kAbsent ? 0 : entry_rank(entry.meta);
      const scalar_t* b = rank8 == 0 ? nullptr : tensors.at<scalar_t>(entry.b, rank8 * outputs);
      if (!scale && !bias && !b) return;
      TORCH_CHECK(rank8 <= stride, "v has ", stride, " columns a slice; want at least the rank ", rank8, " of slot ",
                  tile.slot);

      for (int64_t i = 0; i < tile.rows; ++i) {
        const int64_t row = tiles.row(tile, i);
        const float* partials = v.const_data_ptr<float>() + row * v.stride(1) + slice * stride;
        const std::vector<float> u = sum_chunks(partials, rank8, v.size(0), v.stride(0));
        scalar_t* out = y.data_ptr<scalar_t>() + row * y.stride(0) + columns[slice];
        for (int64_t col = 0; col < outputs; ++col) {
          const float before = out[col];
          float after = before;
          if (scale) after += before * static_cast<float>(scale[col]);
          if (bias) after += static_cast<float>(bias[col]);
          if (b) after += dot_b(b, outputs, col, u);
          out[col] = static_cast<scalar_t>(after);
        }
      }
    });
  });
}

}  // namespace scute::cpu
