// What the kernels of op linear are launched with.
#pragma once
#include "check.h"
#include "launch.h"
#include "sums.h"
#include "tenants.cuh"
#include "tensor_copy.cuh"

namespace scute::cuda {

struct LinearParams {
  CUtensorMap weight, input;
  PartialSums own, shared;
  Tenants t;
  const Slot* tenants;
  const SharedSet* sets;
  int slices, shared_sets;
  const void* bias;  // of the layer; null: none
  void* y;
  int64_t y_stride;
  int rows, chunks;           // of kLinearChunk inputs
  bool input_is_there;        // when the kernel may start: what made v has waited for it
  int input_slice;            // rows from one slice's inputs to the next; 0: all have the same
  int stages;                 // of the ring
  int sums_row;               // floats between rows of v in shared memory
  int columns[kMaxSlices + 1];
  int tiles[kMaxSlices + 1];  // before each slice
  int64_t out_begin[kMaxSlices];
};

constexpr int kLinearChunk = 2 * kBoxInputs;  // inputs of a stage

}  // namespace scute::cuda
