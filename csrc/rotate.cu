#include "check.h"
#include "common.cuh"
#include "launch.h"
#include "ops.h"

namespace scute::cuda {
namespace {

struct RotateParams {
  const void* x;  // (rows, in), x_stride elements between rows
  int64_t x_stride;
  const int32_t* row_slot;
  const char* arena;
  const Entry* table;  // of the first slice's module; modules entries between slots
  int modules, slots;
  void* out;           // (slices, rows, in)
  int rows, in, slices, rows_each, spans;
};

constexpr int kRotateThreads = 256;  // each warp has 32 columns of the span
constexpr int kTile = 32;            // block size of the fast path

// The rotation of one row in one slice. A null `blocks` means that the row is copied.
struct Rotation {
  const void* blocks;
  int size;
  bool one_block;
};

template <typename T>
__device__ Rotation rotation_of(const RotateParams& p, int slice, int slot) {
  if (slot < 0 || slot >= p.slots) return {nullptr, 1, false};
  const Entry& entry = p.table[static_cast<int64_t>(slot) * p.modules + slice];
  const int64_t offset = entry.rotation, meta = entry.meta;
  if (offset == kAbsent) return {nullptr, 1, false};
  return {p.arena + offset, entry_block(meta), entry_one_block(meta)};
}

// A 32 x 32 block in registers, 16 bytes four times a lane: rows 8 i + lane / 4, columns 8 (lane % 4) ...
template <typename T>
__device__ __forceinline__ void load_tile(const Rotation& r, int begin, uint4 (&d)[4]) {
  const T* block = static_cast<const T*>(r.blocks) + (r.one_block ? 0 : begin / kTile * kTile * kTile);
#pragma unroll
  for (int i = 0; i < 4; ++i) d[i] = load_weights(block + (i * 32 + threadIdx.x % 32) * 8);
}

// Column `begin` + the result's `column` of x D.
template <typename T>
__device__ __forceinline__ float multiply_tile(const uint4 (&d)[4], const T* x, int& column) {
  const int lane = threadIdx.x % 32;
  float sums[8] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float value = to_float(x[i * 8 + lane / 4]);
    const uint32_t words[4] = {d[i].x, d[i].y, d[i].z, d[i].w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 pair = unpack<T>(words[j]);
      sums[2 * j] = fmaf(value, pair.x, sums[2 * j]);
      sums[2 * j + 1] = fmaf(value, pair.y, sums[2 * j + 1]);
    }
  }
  // Eight lanes hold parts of the same eight columns: halve the columns at each step, until each lane has one.
  const bool b4 = lane & 16, b3 = lane & 8, b2 = lane & 4;
#pragma unroll
  for (int j = 0; j < 4; ++j) sums[j] = (b4 ? sums[j + 4] : sums[j]) + __shfl_xor_sync(~0u, b4 ? sums[j] : sums[j + 4], 16);
#pragma unroll
  for (int j = 0; j < 2; ++j) sums[j] = (b3 ? sums[j + 2] : sums[j]) + __shfl_xor_sync(~0u, b3 ? sums[j] : sums[j + 2], 8);
  sums[0] = (b2 ? sums[1] : sums[0]) + __shfl_xor_sync(~0u, b2 ? sums[0] : sums[1], 4);
  column = lane % 4 * 8 + b4 * 4 + b3 * 2 + b2;
  return sums[0];
}

// Any block size: a lane has one column.
template <typename T>
__device__ float multiply(const Rotation& r, const T* x, int column) {
  const int block = column / r.size, inside = column % r.size;
  const T* d = static_cast<const T*>(r.blocks) + (r.one_block ? 0 : static_cast<int64_t>(block) * r.size * r.size) + inside;
  const T* from = x + block * r.size;
  float sums[4] = {};
  for (int k = 0; k < r.size; k += 4)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (k + i < r.size) sums[i] = fmaf(to_float(from[k + i]), to_float(d[static_cast<int64_t>(k + i) * r.size]), sums[i]);
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// Grid: (group of rows_each rows, slice, span of 256 columns), spans innermost.
template <typename T>
__global__ void __launch_bounds__(kRotateThreads) rotate_kernel(const __grid_constant__ RotateParams p) {
  pdl_trigger();
  const int span = blockIdx.x % p.spans, slice = blockIdx.x / p.spans % p.slices, group = blockIdx.x / p.spans / p.slices;
  const int begin = span * kRotateThreads + threadIdx.x / 32 * 32, lane = threadIdx.x % 32;
  const int first = group * p.rows_each, last = min(p.rows, first + p.rows_each);
  int current = -2;
  Rotation r{};
  uint4 d[4];
  for (int row = first; row < last; ++row) {
    const int slot = p.row_slot[row];
    const bool fresh = slot != current;
    if (fresh) r = rotation_of<T>(p, slice, slot);
    current = slot;
    const bool tiled = sizeof(T) == 2 && r.blocks && r.size == kTile;
    if constexpr (sizeof(T) == 2) {
      if (fresh && tiled && begin < p.in) load_tile<T>(r, begin, d);
    }
    if (row == first) pdl_wait();
    if (begin >= p.in) continue;
    const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
    T* out = static_cast<T*>(p.out) + (static_cast<int64_t>(slice) * p.rows + row) * p.in + begin;
    if constexpr (sizeof(T) == 2) {
      if (tiled) {
        int column;
        const float sum = multiply_tile<T>(d, x + begin, column);
        out[column] = from_float<T>(to_float(x[begin + column]) + sum);
        continue;
      }
    }
    if (begin + lane >= p.in) continue;
    const T same = x[begin + lane];
    out[lane] = r.blocks ? from_float<T>(to_float(same) + multiply(r, x, begin + lane)) : same;
  }
}

}  // namespace

void rotate(const Tensor& x, const Tensor& row_slot, const Tensor& arena, const Tensor& table, int64_t module,
            int64_t slices, Tensor& out) {
  check_rotate(x, row_slot, arena, table, module, slices, out);
  if (x.size(0) == 0) return;
  const c10::cuda::CUDAGuard guard(x.device());
  RotateParams p{};
  p.x = x.const_data_ptr();
  p.x_stride = x.stride(0);
  p.row_slot = row_slot.const_data_ptr<int32_t>();
  p.arena = reinterpret_cast<const char*>(arena.const_data_ptr());
  p.table = reinterpret_cast<const Entry*>(table.const_data_ptr<int64_t>()) + module;
  p.modules = static_cast<int>(table.size(1));
  p.slots = static_cast<int>(table.size(0));
  p.out = out.data_ptr();
  p.rows = static_cast<int>(x.size(0));
  p.in = static_cast<int>(x.size(1));
  // Many rows: a warp keeps its block in registers for as long as the tenant stays the same.
  p.rows_each = p.rows <= 256 ? 1 : 16;
  p.spans = (p.in + kRotateThreads - 1) / kRotateThreads;
  p.slices = static_cast<int>(slices);
  const int64_t grid = static_cast<int64_t>((p.rows + p.rows_each - 1) / p.rows_each) * slices * p.spans;
  SCUTE_CUDA_DISPATCH(x.scalar_type(), [&] { launch(rotate_kernel<scalar_t>, grid, kRotateThreads, 0, true, p); });
}

}  // namespace scute::cuda
