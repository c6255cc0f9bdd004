// y += x S, S made of the base's own weight and a block of the arena that says how: see Structure in layout.h.
#include "check.h"
#include "common.cuh"
#include "launch.h"
#include "ops.h"
#include "tenants.cuh"

namespace scute::cuda {
namespace {

struct ReweighParams {
  const void *x, *weight;  // (rows, in) and (columns, in), x_stride and weight_stride elements between rows
  int64_t x_stride, weight_stride;
  Tenants t;
  void* y;  // (rows, ...), y_stride elements between rows
  int64_t y_stride;
  int rows, in, groups;
  bool aligned;  // x and weight, to 16 bytes in every row
  int slices;
  int columns[kMaxSlices + 1];
  int tiles[kMaxSlices + 1];  // of kTileOutputs columns, before each slice
};

constexpr int kReweighThreads = 256;
constexpr int kOutputs = 4;  // columns of a warp
constexpr int kTileOutputs = kReweighThreads / 32 * kOutputs;
constexpr int kReweighRows = 8;  // that a CTA makes S for once, where a pass has many
static_assert(kReweighRows * kTileOutputs <= kReweighThreads && kReweighThreads <= kBlockAffineInputs);

// What a CTA works on: those of kRows rows that are of one tenant, and the columns from `begin` on of one slice.
template <typename T>
struct Part {
  const T *x, *weight;  // the first row's, the slice's first column's
  int64_t x_stride, weight_stride;
  int in, width, begin;
  unsigned rows;
  bool aligned;

  // A warp's columns; beyond the slice it is the last one again, whose sums are not written.
  __device__ int output(int o) const {
    return min(begin + static_cast<int>(threadIdx.x) / 32 * kOutputs + o, width - 1);
  }
  __device__ const T* weight_of(int o) const { return weight + output(o) * weight_stride; }
};

template <int kRows>
using Sums = float[kRows][kOutputs];

// S = W o (B A): a lane has every 32nd eight inputs, whose products of B and A it makes once for all rows.
template <typename T, int kRows>
__device__ __forceinline__ void hadamard(const Part<T>& part, const Structure& s, const char* data,
                                         Sums<kRows>& sums) {
  const int rank = s.hadamard.rank;
  const T* a = reinterpret_cast<const T*>(data);
  const T* b = reinterpret_cast<const T*>(data + aligned(static_cast<int64_t>(rank) * part.in * sizeof(T)));
  for (int input = static_cast<int>(threadIdx.x) % 32 * 8; input < part.in; input += 32 * 8) {
    float scaled[kOutputs][8] = {};
    for (int k = 0; k < rank / 8; ++k) {
      const T* core = a + (static_cast<int64_t>(k) * part.in + input) * 8;
      float of_b[kOutputs][8];
#pragma unroll
      for (int o = 0; o < kOutputs; ++o)
        load_eight(b + (static_cast<int64_t>(k) * part.width + part.output(o)) * 8, of_b[o]);
#pragma unroll
      for (int r = 0; r < 8; ++r) {
        float of_a[8];
        load_eight(core + r * 8, of_a);
#pragma unroll
        for (int o = 0; o < kOutputs; ++o)
#pragma unroll
          for (int i = 0; i < 8; ++i) scaled[o][i] = fmaf(of_b[o][r], of_a[i], scaled[o][i]);
      }
    }
#pragma unroll
    for (int o = 0; o < kOutputs; ++o) {
      float of_w[8];
      load_eight(part.weight_of(o) + input, part.aligned, of_w);
#pragma unroll
      for (int i = 0; i < 8; ++i) scaled[o][i] *= of_w[i];
    }
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      if (!(part.rows >> row & 1)) continue;
      float of_x[8];
      load_eight(part.x + row * part.x_stride + input, part.aligned, of_x);
#pragma unroll
      for (int o = 0; o < kOutputs; ++o)
#pragma unroll
        for (int i = 0; i < 8; ++i) sums[row][o] = fmaf(of_x[i], scaled[o][i], sums[row][o]);
    }
  }
}

// The same by tensor cores, for 16-bit numbers. Every warp has the CTA's 32 columns, and every 8th 32 inputs: lane
// 4 g + t has columns 8 o + g and inputs 8 t .. of B A, made as two products of 16 columns by 8 inputs for each pair
// 2 q, 2 q + 1 of them. Nothing is rounded before the sum: B and A are exact, and their product with W is float32.
template <typename T, int kRows>
__device__ __forceinline__ void hadamard_products(const Part<T>& part, const Structure& s, const char* data,
                                                  Sums<kRows>& sums) {
  const int rank = s.hadamard.rank, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const T* a = reinterpret_cast<const T*>(data);
  const T* b = reinterpret_cast<const T*>(data + aligned(static_cast<int64_t>(rank) * part.in * sizeof(T)));
  int output[kOutputs];  // beyond the slice the last one again
#pragma unroll
  for (int o = 0; o < kOutputs; ++o) output[o] = min(part.begin + 8 * o + g, part.width - 1);
  for (int from = static_cast<int>(threadIdx.x) / 32 * 32; from < part.in; from += kReweighThreads) {
    const int input = from + 8 * t;
    const bool inside = input < part.in;
    float made[kOutputs / 2][4][4] = {};
    for (int k = 0; k < rank; k += 16) {
      uint4 of_a[2];               // rank k + 8 r + g
      uint32_t of_b[kOutputs][2];  // ranks k + 8 r + 2 t and the next
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const bool held = k + 8 * r < rank;
        const int64_t eight = k / 8 + r;
        of_a[r] = make_uint4(0, 0, 0, 0);
        if (held && inside) of_a[r] = *reinterpret_cast<const uint4*>(a + (eight * part.in + input + g) * 8);
#pragma unroll
        for (int o = 0; o < kOutputs; ++o)
          of_b[o][r] = held ? *reinterpret_cast<const uint32_t*>(b + (eight * part.width + output[o]) * 8 + 2 * t) : 0;
      }
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const uint32_t low = transposed(word(of_a[0], q)), high = transposed(word(of_a[1], q));
#pragma unroll
        for (int o = 0; o < kOutputs; o += 2)
          mma<T>(made[o / 2][q], of_b[o][0], of_b[o + 1][0], of_b[o][1], of_b[o + 1][1], low, high);
      }
    }
    if (inside) {
#pragma unroll
      for (int o = 0; o < kOutputs; ++o) {
        float of_w[8];
        load_eight(part.weight + output[o] * part.weight_stride + input, of_w);
#pragma unroll
        for (int i = 0; i < 8; ++i) made[o / 2][i / 2][o % 2 * 2 + i % 2] *= of_w[i];
      }
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        if (!(part.rows >> row & 1)) continue;
        float of_x[8];
        load_eight(part.x + row * part.x_stride + input, of_x);
#pragma unroll
        for (int o = 0; o < kOutputs; ++o)
#pragma unroll
          for (int i = 0; i < 8; ++i)
            sums[row][o] = fmaf(of_x[i], made[o / 2][i / 2][o % 2 * 2 + i % 2], sums[row][o]);
      }
    }
    __syncwarp();
  }
}

// A block of side outputs has W's blocks of side inputs times M, and M: with u the blocks of x times M^T, output j adds
// u W_j up, and of each block of u the element that j is in its own. u is made a stretch of whole blocks at a time.
template <typename T, int kRows>
__device__ __forceinline__ void block_affine(const Part<T>& part, const Structure& s, const char* data,
                                             float (&u)[kRows][kBlockAffineInputs], Sums<kRows>& sums) {
  const int side = s.block_affine.side, most = kBlockAffineInputs / side * side;
  const int lane = threadIdx.x % 32, end = min(part.begin + kTileOutputs, part.width);
  const bool eights = part.aligned && side % 8 == 0;
  for (int block = part.begin / side; block * side < end; ++block) {
    const T* m = reinterpret_cast<const T*>(data) + static_cast<int64_t>(block) * side * side;  // [of x][of u]
    for (int from = 0; from < part.in; from += most) {
      const int count = min(most, part.in - from);
      for (int i = threadIdx.x; i < count; i += kReweighThreads) {
        const T* x = part.x + from + i / side * side;
        float made[kRows] = {};
        for (int k = 0; k < side; ++k) {
          const float of_m = to_float(m[k * side + i % side]);
#pragma unroll
          for (int row = 0; row < kRows; ++row)
            if (part.rows >> row & 1) made[row] = fmaf(of_m, to_float(x[row * part.x_stride + k]), made[row]);
        }
#pragma unroll
        for (int row = 0; row < kRows; ++row) u[row][i] = made[row];
      }
      __syncthreads();
#pragma unroll
      for (int o = 0; o < kOutputs; ++o) {
        const int output = part.output(o);
        if (output / side != block) continue;
        const T* weight = part.weight_of(o) + from;
        for (int i = lane * 8; eights && i < count; i += 32 * 8) {
          float of_w[8];
          load_eight(weight + i, of_w);
#pragma unroll
          for (int row = 0; row < kRows; ++row)
#pragma unroll
            for (int j = 0; j < 8; ++j) sums[row][o] = fmaf(u[row][i + j], of_w[j], sums[row][o]);
        }
        for (int i = lane; !eights && i < count; i += 32) {
          const float of_w = to_float(weight[i]);
#pragma unroll
          for (int row = 0; row < kRows; ++row) sums[row][o] = fmaf(u[row][i], of_w, sums[row][o]);
        }
        for (int i = lane * side + output % side; i < count; i += 32 * side)
#pragma unroll
          for (int row = 0; row < kRows; ++row) sums[row][o] += u[row][i];
      }
      __syncthreads();
    }
  }
}

// Of a warp's own columns: all of its lanes have a part of each sum.
template <typename T, int kRows>
__device__ __forceinline__ void add_over_lanes(const Part<T>& part, const Sums<kRows>& sums, T* y, int64_t y_stride) {
  const int first = static_cast<int>(threadIdx.x) / 32 * kOutputs, lane = threadIdx.x % 32;
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    if (!(part.rows >> row & 1)) continue;
#pragma unroll
    for (int o = 0; o < kOutputs; ++o) {
      float sum = sums[row][o];
#pragma unroll
      for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
      if (lane == o && part.begin + first + o < part.width) add_to(y[row * y_stride + first + o], sum);
    }
  }
}

// Of the CTA's columns: four lanes of every warp have a part of each sum. `room` holds kRows sums of every warp.
template <typename T, int kRows>
__device__ __forceinline__ void add_over_warps(const Part<T>& part, const Sums<kRows>& sums, float* room, T* y,
                                               int64_t y_stride) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int row = 0; row < kRows; ++row)
#pragma unroll
    for (int o = 0; o < kOutputs; ++o) {
      float sum = sums[row][o];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if (lane % 4 == 0) room[(warp * kRows + row) * kTileOutputs + 8 * o + lane / 4] = sum;
    }
  __syncthreads();
  const int row = threadIdx.x / kTileOutputs, column = threadIdx.x % kTileOutputs;
  if (row < kRows && part.rows >> row & 1 && part.begin + column < part.width) {
    float sum = 0;
    for (int w = 0; w < kReweighThreads / 32; ++w) sum += room[(w * kRows + row) * kTileOutputs + column];
    add_to(y[row * y_stride + column], sum);
  }
  __syncthreads();  // the next tenant's sums
}

// Grid: (tile of all slices, group of kRows rows), groups innermost: those of a tile follow one another, so that all
// but the first find its weights in the cache. A CTA takes the tenants of its group one after the other. How a row is
// summed depends neither on the other rows nor on how many a CTA has.
template <typename T, int kRows>
__global__ void __launch_bounds__(kReweighThreads, 2) reweigh_kernel(const __grid_constant__ ReweighParams p) {
  __shared__ alignas(16) float u[kRows][kBlockAffineInputs];
  pdl_trigger();
  const int first = static_cast<int>(blockIdx.x) % p.groups * kRows, lane = threadIdx.x % 32;
  int tile = static_cast<int>(blockIdx.x) / p.groups, slice = 0;
  while (tile >= p.tiles[slice + 1]) ++slice;
  Part<T> part{static_cast<const T*>(p.x) + first * p.x_stride,
               static_cast<const T*>(p.weight) + p.columns[slice] * p.weight_stride,
               p.x_stride,
               p.weight_stride,
               p.in,
               p.columns[slice + 1] - p.columns[slice],
               (tile - p.tiles[slice]) * kTileOutputs,
               0,
               p.aligned};
  const int slot = lane < min(kRows, p.rows - first) ? p.t.row_slot[first + lane] : -1;
  long long offset = kAbsent;
  if (slot >= 0 && slot < p.t.slots) offset = p.t.table[static_cast<int64_t>(slot) * p.t.modules + slice].structure;
  if (offset != kAbsent && reinterpret_cast<const Structure*>(p.t.arena + offset)->kind < kHadamard) offset = kAbsent;
  unsigned left = __ballot_sync(~0u, offset != kAbsent);  // the same in every warp
  pdl_wait();
  for (; left; left &= ~part.rows) {
    const long long tenant = __shfl_sync(~0u, offset, __ffs(left) - 1);
    part.rows = __ballot_sync(~0u, offset == tenant);
    const char* data = p.t.arena + tenant;
    const Structure s = *reinterpret_cast<const Structure*>(data);
    data += sizeof(Structure);
    Sums<kRows> sums = {};
    T* y = static_cast<T*>(p.y) + first * p.y_stride + p.columns[slice] + part.begin;
    if constexpr (sizeof(T) == 2) {
      if (s.kind == kHadamard && part.aligned) {
        hadamard_products<T, kRows>(part, s, data, sums);
        add_over_warps<T, kRows>(part, sums, &u[0][0], y, p.y_stride);
        continue;
      }
    }
    if (s.kind == kHadamard) hadamard<T, kRows>(part, s, data, sums);
    else block_affine<T, kRows>(part, s, data, u, sums);
    add_over_lanes<T, kRows>(part, sums, y, p.y_stride);
  }
}

template <typename T>
void launch_reweigh(ReweighParams& p) {
  const int each = p.rows <= 256 ? 1 : kReweighRows;
  p.groups = (p.rows + each - 1) / each;
  const int64_t grid = static_cast<int64_t>(p.groups) * p.tiles[p.slices];
  if (each == 1) launch(reweigh_kernel<T, 1>, grid, kReweighThreads, 0, true, p);
  else launch(reweigh_kernel<T, kReweighRows>, grid, kReweighThreads, 0, true, p);
}

}  // namespace

void reweigh(const Tensor& x, const Tensor& weight, const Tensor& row_slot, const Tensor& arena, const Tensor& table,
             int64_t module, IntArrayRef columns, Tensor& y) {
  check_reweigh(x, weight, row_slot, arena, table, module, columns, y);
  if (x.size(0) == 0) return;
  const c10::cuda::CUDAGuard guard(x.device());
  ReweighParams p{};
  p.x = x.const_data_ptr();
  p.x_stride = x.stride(0);
  p.weight = weight.const_data_ptr();
  p.weight_stride = weight.stride(0);
  p.t = tenants_of(row_slot, arena, table, module);
  p.y = y.data_ptr();
  p.y_stride = y.stride(0);
  p.rows = static_cast<int>(x.size(0));
  p.in = static_cast<int>(x.size(1));
  p.aligned = rows_aligned(x) && rows_aligned(weight);
  p.slices = static_cast<int>(columns.size()) - 1;
  std::copy(columns.begin(), columns.end(), p.columns);
  for (int i = 0; i < p.slices; ++i)
    p.tiles[i + 1] = p.tiles[i] + (p.columns[i + 1] - p.columns[i] + kTileOutputs - 1) / kTileOutputs;
  if (p.tiles[p.slices] == 0) return;
  SCUTE_CUDA_DISPATCH(x.scalar_type(), [&] { launch_reweigh<scalar_t>(p); });
}

}  // namespace scute::cuda
