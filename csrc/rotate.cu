#include "check.h"
#include "common.cuh"
#include "launch.h"
#include "ops.h"
#include "tenants.cuh"

namespace scute::cuda {
namespace {

struct RotateParams {
  const void* x;  // (rows, in), x_stride elements between rows
  int64_t x_stride;
  Tenants t;
  void* out;  // (slices, rows, in)
  int rows, in, slices, rows_each, spans;
  bool aligned;  // x, to 16 bytes in every row
};

constexpr int kRotateThreads = 256;  // each warp has 32 columns of the span
constexpr int kSpan = kRotateThreads;
constexpr int kTile = 32;
constexpr int kRotateRows = 16;  // a product takes; fewer of them are in use where rows are few

// The rotation of a tenant in one slice. A null `blocks` means that rows are copied.
struct Rotation {
  const void* blocks;
  int size;
  bool one_block;
};

__device__ __forceinline__ Rotation rotation_of(const RotateParams& p, int slice, int slot) {
  if (slot < 0 || slot >= p.t.slots) return {nullptr, 1, false};
  const Entry& entry = p.t.table[static_cast<int64_t>(slot) * p.t.modules + slice];
  const int64_t offset = entry.rotation, meta = entry.meta;
  if (offset == kAbsent) return {nullptr, 1, false};
  return {p.t.arena + offset, entry_block(meta), entry_one_block(meta)};
}

// Blocks that tensor cores take: several of them are a 32 x 32 tile, or several tiles are one of them.
__device__ __forceinline__ bool tiled(int size) { return size % kTile == 0 || size == 8 || size == 16; }

// A 32 x 32 tile of R - I: rows `input` .., columns `begin` .. of the whole block-diagonal matrix. Lane 4 g + t holds
// columns 8 t .. 8 t + 7 of rows 8 (g / 2) + 2 w + g % 2, w = 0 .. 3, zeros outside the blocks.
template <typename T>
__device__ __forceinline__ void load_tile(const Rotation& r, int begin, int input, int in, uint4 (&d)[4]) {
  const int lane = threadIdx.x % 32, g = lane / 4, column = begin + lane % 4 * 8;
  const int block = column / r.size;
  const T* from = static_cast<const T*>(r.blocks) + column % r.size;
  if (!r.one_block) from += static_cast<int64_t>(block) * r.size * r.size;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const int row = input + g / 2 * 8 + 2 * w + g % 2;
    d[w] = make_uint4(0, 0, 0, 0);
    if (column < in && row / r.size == block) d[w] = load_weights(from + static_cast<int64_t>(row % r.size) * r.size);
  }
}

// sums[q] += x D for 16 rows; low and high: the lane's eight inputs 8 t .. of rows g and g + 8. Column n of product q
// is 8 (n / 2) + 2 q + n % 2, so that a lane gets columns 8 t .. 8 t + 7: those that it has of x.
template <typename T>
__device__ __forceinline__ void multiply_tile(const uint4& low, const uint4& high, const uint4 (&d)[4],
                                              float (&sums)[4][4]) {
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    uint32_t b[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) b[w] = transposed(word(d[w], q));
    mma<T>(sums[q], low.x, high.x, low.y, high.y, b[0], b[1]);
    mma<T>(sums[q], low.z, high.z, low.w, high.w, b[2], b[3]);
  }
}

// x + delta for eight columns, with one rounding; sums[q][2 half ..] are columns 2 q ..
template <typename T>
__device__ __forceinline__ uint4 added(const uint4& x, const float (&sums)[4][4], int half) {
  uint32_t words[4];
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const float2 pair = unpack<T>(word(x, q));
    words[q] = pack(from_float<T>(pair.x + sums[q][half * 2]), from_float<T>(pair.y + sums[q][half * 2 + 1]));
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

template <typename T>
__device__ __forceinline__ uint4 scaled(const uint4& x, const uint4& d) {
  uint32_t words[4];
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const float2 pair = unpack<T>(word(x, q)), by = unpack<T>(word(d, q));
    words[q] = pack(from_float<T>(fmaf(pair.x, by.x, pair.x)), from_float<T>(fmaf(pair.y, by.y, pair.y)));
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// Any block size, dtype and alignment: a lane has one column.
template <typename T>
__device__ __forceinline__ void rotate_row(const RotateParams& p, Rotation r, int slice, int row, int column) {
  const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
  T* out = static_cast<T*>(p.out) + (static_cast<int64_t>(slice) * p.rows + row) * p.in;
  if (!r.blocks) {
    out[column] = x[column];
    return;
  }
  const int block = column / r.size, inside = column % r.size;
  const T* d =
      static_cast<const T*>(r.blocks) + (r.one_block ? 0 : static_cast<int64_t>(block) * r.size * r.size) + inside;
  const T* from = x + block * r.size;
  float sums[4] = {};
  for (int k = 0; k < r.size; k += 4)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (k + i < r.size)
        sums[i] = fmaf(to_float(from[k + i]), to_float(d[static_cast<int64_t>(k + i) * r.size]), sums[i]);
  out[column] = from_float<T>(to_float(x[column]) + ((sums[0] + sums[1]) + (sums[2] + sums[3])));
}

// Grid: (group of rows_each rows, slice, span of 256 columns), spans innermost. A warp has 32 columns of its group's
// rows and goes through the tenants among them: whatever rows a product is shared with, a row's own result is the same.
template <typename T>
__global__ void __launch_bounds__(kRotateThreads, 4) rotate_kernel(const __grid_constant__ RotateParams p) {
  pdl_trigger();
  const int span = blockIdx.x % p.spans, slice = blockIdx.x / p.spans % p.slices,
            group = blockIdx.x / p.spans / p.slices;
  const int lane = threadIdx.x % 32, g = lane / 4, first = group * p.rows_each;
  const int begin = span * kSpan + static_cast<int>(threadIdx.x) / 32 * kTile, column = begin + lane % 4 * 8;
  const int count = min(p.rows_each, p.rows - first);
  const int slot = lane < count ? p.t.row_slot[first + lane] : -1;
  const bool vector = sizeof(T) == 2 && p.aligned;

  const auto load_x = [&](int half, int from) {  // eight inputs of row 8 half + g
    const int row = half * 8 + g;
    if (!vector || row >= count || from >= p.in) return make_uint4(0, 0, 0, 0);
    return *reinterpret_cast<const uint4*>(static_cast<const T*>(p.x) + (first + row) * p.x_stride + from);
  };
  uint4 x[2], d[4];
  unsigned left = (1u << count) - 1;
  for (bool fetched = false; left; fetched = true) {
    const int tenant = __shfl_sync(~0u, slot, __ffs(left) - 1);
    const unsigned rows = __ballot_sync(~0u, lane < count && slot == tenant);
    left &= ~rows;
    const Rotation r = rotation_of(p, slice, tenant);
    const bool product = vector && r.blocks && tiled(r.size);
    // The tiles of the columns' block, one below another; blocks smaller than a tile are in one tile.
    const int top = begin / r.size * r.size / kTile * kTile, end = max(top + kTile, top + r.size);
    if constexpr (sizeof(T) == 2) {
      if (product) load_tile<T>(r, begin, top, p.in, d);
    }
    if (!fetched) {
      pdl_wait();
      if (begin >= p.in) return;
#pragma unroll
      for (int half = 0; half < 2; ++half) x[half] = load_x(half, column);
    }
    if (!vector || (r.blocks && !product && (r.size != 1 || r.one_block))) {
      for (int i = 0; i < count; ++i)
        if (rows >> i & 1 && begin + lane < p.in) rotate_row<T>(p, r, slice, first + i, begin + lane);
      continue;
    }
    if constexpr (sizeof(T) == 2) {
      float sums[4][4] = {};
      uint4 diagonal{};
      if (product) {
        for (int input = top; input < end; input += kTile) {
          if (input > top) load_tile<T>(r, begin, input, p.in, d);
          const int from = input + lane % 4 * 8;  // begin's own inputs are here already
          multiply_tile<T>(input == begin ? x[0] : load_x(0, from), input == begin ? x[1] : load_x(1, from), d, sums);
        }
      } else if (r.blocks && column < p.in) {
        diagonal = load_weights(static_cast<const T*>(r.blocks) + column);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = half * 8 + g;
        if (!(rows >> row & 1) || column >= p.in) continue;
        uint4 result = x[half];
        if (product) result = added<T>(x[half], sums, half);
        else if (r.blocks) result = scaled<T>(x[half], diagonal);
        T* out = static_cast<T*>(p.out) + (static_cast<int64_t>(slice) * p.rows + first + row) * p.in + column;
        *reinterpret_cast<uint4*>(out) = result;
      }
    }
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
  p.t = tenants_of(row_slot, arena, table, module);
  p.out = out.data_ptr();
  p.rows = static_cast<int>(x.size(0));
  p.in = static_cast<int>(x.size(1));
  p.aligned = (reinterpret_cast<uintptr_t>(p.x) | reinterpret_cast<uintptr_t>(p.out)) % 16 == 0 && p.x_stride % 8 == 0;
  // Few rows: their weights are asked for all at once, by a warp each. Many: rows of a tenant follow one another.
  p.rows_each = p.rows <= 256 ? 1 : kRotateRows;
  p.spans = (p.in + kSpan - 1) / kSpan;
  p.slices = static_cast<int>(slices);
  const int64_t grid = static_cast<int64_t>((p.rows + p.rows_each - 1) / p.rows_each) * slices * p.spans;
  SCUTE_CUDA_DISPATCH(x.scalar_type(), [&] { launch(rotate_kernel<scalar_t>, grid, kRotateThreads, 0, true, p); });
}

}  // namespace scute::cuda
