// What the kernels of op linear are launched with.
#pragma once
#include "check.h"
#include "launch.h"
#include "tensor_copy.cuh"

namespace scute::cuda {

struct LinearParams {
  CUtensorMap weight, input;
  // Sums of parts of the inputs: of private factors, (parts, rows, slices * slice), and of shared ones, (parts, rows, ...).
  struct Sums {
    const float* v;  // null: none are served
    int64_t part, row, slice;
    int parts, room;  // room: columns of a slice
  } own, shared;
  const int32_t* row_slot;
  const char* arena;
  const Entry* table;  // of the first slice's module; modules entries between slots
  const Slot* tenants;
  const SharedSet* sets;
  int modules, slots, slices, shared_sets;
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

// Whether the current GPU, and the code compiled for it, can run op linear: tensor copies, and 9.0's shared memory.
bool linear_runs();

}  // namespace scute::cuda
