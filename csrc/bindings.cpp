// Schemas of torch.ops.scute.* and their implementations; docs are in python/scute_sgl/ops.py.
#include <pybind11/pybind11.h>
#include <torch/library.h>
#include <torch/version.h>
#ifdef SCUTE_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

#include "ops.h"

TORCH_LIBRARY(scute, m) {
  m.def("plan(Tensor row_slot, Tensor slots, int tile_rows, Tensor(a!) plan) -> ()");
  m.def(
      "shrink(Tensor x, Tensor arena, Tensor table, Tensor plan, int tile_rows, int module, int slices, "
      "Tensor(a!) v) -> ()");
  m.def(
      "lookup(Tensor ids, Tensor arena, Tensor table, Tensor plan, int tile_rows, int module, int first_id, "
      "int held_ids, ScalarType dtype, Tensor(a!) v) -> ()");
  m.def(
      "project(Tensor x, Tensor row_slot, Tensor arena, Tensor table, Tensor sets, Tensor plan, int tile_rows, "
      "int module, int slices, int in_begin, Tensor(a!) v) -> ()");
  m.def(
      "expand(Tensor? v, Tensor? shared_v, Tensor row_slot, Tensor arena, Tensor table, Tensor sets, Tensor plan, "
      "int tile_rows, int module, int[] columns, int[] out_begin, Tensor(a!) y) -> ()");
  m.def(
      "linear(Tensor x, Tensor weight, Tensor? bias, Tensor? v, Tensor? shared_v, Tensor row_slot, Tensor arena, "
      "Tensor table, Tensor slots, Tensor sets, int module, int[] columns, int[] out_begin, Tensor(a!) y) -> ()");
  m.def("rotate(Tensor x, Tensor row_slot, Tensor arena, Tensor table, int module, int slices, Tensor(a!) out) -> ()");
  m.def(
      "structured(Tensor x, Tensor row_slot, Tensor arena, Tensor table, int module, int[] columns, Tensor(a!) y) "
      "-> ()");
  m.def("token_rows(Tensor ids, Tensor row_slot, Tensor arena, Tensor table, int module, Tensor(a!) y) -> ()");
  m.def("token_logits(Tensor x, Tensor row_slot, Tensor arena, Tensor table, int module, Tensor(a!) y) -> ()");
  m.def(
      "reweigh(Tensor x, Tensor weight, Tensor row_slot, Tensor arena, Tensor table, int module, int[] columns, "
      "Tensor(a!) y) -> ()");
}

TORCH_LIBRARY_IMPL(scute, CPU, m) {
  m.impl("plan", TORCH_FN(scute::cpu::plan));
  m.impl("shrink", TORCH_FN(scute::cpu::shrink));
  m.impl("lookup", TORCH_FN(scute::cpu::lookup));
  m.impl("project", TORCH_FN(scute::cpu::project));
  m.impl("expand", TORCH_FN(scute::cpu::expand));
  m.impl("linear", TORCH_FN(scute::cpu::linear));
  m.impl("rotate", TORCH_FN(scute::cpu::rotate));
  m.impl("structured", TORCH_FN(scute::cpu::structured));
  m.impl("token_rows", TORCH_FN(scute::cpu::token_rows));
  m.impl("token_logits", TORCH_FN(scute::cpu::token_logits));
  m.impl("reweigh", TORCH_FN(scute::cpu::reweigh));
}

#ifdef SCUTE_WITH_CUDA
TORCH_LIBRARY_IMPL(scute, CUDA, m) {
  m.impl("plan", TORCH_FN(scute::cuda::plan));
  m.impl("shrink", TORCH_FN(scute::cuda::shrink));
  m.impl("lookup", TORCH_FN(scute::cuda::lookup));
  m.impl("project", TORCH_FN(scute::cuda::project));
  m.impl("expand", TORCH_FN(scute::cuda::expand));
  m.impl("linear", TORCH_FN(scute::cuda::linear));
  m.impl("rotate", TORCH_FN(scute::cuda::rotate));
  m.impl("structured", TORCH_FN(scute::cuda::structured));
  m.impl("token_rows", TORCH_FN(scute::cuda::token_rows));
  m.impl("token_logits", TORCH_FN(scute::cuda::token_logits));
  m.impl("reweigh", TORCH_FN(scute::cuda::reweigh));
}
#endif

// Importing the module registers the ops above; it needs no CUDA driver.
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def(
      "linear_runs",
      [] {
#ifdef SCUTE_WITH_CUDA
        return scute::cuda::linear_runs();
#else
        return false;
#endif
      },
      "Whether op linear runs on the current CUDA device.");
  m.def(
      "build_info",
      [] {
        pybind11::dict info;
#ifdef SCUTE_WITH_CUDA
        info["cuda_archs"] = SCUTE_CUDA_ARCHS;
        info["cuda_version"] = std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10);
#else
        info["cuda_archs"] = "";
        info["cuda_version"] = pybind11::none();
#endif
        info["torch_version"] = TORCH_VERSION;
        info["cxx"] = __VERSION__;
        return info;
      },
      "What this extension was built for and with: cuda_archs (\"\": CPU only), cuda_version, torch_version, cxx.");
}
