// What the ops ask of their arguments, the same for CPU and CUDA; both host halves call check_<op> first.
// Order: dtype, device, shape, stride, limits. A message names the tensor, what was given and what is wanted.
#pragma once
#include <ATen/Dispatch.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <optional>

#include "layout.h"

#define SCUTE_CHECK_DTYPE(t, want) \
  TORCH_CHECK((t).scalar_type() == (want), #t " is ", (t).scalar_type(), "; want ", (want))
#define SCUTE_CHECK_SERVING_DTYPE(t)                                                    \
  TORCH_CHECK(scute::is_serving_dtype((t).scalar_type()), #t " is ", (t).scalar_type(), \
              "; want Float, Half or BFloat16")
#define SCUTE_CHECK_DEVICE(t, like) \
  TORCH_CHECK((t).device() == (like).device(), #t " is on ", (t).device(), "; want ", (like).device())
// Wanted sizes, -1 for any.
#define SCUTE_CHECK_SHAPE(t, ...)                                                           \
  TORCH_CHECK(scute::has_shape(t, {__VA_ARGS__}), #t " has shape ", (t).sizes(), "; want ", \
              c10::IntArrayRef({__VA_ARGS__}), " (-1: any)")
#define SCUTE_CHECK_CONTIGUOUS(t) \
  TORCH_CHECK((t).is_contiguous(), #t " has strides ", (t).strides(), "; want it contiguous")
#define SCUTE_CHECK_ROWS_CONTIGUOUS(t)                                                    \
  TORCH_CHECK((t).size(-1) < 2 || (t).stride(-1) == 1, #t " has strides ", (t).strides(), \
              "; want its last dimension contiguous")

// Runs a lambda with scalar_t set to one of the serving dtypes.
#define SCUTE_DISPATCH(dtype, name, ...)                                                                \
  AT_DISPATCH_SWITCH(dtype, name,                                                                       \
                     AT_DISPATCH_CASE(at::kFloat, __VA_ARGS__) AT_DISPATCH_CASE(at::kHalf, __VA_ARGS__) \
                         AT_DISPATCH_CASE(at::kBFloat16, __VA_ARGS__))

namespace scute {

constexpr int64_t kFields = sizeof(Entry) / sizeof(int64_t);
constexpr int64_t kSlotFields = sizeof(Slot) / sizeof(int32_t);
constexpr int64_t kSetFields = sizeof(SharedSet) / sizeof(int64_t);

inline bool is_serving_dtype(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16;
}

inline bool has_shape(const at::Tensor& t, std::initializer_list<int64_t> want) {
  return t.dim() == static_cast<int64_t>(want.size()) &&
         std::equal(want.begin(), want.end(), t.sizes().begin(),
                    [](int64_t wanted, int64_t size) { return wanted == -1 || wanted == size; });
}

inline int64_t chunks_of(int64_t inputs) { return (inputs + kChunk - 1) / kChunk; }

inline void check_arena(const at::Tensor& like, const at::Tensor& arena, const at::Tensor& table) {
  SCUTE_CHECK_DTYPE(arena, at::kByte);
  SCUTE_CHECK_DTYPE(table, at::kLong);
  SCUTE_CHECK_DEVICE(arena, like);
  SCUTE_CHECK_DEVICE(table, like);
  SCUTE_CHECK_SHAPE(arena, -1);
  SCUTE_CHECK_SHAPE(table, -1, -1, kFields);
  SCUTE_CHECK_CONTIGUOUS(arena);
  SCUTE_CHECK_CONTIGUOUS(table);
}

inline void check_plan_words(const at::Tensor& like, const at::Tensor& plan, int64_t rows, int64_t tile_rows) {
  SCUTE_CHECK_DTYPE(plan, at::kInt);
  SCUTE_CHECK_DEVICE(plan, like);
  SCUTE_CHECK_SHAPE(plan, plan_size(rows));
  SCUTE_CHECK_CONTIGUOUS(plan);
  TORCH_CHECK(tile_rows >= 1 && tile_rows <= kMostTileRows, "tile_rows is ", tile_rows, "; want 1 to ", kMostTileRows);
}

inline void check_row_slot(const at::Tensor& like, const at::Tensor& row_slot, int64_t rows) {
  SCUTE_CHECK_DTYPE(row_slot, at::kInt);
  SCUTE_CHECK_DEVICE(row_slot, like);
  SCUTE_CHECK_SHAPE(row_slot, rows);
  SCUTE_CHECK_CONTIGUOUS(row_slot);
}

inline void check_modules(const at::Tensor& table, int64_t module, int64_t slices) {
  TORCH_CHECK(slices >= 1 && slices <= kMaxSlices, "slices is ", slices, "; want 1 to ", kMaxSlices);
  TORCH_CHECK(module >= 0 && module + slices <= table.size(1), "modules ", module, " to ", module + slices - 1,
              " are asked for; want them within table's ", table.size(1));
}

// The partial sums: `chunks` of -1 means any number of them.
inline void check_sums(const at::Tensor& like, const at::Tensor& v, int64_t rows, int64_t slices, int64_t chunks) {
  SCUTE_CHECK_DTYPE(v, at::kFloat);
  SCUTE_CHECK_DEVICE(v, like);
  SCUTE_CHECK_SHAPE(v, -1, -1, -1);
  SCUTE_CHECK_CONTIGUOUS(v);
  TORCH_CHECK(v.size(0) >= 1 && (chunks == -1 || v.size(0) == 1 || v.size(0) == chunks), "v has ", v.size(0),
              " chunks; want 1, or one for every ", kChunk, " inputs");
  TORCH_CHECK(v.size(1) >= rows, "v has ", v.size(1), " rows; want at least ", rows);
  TORCH_CHECK(v.size(2) % (4 * slices) == 0, "v has ", v.size(2), " columns; want a multiple of 4 for each of the ",
              slices, " slices");
  TORCH_CHECK(reinterpret_cast<uintptr_t>(v.const_data_ptr()) % 16 == 0, "v begins at ", v.const_data_ptr(),
              "; want a multiple of 16 bytes");
}

inline void check_sets(const at::Tensor& like, const at::Tensor& sets) {
  SCUTE_CHECK_DTYPE(sets, at::kLong);
  SCUTE_CHECK_DEVICE(sets, like);
  SCUTE_CHECK_SHAPE(sets, -1, kSetFields);
  SCUTE_CHECK_CONTIGUOUS(sets);
}

inline void check_slots(const at::Tensor& like, const at::Tensor& slots) {
  SCUTE_CHECK_DTYPE(slots, at::kInt);
  SCUTE_CHECK_DEVICE(slots, like);
  SCUTE_CHECK_SHAPE(slots, -1, kSlotFields);
  SCUTE_CHECK_CONTIGUOUS(slots);
}

inline void check_input_rows(const at::Tensor& x) {
  SCUTE_CHECK_ROWS_CONTIGUOUS(x);
  TORCH_CHECK(x.size(-1) > 0 && x.size(-1) % 8 == 0, "x has ", x.size(-1), " columns; want a positive multiple of 8");
}

inline void check_input(const at::Tensor& x) {
  SCUTE_CHECK_SERVING_DTYPE(x);
  SCUTE_CHECK_SHAPE(x, -1, -1);
  check_input_rows(x);
}

inline void check_plan(const at::Tensor& row_slot, const at::Tensor& slots, int64_t tile_rows, const at::Tensor& plan) {
  check_row_slot(row_slot, row_slot, row_slot.numel());
  check_slots(row_slot, slots);
  TORCH_CHECK(row_slot.numel() < kMostRows, "row_slot has ", row_slot.numel(), " rows; want fewer than ", kMostRows);
  check_plan_words(row_slot, plan, row_slot.numel(), tile_rows);
}

inline void check_shrink(const at::Tensor& x, const at::Tensor& arena, const at::Tensor& table, const at::Tensor& plan,
                         int64_t tile_rows, int64_t module, int64_t slices, const at::Tensor& v) {
  check_input(x);
  check_arena(x, arena, table);
  check_plan_words(x, plan, x.size(0), tile_rows);
  check_modules(table, module, slices);
  check_sums(x, v, x.size(0), slices, chunks_of(x.size(1)));
}

inline void check_lookup(const at::Tensor& ids, const at::Tensor& arena, const at::Tensor& table,
                         const at::Tensor& plan, int64_t tile_rows, int64_t module, int64_t held_ids,
                         at::ScalarType dtype, const at::Tensor& v) {
  SCUTE_CHECK_DTYPE(ids, at::kLong);
  TORCH_CHECK(is_serving_dtype(dtype), "dtype is ", dtype, "; want Float, Half or BFloat16");
  SCUTE_CHECK_SHAPE(ids, -1);
  SCUTE_CHECK_CONTIGUOUS(ids);
  check_arena(ids, arena, table);
  check_plan_words(ids, plan, ids.size(0), tile_rows);
  check_modules(table, module, 1);
  check_sums(ids, v, ids.size(0), 1, 1);
  TORCH_CHECK(held_ids >= 0, "held_ids is ", held_ids, "; want at least 0");
}

inline void check_project(const at::Tensor& x, const at::Tensor& row_slot, const at::Tensor& arena,
                          const at::Tensor& table, const at::Tensor& sets, const at::Tensor& plan, int64_t tile_rows,
                          int64_t module, int64_t slices, int64_t in_begin, const at::Tensor& v) {
  check_input(x);
  check_row_slot(x, row_slot, x.size(0));
  check_arena(x, arena, table);
  check_sets(x, sets);
  check_plan_words(x, plan, x.size(0), tile_rows);
  check_modules(table, module, slices);
  check_sums(x, v, x.size(0), 1, chunks_of(x.size(1)));
  TORCH_CHECK(in_begin >= 0 && in_begin % 8 == 0, "in_begin is ", in_begin, "; want a multiple of 8");
}

// y (rows, ...), and the slices that `columns` bounds in it.
inline void check_output(const at::Tensor& y, at::IntArrayRef columns) {
  SCUTE_CHECK_SERVING_DTYPE(y);
  SCUTE_CHECK_SHAPE(y, -1, -1);
  SCUTE_CHECK_ROWS_CONTIGUOUS(y);
  TORCH_CHECK(columns.size() >= 2, "columns has ", columns.size(), " bounds; want one more than slices");
  TORCH_CHECK(std::is_sorted(columns.begin(), columns.end()) && columns.front() >= 0 && columns.back() <= y.size(1),
              "columns is ", columns, "; want ascending bounds within y's ", y.size(1), " columns");
}

inline void check_out_begin(at::IntArrayRef out_begin, int64_t slices) {
  TORCH_CHECK(static_cast<int64_t>(out_begin.size()) == slices, "out_begin has ", out_begin.size(), " entries; want ",
              slices, ", one a slice");
  TORCH_CHECK(std::all_of(out_begin.begin(), out_begin.end(), [](int64_t begin) { return begin >= 0; }),
              "out_begin is ", out_begin, "; want no negative entry");
}

inline void check_expand(const std::optional<at::Tensor>& v, const std::optional<at::Tensor>& shared_v,
                         const at::Tensor& row_slot, const at::Tensor& arena, const at::Tensor& table,
                         const at::Tensor& sets, const at::Tensor& plan, int64_t tile_rows, int64_t module,
                         at::IntArrayRef columns, at::IntArrayRef out_begin, const at::Tensor& y) {
  const int64_t slices = static_cast<int64_t>(columns.size()) - 1;
  check_output(y, columns);
  check_row_slot(y, row_slot, y.size(0));
  check_arena(y, arena, table);
  check_sets(y, sets);
  check_plan_words(y, plan, y.size(0), tile_rows);
  check_modules(table, module, slices);
  if (v) check_sums(y, *v, y.size(0), slices, -1);
  if (shared_v) check_sums(y, *shared_v, y.size(0), 1, -1);
  check_out_begin(out_begin, slices);
}

inline void check_bias(const at::Tensor& like, const at::Tensor& bias, int64_t outputs) {
  SCUTE_CHECK_DTYPE(bias, like.scalar_type());
  SCUTE_CHECK_DEVICE(bias, like);
  SCUTE_CHECK_SHAPE(bias, outputs);
  SCUTE_CHECK_CONTIGUOUS(bias);
}

// On CUDA 16 bits and few rows only.
inline void check_linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                         const std::optional<at::Tensor>& v, const std::optional<at::Tensor>& shared_v,
                         const at::Tensor& row_slot, const at::Tensor& arena, const at::Tensor& table,
                         const at::Tensor& slots, const at::Tensor& sets, int64_t module, at::IntArrayRef columns,
                         at::IntArrayRef out_begin, const at::Tensor& y) {
  SCUTE_CHECK_SERVING_DTYPE(x);
  TORCH_CHECK(!x.is_cuda() || x.scalar_type() != at::kFloat, "x is Float; want Half or BFloat16 on CUDA");
  SCUTE_CHECK_SHAPE(x, -1, -1, -1);
  check_input_rows(x);
  check_output(y, columns);
  const int64_t rows = x.size(1), slices = static_cast<int64_t>(columns.size()) - 1;
  SCUTE_CHECK_DTYPE(y, x.scalar_type());
  SCUTE_CHECK_DEVICE(y, x);
  SCUTE_CHECK_SHAPE(y, rows, columns.back());
  SCUTE_CHECK_DTYPE(weight, x.scalar_type());
  SCUTE_CHECK_DEVICE(weight, x);
  SCUTE_CHECK_SHAPE(weight, columns.back(), x.size(2));
  SCUTE_CHECK_ROWS_CONTIGUOUS(weight);
  if (bias) check_bias(x, *bias, columns.back());
  check_row_slot(x, row_slot, rows);
  check_arena(x, arena, table);
  check_slots(x, slots);
  check_sets(x, sets);
  check_modules(table, module, slices);
  if (v) check_sums(x, *v, rows, slices, -1);
  if (shared_v) check_sums(x, *shared_v, rows, 1, -1);
  check_out_begin(out_begin, slices);
  TORCH_CHECK(columns.front() == 0, "columns begins at ", columns.front(), "; want 0");
  TORCH_CHECK(x.size(0) == 1 || x.size(0) == slices, "x has ", x.size(0), " inputs; want 1, or one for each of the ",
              slices, " slices");
  TORCH_CHECK(!x.is_cuda() || rows <= kLinearRows, "x has ", rows, " rows; want at most ", kLinearRows, " on CUDA");
}

inline void check_rotate(const at::Tensor& x, const at::Tensor& row_slot, const at::Tensor& arena,
                         const at::Tensor& table, int64_t module, int64_t slices, const at::Tensor& out) {
  check_input(x);
  SCUTE_CHECK_DTYPE(out, x.scalar_type());
  SCUTE_CHECK_DEVICE(out, x);
  SCUTE_CHECK_SHAPE(out, slices, x.size(0), x.size(1));
  SCUTE_CHECK_CONTIGUOUS(out);
  check_row_slot(x, row_slot, x.size(0));
  check_arena(x, arena, table);
  check_modules(table, module, slices);
}

inline void check_structured(const at::Tensor& x, const at::Tensor& row_slot, const at::Tensor& arena,
                             const at::Tensor& table, int64_t module, at::IntArrayRef columns, const at::Tensor& y) {
  check_input(x);
  SCUTE_CHECK_DTYPE(y, x.scalar_type());
  SCUTE_CHECK_DEVICE(y, x);
  SCUTE_CHECK_SHAPE(y, x.size(0), -1);
  check_output(y, columns);
  check_row_slot(x, row_slot, x.size(0));
  check_arena(x, arena, table);
  check_modules(table, module, static_cast<int64_t>(columns.size()) - 1);
}

inline void check_token_rows(const at::Tensor& ids, const at::Tensor& row_slot, const at::Tensor& arena,
                             const at::Tensor& table, int64_t module, const at::Tensor& y) {
  SCUTE_CHECK_DTYPE(ids, at::kLong);
  SCUTE_CHECK_SERVING_DTYPE(y);
  SCUTE_CHECK_DEVICE(y, ids);
  SCUTE_CHECK_SHAPE(ids, -1);
  SCUTE_CHECK_SHAPE(y, ids.size(0), -1);
  SCUTE_CHECK_CONTIGUOUS(ids);
  SCUTE_CHECK_ROWS_CONTIGUOUS(y);
  check_row_slot(ids, row_slot, ids.size(0));
  check_arena(ids, arena, table);
  check_modules(table, module, 1);
}

inline void check_token_logits(const at::Tensor& x, const at::Tensor& row_slot, const at::Tensor& arena,
                               const at::Tensor& table, int64_t module, const at::Tensor& y) {
  check_input(x);
  SCUTE_CHECK_DTYPE(y, x.scalar_type());
  SCUTE_CHECK_DEVICE(y, x);
  SCUTE_CHECK_SHAPE(y, x.size(0), -1);
  SCUTE_CHECK_ROWS_CONTIGUOUS(y);
  check_row_slot(x, row_slot, x.size(0));
  check_arena(x, arena, table);
  check_modules(table, module, 1);
}

inline void check_reweigh(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& row_slot,
                           const at::Tensor& arena, const at::Tensor& table, int64_t module, at::IntArrayRef columns,
                           const at::Tensor& y) {
  check_structured(x, row_slot, arena, table, module, columns, y);
  SCUTE_CHECK_DTYPE(weight, x.scalar_type());
  SCUTE_CHECK_DEVICE(weight, x);
  SCUTE_CHECK_SHAPE(weight, -1, x.size(1));
  SCUTE_CHECK_ROWS_CONTIGUOUS(weight);
  TORCH_CHECK(weight.size(0) >= columns.back(), "weight has ", weight.size(0), " rows; want one for each of the ",
              columns.back(), " columns");
}

}  // namespace scute
