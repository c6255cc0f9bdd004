#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>

#include "../ops.h"
#include "common.h"

namespace scute::cpu {
namespace {

constexpr int64_t kTileRows = 8;  // of the plan made here; no result depends on it

}  // namespace

void linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, const std::optional<Tensor>& v,
            const std::optional<Tensor>& shared_v, const Tensor& row_slot, const Tensor& arena, const Tensor& table,
            const Tensor& slots, const Tensor& sets, int64_t module, IntArrayRef columns, IntArrayRef out_begin,
            Tensor& y) {
  check_linear(x, weight, bias, v, shared_v, row_slot, arena, table, slots, sets, module, columns, out_begin, y);
  const int64_t rows = x.size(1), inputs = x.size(0);
  if (rows == 0) return;
  const at::NoGradGuard no_grad;  // the weight may be a parameter
  for (int64_t i = 0; i < inputs; ++i) {
    const int64_t begin = columns[i], width = (inputs == 1 ? columns.back() : columns[i + 1]) - begin;
    const std::optional<Tensor> b = bias ? std::optional(bias->narrow(0, begin, width)) : std::nullopt;
    y.narrow(1, begin, width).copy_(at::linear(x[i], weight.narrow(0, begin, width), b));
  }
  Tensor listed = at::empty({plan_size(rows)}, row_slot.options());
  plan(row_slot, slots, kTileRows, listed);
  expand(v, shared_v, row_slot, arena, table, sets, listed, kTileRows, module, columns, out_begin, y);
}

}  // namespace scute::cpu
