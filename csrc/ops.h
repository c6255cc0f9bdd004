// Every op, once: the map of the native code. Meaning, shapes and dtypes: python/scute_sgl/ops.py.
// Each op has a file of its name for the CPU (cpu/<op>.cpp) and for CUDA (<op>.cu), of one signature.
#pragma once
#include <ATen/core/Tensor.h>

namespace scute {

using at::IntArrayRef;
using at::Tensor;

using PlanOp = void(const Tensor& row_slot, const Tensor& slots, int64_t tile_rows, Tensor& plan);

using ShrinkOp = void(const Tensor& x, const Tensor& arena, const Tensor& table, const Tensor& plan,
                      int64_t tile_rows, int64_t module, int64_t slices, Tensor& v);

using LookupOp = void(const Tensor& ids, const Tensor& arena, const Tensor& table, const Tensor& plan,
                      int64_t tile_rows, int64_t module, int64_t first_id, int64_t held_ids, at::ScalarType dtype,
                      Tensor& v);

using ExpandOp = void(const Tensor& v, const Tensor& arena, const Tensor& table, const Tensor& plan,
                      int64_t tile_rows, int64_t module, IntArrayRef columns, Tensor& y);

using VeraOp = void(const Tensor& x, const Tensor& row_slot, const Tensor& arena, const Tensor& table,
                    const Tensor& sets, const Tensor& plan, int64_t tile_rows, int64_t module, IntArrayRef columns,
                    int64_t in_begin, IntArrayRef out_begin, Tensor& v, Tensor& y);

using RotateOp = void(const Tensor& x, const Tensor& row_slot, const Tensor& arena, const Tensor& table,
                      int64_t module, int64_t slices, Tensor& out);

namespace cpu {
PlanOp plan;
ShrinkOp shrink;
LookupOp lookup;
ExpandOp expand;
VeraOp vera;
RotateOp rotate;
}  // namespace cpu

namespace cuda {
PlanOp plan;
ShrinkOp shrink;
LookupOp lookup;
ExpandOp expand;
VeraOp vera;
RotateOp rotate;
}  // namespace cuda

}  // namespace scute
