// Every op, once: the map of the native code. Meaning, shapes and dtypes: python/scute_sgl/ops.py.
// Each op has a file of its name for the CPU (cpu/<op>.cpp) and for CUDA (<op>.cu), of one signature.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>

namespace scute {

using at::IntArrayRef;
using at::Tensor;

using PlanOp = void(const Tensor& row_slot, const Tensor& slots, int64_t tile_rows, Tensor& plan);

using ShrinkOp = void(const Tensor& x, const Tensor& arena, const Tensor& table, const Tensor& plan, int64_t tile_rows,
                      int64_t module, int64_t slices, Tensor& v);

using LookupOp = void(const Tensor& ids, const Tensor& arena, const Tensor& table, const Tensor& plan,
                      int64_t tile_rows, int64_t module, int64_t first_id, int64_t held_ids, at::ScalarType dtype,
                      Tensor& v);

using ProjectOp = void(const Tensor& x, const Tensor& row_slot, const Tensor& arena, const Tensor& table,
                       const Tensor& sets, const Tensor& plan, int64_t tile_rows, int64_t module, int64_t slices,
                       int64_t in_begin, Tensor& v);

using ExpandOp = void(const std::optional<Tensor>& v, const std::optional<Tensor>& shared_v, const Tensor& row_slot,
                      const Tensor& arena, const Tensor& table, const Tensor& sets, const Tensor& plan,
                      int64_t tile_rows, int64_t module, IntArrayRef columns, IntArrayRef out_begin, Tensor& y);

using LinearOp = void(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                      const std::optional<Tensor>& v, const std::optional<Tensor>& shared_v, const Tensor& row_slot,
                      const Tensor& arena, const Tensor& table, const Tensor& slots, const Tensor& sets, int64_t module,
                      IntArrayRef columns, IntArrayRef out_begin, Tensor& y);

using RotateOp = void(const Tensor& x, const Tensor& row_slot, const Tensor& arena, const Tensor& table, int64_t module,
                      int64_t slices, Tensor& out);

using StructuredOp = void(const Tensor& x, const Tensor& row_slot, const Tensor& arena, const Tensor& table,
                          int64_t module, IntArrayRef columns, Tensor& y);
using TokenRowsOp = void(const Tensor& ids, const Tensor& row_slot, const Tensor& arena, const Tensor& table,
                         int64_t module, Tensor& y);

using TokenLogitsOp = void(const Tensor& x, const Tensor& row_slot, const Tensor& arena, const Tensor& table,
                           int64_t module, Tensor& y);

using ReweighOp = void(const Tensor& x, const Tensor& weight, const Tensor& row_slot, const Tensor& arena,
                        const Tensor& table, int64_t module, IntArrayRef columns, Tensor& y);

namespace cpu {
PlanOp plan;
ShrinkOp shrink;
LookupOp lookup;
ProjectOp project;
ExpandOp expand;
LinearOp linear;
RotateOp rotate;
StructuredOp structured;
TokenRowsOp token_rows;
TokenLogitsOp token_logits;
ReweighOp reweigh;
}  // namespace cpu

namespace cuda {
PlanOp plan;
ShrinkOp shrink;
LookupOp lookup;
ProjectOp project;
ExpandOp expand;
LinearOp linear;
RotateOp rotate;
StructuredOp structured;
TokenRowsOp token_rows;
TokenLogitsOp token_logits;
ReweighOp reweigh;
// Whether the current GPU, and the code compiled for it, can run op linear: copies of boxes, and 9.0's shared memory.
bool linear_runs();
}  // namespace cuda

}  // namespace scute
