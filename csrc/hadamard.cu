// y += x (W o (B A)): the base's own weight again, each of its elements times one of a tenant's low-rank matrix.
#include "check.h"
#include "common.cuh"
#include "launch.h"
#include "ops.h"

namespace scute::cuda {
namespace {

struct HadamardParams {
  const void *x, *weight;  // (rows, in) and (columns, in), x_stride and weight_stride elements between rows
  int64_t x_stride, weight_stride;
  const int32_t* row_slot;
  const char* arena;
  const Entry* table;  // of the first slice's module; modules entries between slots
  int modules, slots;
  void* y;  // (rows, ...), y_stride elements between rows
  int64_t y_stride;
  int rows, in, groups;
  bool aligned;  // x and weight, to 16 bytes in every row
  int slices;
  int columns[kMaxSlices + 1];
  int tiles[kMaxSlices + 1];  // of kTileOutputs columns, before each slice
};

constexpr int kHadamardThreads = 256;
constexpr int kOutputs = 4;  // of a warp
constexpr int kTileOutputs = kHadamardThreads / 32 * kOutputs;
constexpr int kHadamardRows = 8;  // that a product of B and A is made for, where a pass has many

// Grid: (tile of all slices, group of kRows rows), groups innermost: those of a tile follow one another, so that all but
// the first find its weights in the cache. A warp has kOutputs columns, and each of its lanes every 32nd eight inputs. The
// scaled weights are made once for each tenant of the group. How a row is summed does not depend on the others.
template <typename T, int kRows>
__global__ void __launch_bounds__(kHadamardThreads, 2) hadamard_kernel(const __grid_constant__ HadamardParams p) {
  pdl_trigger();
  const int first = static_cast<int>(blockIdx.x) % p.groups * kRows;
  int tile = static_cast<int>(blockIdx.x) / p.groups, slice = 0;
  while (tile >= p.tiles[slice + 1]) ++slice;
  const int width = p.columns[slice + 1] - p.columns[slice], lane = threadIdx.x % 32;
  const int begin = (tile - p.tiles[slice]) * kTileOutputs + static_cast<int>(threadIdx.x) / 32 * kOutputs;
  const int count = min(kRows, p.rows - first), slot = lane < count ? p.row_slot[first + lane] : -1;
  long long offset = kAbsent;
  if (slot >= 0 && slot < p.slots) offset = p.table[static_cast<int64_t>(slot) * p.modules + slice].structure;
  if (offset != kAbsent && reinterpret_cast<const Structure*>(p.arena + offset)->kind != kHadamard) offset = kAbsent;
  unsigned left = __ballot_sync(~0u, offset != kAbsent);
  pdl_wait();
  if (begin >= width) return;

  // Columns beyond the slice are its last one again, and not written.
  const T* weight[kOutputs];
#pragma unroll
  for (int o = 0; o < kOutputs; ++o)
    weight[o] = static_cast<const T*>(p.weight) + (p.columns[slice] + min(begin + o, width - 1)) * p.weight_stride;

  while (left) {
    const long long tenant = __shfl_sync(~0u, offset, __ffs(left) - 1);
    const unsigned members = __ballot_sync(~0u, offset == tenant);
    left &= ~members;
    const char* data = p.arena + tenant;
    const int rank = reinterpret_cast<const Structure*>(data)->hadamard.rank;
    data += sizeof(Structure);
    const T* a = reinterpret_cast<const T*>(data);
    const T* b = reinterpret_cast<const T*>(data + aligned(static_cast<int64_t>(rank) * p.in * sizeof(T)));
    float sums[kRows][kOutputs] = {};
    for (int input = lane * 8; input < p.in; input += 32 * 8) {
      float scaled[kOutputs][8] = {};
      for (int k = 0; k < rank / 8; ++k) {
        const T* core = a + (static_cast<int64_t>(k) * p.in + input) * 8;
        float of_b[kOutputs][8];
#pragma unroll
        for (int o = 0; o < kOutputs; ++o)
          load_eight(b + (static_cast<int64_t>(k) * width + min(begin + o, width - 1)) * 8, of_b[o]);
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
        load_eight(weight[o] + input, p.aligned, of_w);
#pragma unroll
        for (int i = 0; i < 8; ++i) scaled[o][i] *= of_w[i];
      }
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        if (!(members >> row & 1)) continue;
        float of_x[8];
        load_eight(static_cast<const T*>(p.x) + (first + row) * p.x_stride + input, p.aligned, of_x);
#pragma unroll
        for (int o = 0; o < kOutputs; ++o)
#pragma unroll
          for (int i = 0; i < 8; ++i) sums[row][o] = fmaf(of_x[i], scaled[o][i], sums[row][o]);
      }
    }
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      if (!(members >> row & 1)) continue;
      T* y = static_cast<T*>(p.y) + (first + row) * p.y_stride + p.columns[slice] + begin;
#pragma unroll
      for (int o = 0; o < kOutputs; ++o) {
        float sum = sums[row][o];
#pragma unroll
        for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
        if (lane == o && begin + o < width) add_to(y[o], sum);
      }
    }
  }
}

template <typename T>
void launch_hadamard(HadamardParams& p) {
  const int each = p.rows <= 256 ? 1 : kHadamardRows;
  p.groups = (p.rows + each - 1) / each;
  const int64_t grid = static_cast<int64_t>(p.groups) * p.tiles[p.slices];
  if (each == 1) launch(hadamard_kernel<T, 1>, grid, kHadamardThreads, 0, true, p);
  else launch(hadamard_kernel<T, kHadamardRows>, grid, kHadamardThreads, 0, true, p);
}

}  // namespace

void hadamard(const Tensor& x, const Tensor& weight, const Tensor& row_slot, const Tensor& arena, const Tensor& table,
              int64_t module, IntArrayRef columns, Tensor& y) {
  check_hadamard(x, weight, row_slot, arena, table, module, columns, y);
  if (x.size(0) == 0) return;
  const c10::cuda::CUDAGuard guard(x.device());
  const auto on_sixteen = [](const Tensor& t) {
    return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0 && t.stride(0) * t.element_size() % 16 == 0;
  };
  HadamardParams p{};
  p.x = x.const_data_ptr();
  p.x_stride = x.stride(0);
  p.weight = weight.const_data_ptr();
  p.weight_stride = weight.stride(0);
  p.row_slot = row_slot.const_data_ptr<int32_t>();
  p.arena = reinterpret_cast<const char*>(arena.const_data_ptr());
  p.table = reinterpret_cast<const Entry*>(table.const_data_ptr<int64_t>()) + module;
  p.modules = static_cast<int>(table.size(1));
  p.slots = static_cast<int>(table.size(0));
  p.y = y.data_ptr();
  p.y_stride = y.stride(0);
  p.rows = static_cast<int>(x.size(0));
  p.in = static_cast<int>(x.size(1));
  p.aligned = on_sixteen(x) && on_sixteen(weight);
  p.slices = static_cast<int>(columns.size()) - 1;
  std::copy(columns.begin(), columns.end(), p.columns);
  for (int i = 0; i < p.slices; ++i)
    p.tiles[i + 1] = p.tiles[i] + (p.columns[i + 1] - p.columns[i] + kTileOutputs - 1) / kTileOutputs;
  if (p.tiles[p.slices] == 0) return;
  SCUTE_CUDA_DISPATCH(x.scalar_type(), [&] { launch_hadamard<scalar_t>(p); });
}

}  // namespace scute::cuda
