#include "../ops.h"
#include "common.h"

namespace scute::cpu {
namespace {

bool any_live(const Entry* entries, int64_t slices) {
  return std::any_of(entries, entries + slices, [](const Entry& entry) { return entry.d != kAbsent; });
}

}  // namespace

void vera(const Tensor& x, const Tensor& row_slot, const Tensor& arena, const Tensor& table, const Tensor& sets,
          const Tensor& plan, int64_t tile_rows, int64_t module, IntArrayRef columns, int64_t in_begin,
          IntArrayRef out_begin, Tensor& v, Tensor& y) {
  check_vera(x, row_slot, arena, table, sets, plan, tile_rows, module, columns, in_begin, out_begin, v, y);
  if (x.size(0) == 0) return;
  const Arena tensors(arena);
  const Entries entries(table, module);
  const Tiles tiles = shared_tiles(plan);
  const int64_t inputs = x.size(1), slices = columns.size() - 1;

  SCUTE_DISPATCH(x.scalar_type(), "scute::vera", [&] {
    for_each_tile_slice(tiles.count, 1, [&](int64_t t, int64_t) {
      const Tile& tile = tiles[t];
      TORCH_CHECK(tile.slot >= 0 && tile.slot < sets.size(0), "the plan names shared set ", tile.slot,
                  "; want it below sets' ", sets.size(0));
      const SharedSet& set = reinterpret_cast<const SharedSet*>(sets.const_data_ptr<int64_t>())[tile.slot];
      TORCH_CHECK(set.rank % kRankStep == 0 && set.rank <= v.size(2), "shared set ", tile.slot, " has rank ", set.rank,
                  "; want a multiple of 8 within v's ", v.size(2), " columns");
      const scalar_t* a = tensors.at<scalar_t>(set.a, set.rank * set.in);
      const scalar_t* b = tensors.at<scalar_t>(set.b, set.rank * set.out);

      for (int64_t i = 0; i < tile.rows; ++i) {
        const int64_t row = tiles.row(tile, i);
        const Entry* entry = entries.of(row_slot.const_data_ptr<int32_t>()[row]);
        // The set may be smaller than a layer that this tenant leaves alone.
        if (!entry || !any_live(entry, slices)) continue;
        TORCH_CHECK(in_begin + inputs <= set.in, "x has the set's inputs ", in_begin, " to ", in_begin + inputs,
                    "; want them within the ", set.in, " of shared set ", tile.slot);
        float* partials = v.data_ptr<float>() + row * v.stride(1);
        project(x.const_data_ptr<scalar_t>() + row * x.stride(0), inputs, a, set.in, in_begin, set.rank, v.size(0),
                v.stride(0), partials);
        const std::vector<float> xa = sum_chunks(partials, set.rank, v.size(0), v.stride(0));

        for (int64_t slice = 0; slice < slices; ++slice, ++entry) {
          if (entry->d == kAbsent) continue;
          const int64_t outputs = columns[slice + 1] - columns[slice], first = out_begin[slice];
          TORCH_CHECK(first + outputs <= set.out, "slice ", slice, " has the set's outputs ", first, " to ",
                      first + outputs, "; want them within the ", set.out, " of shared set ", tile.slot);
          const scalar_t* d = tensors.at<scalar_t>(entry->d, set.rank);
          const scalar_t* e = tensors.at<scalar_t>(entry->e, outputs);
          std::vector<float> u(xa);
          for (size_t k = 0; k < u.size(); ++k) u[k] *= static_cast<float>(d[k]);
          scalar_t* out = y.data_ptr<scalar_t>() + row * y.stride(0) + columns[slice];
          for (int64_t col = 0; col < outputs; ++col) {
            const float delta = static_cast<float>(e[col]) * dot_b(b, set.out, first + col, u);
            out[col] = static_cast<scalar_t>(static_cast<float>(out[col]) + delta);
          }
        }
      }
    });
  });
}

}  // namespace scute::cpu
