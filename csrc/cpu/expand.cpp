#include "../ops.h"
#include "common.h"

namespace scute::cpu {
namespace {

// A tile's rows and one slice of y: y += y * scale + bias + e * (B u), each part if it is there.
template <typename T>
struct Slice {
  const Arena& tensors;
  int64_t outputs, y_stride;
  T* y;  // the slice's first column

  const T* vector(int64_t offset) const { return offset == kAbsent ? nullptr : tensors.at<T>(offset, outputs); }

  // b: [rank8 / 8][b_outputs][8], from output `first` on; null: no low-rank term.
  void update(int64_t row, const Entry& entry, const T* b, int64_t b_outputs, int64_t first,
              const std::vector<float>& u, const T* e) const {
    const T *scale = vector(entry.scale), *bias = vector(entry.bias);
    T* out = y + row * y_stride;
    for (int64_t col = 0; col < outputs; ++col) {
      const float before = out[col];
      float after = before;
      if (scale) after += before * static_cast<float>(scale[col]);
      if (bias) after += static_cast<float>(bias[col]);
      if (b) after += (e ? static_cast<float>(e[col]) : 1) * dot_b(b, b_outputs, first + col, u);
      out[col] = static_cast<T>(after);
    }
  }
};

}  // namespace

void expand(const std::optional<Tensor>& v, const std::optional<Tensor>& shared_v, const Tensor& row_slot,
            const Tensor& arena, const Tensor& table, const Tensor& sets, const Tensor& plan, int64_t tile_rows,
            int64_t module, IntArrayRef columns, IntArrayRef out_begin, Tensor& y) {
  check_expand(v, shared_v, row_slot, arena, table, sets, plan, tile_rows, module, columns, out_begin, y);
  if (y.size(0) == 0) return;
  const Arena tensors(arena);
  const Entries entries(table, module);
  const int64_t slices = columns.size() - 1;
  const Tiles own = private_tiles(plan), shared = shared_tiles(plan);

  SCUTE_DISPATCH(y.scalar_type(), "scute::expand", [&] {
    const auto slice_of = [&](int64_t slice) {
      return Slice<scalar_t>{tensors, columns[slice + 1] - columns[slice], y.stride(0),
                             y.data_ptr<scalar_t>() + columns[slice]};
    };
    for_each_tile_slice(v ? own.count : 0, slices, [&](int64_t t, int64_t slice) {
      const Tile& tile = own[t];
      const Entry& entry = entries.of(tile.slot)[slice];
      const Slice<scalar_t> part = slice_of(slice);
      const int64_t rank8 = entry.b == kAbsent ? 0 : entry_rank(entry.meta), stride = v->size(2) / slices;
      TORCH_CHECK(rank8 <= stride, "v has ", stride, " columns a slice; want at least the rank ", rank8, " of slot ",
                  tile.slot);
      const scalar_t* b = rank8 == 0 ? nullptr : tensors.at<scalar_t>(entry.b, rank8 * part.outputs);
      for (int64_t i = 0; i < tile.rows; ++i) {
        const int64_t row = own.row(tile, i);
        const float* sums = v->const_data_ptr<float>() + row * v->stride(1) + slice * stride;
        part.update(row, entry, b, part.outputs, 0, sum_chunks(sums, rank8, v->size(0), v->stride(0)), nullptr);
      }
    });
    for_each_tile_slice(shared_v ? shared.count : 0, slices, [&](int64_t t, int64_t slice) {
      const Tile& tile = shared[t];
      const SharedSet& set = shared_set(sets, tile.slot, shared_v->size(2));
      const Slice<scalar_t> part = slice_of(slice);
      for (int64_t i = 0; i < tile.rows; ++i) {
        const int64_t row = shared.row(tile, i);
        const Entry* entry = entries.of(row_slot.const_data_ptr<int32_t>()[row]);
        if (!entry) continue;
        if (entry[slice].d == kAbsent) {
          part.update(row, entry[slice], nullptr, 0, 0, {}, nullptr);
          continue;
        }
        const int64_t first = out_begin[slice];
        TORCH_CHECK(first + part.outputs <= set.out, "slice ", slice, " has the set's outputs ", first, " to ",
                    first + part.outputs, "; want them within the ", set.out, " of shared set ", tile.slot);
        const float* sums = shared_v->const_data_ptr<float>() + row * shared_v->stride(1);
        const scalar_t* d = tensors.at<scalar_t>(entry[slice].d, set.rank);
        std::vector<float> u(sums, sums + set.rank);
        for (size_t k = 0; k < u.size(); ++k) u[k] *= static_cast<float>(d[k]);
        part.update(row, entry[slice], tensors.at<scalar_t>(set.b, set.rank * set.out), set.out, first, u,
                    part.vector(entry[slice].e));
      }
    });
  });
}

}  // namespace scute::cpu
