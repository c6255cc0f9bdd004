// Schemas of torch.ops.scute.* and their implementations; docs are in python/scute_sgl/ops.py.
#include <torch/extension.h>
#include <torch/library.h>

#include "ops.h"

TORCH_LIBRARY(scute, m) {
  m.def("plan(Tensor row_slot, Tensor slots, int tile_rows, Tensor(a!) plan) -> ()");
  m.def(
      "shrink(Tensor x, Tensor arena, Tensor table, Tensor plan, int tile_rows, int module, int slices, "
      "Tensor(a!) v) -> ()");
  m.def(
      "lookup(Tensor ids, Tensor arena, Tensor table, Tensor plan, int tile_rows, int module, int first_id, "
      "Tensor(a!) v) -> ()");
  m.def(
      "expand(Tensor v, Tensor arena, Tensor table, Tensor plan, int tile_rows, int module, int[] columns, "
      "Tensor(a!) y) -> ()");
  m.def(
      "vera(Tensor x, Tensor arena, Tensor table, Tensor sets, Tensor plan, int tile_rows, int module, "
      "int[] columns, int in_begin, int[] out_begin, Tensor(a!) v, Tensor(b!) y) -> ()");
  m.def(
      "rotate(Tensor x, Tensor row_slot, Tensor arena, Tensor table, int module, int slices, Tensor(a!) out) -> ()");
}
