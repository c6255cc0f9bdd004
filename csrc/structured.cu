// y += x S, or pairs of outputs mixed, by a block of the arena that says itself what S is: see Structure in layout.h.
#include "check.h"
#include "common.cuh"
#include "launch.h"
#include "ops.h"

namespace scute::cuda {
namespace {

struct StructuredParams {
  const void* x;  // (rows, in), x_stride elements between rows
  int64_t x_stride;
  const int32_t* row_slot;
  const char* arena;
  const Entry* table;  // of the first slice's module; modules entries between slots
  int modules, slots;
  void* y;  // (rows, ...), y_stride elements between rows
  int64_t y_stride;
  int rows, rows_each;
  bool aligned;  // x, to 16 bytes in every row
  int slices;
  int columns[kMaxSlices + 1];
  int tiles[kMaxSlices + 1];  // of kColumns columns, before each slice
};

constexpr int kStructuredThreads = 256, kColumns = 128;
constexpr int kLanes = 8;                             // that sum one output of a sparse matrix
constexpr int kGroups = kStructuredThreads / kLanes;  // outputs of a sparse matrix at a time
constexpr int kManyRows = 8;                          // of a CTA, where a pass has many
static_assert(kColumns % 2 == 0 && kKroneckerRows <= kKroneckerValues);

// What a CTA works on: one row, and of one slice the tile-th of `tiles` equal parts.
template <typename T>
struct Part {
  const T* x;
  T* y;  // the slice's first column
  int tile, tiles, width;
  bool aligned;
};

// The sum of x[k] w[k * stride] for k below n. The order depends on n alone: both paths add the same numbers up.
template <typename X, typename T>
__device__ __forceinline__ float dot(const X* x, const T* w, int n, int64_t stride, bool eights) {
  float sums[8] = {};
  int k = 0;
  for (; k + 8 <= n; k += 8) {
    float eight[8];
    load_eight(x + k, eights, eight);
#pragma unroll
    for (int i = 0; i < 8; ++i, w += stride) sums[i] = fmaf(eight[i], to_float(*w), sums[i]);
  }
  for (; k < n; ++k, w += stride) sums[0] = fmaf(to_float(x[k]), to_float(*w), sums[0]);
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

// y[l, o] += sum over p of w1[p][l] (sum over q of x[p, q] w2[q][o]). A CTA has some of the o, and of them as many at a
// time as `products` holds the inner sums for. `inner` holds x w_b where w2 = w_b w_a, with w_b [q][r] and w_a [r][o].
template <typename T>
__device__ __forceinline__ void kronecker(const Part<T>& part, const Structure& s, const char* data, float* inner,
                                          float* products) {
  const int l = s.kronecker.l, p = s.kronecker.p, o = s.kronecker.o, q = s.kronecker.q, r = s.kronecker.r;
  const int begin = static_cast<int>(static_cast<int64_t>(o) * part.tile / part.tiles);
  const int end = static_cast<int>(static_cast<int64_t>(o) * (part.tile + 1) / part.tiles);
  if (begin == end) return;
  const T* w1 = reinterpret_cast<const T*>(data);
  data += aligned(static_cast<int64_t>(p) * l * sizeof(T));
  const T* right = reinterpret_cast<const T*>(data);
  data += aligned(static_cast<int64_t>(q) * r * sizeof(T));
  const T* left = reinterpret_cast<const T*>(data);  // with r only
  const bool eights = part.aligned && q % 8 == 0;
  if (r) {
    for (int i = threadIdx.x; i < p * r; i += kStructuredThreads)
      inner[i] = dot(part.x + i / r * q, right + i % r, q, r, eights);
    __syncthreads();
  }
  const int most = kKroneckerValues / p;
  for (int from = begin; from < end; from += most) {
    const int wide = min(most, end - from);
    for (int i = threadIdx.x; i < p * wide; i += kStructuredThreads) {
      const int row = i / wide, column = from + i % wide;
      products[i] = r ? dot(inner + row * r, left + column, r, o, false)
                      : dot(part.x + row * q, right + column, q, o, eights);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < l * wide; i += kStructuredThreads) {
      const int row = i / wide, j = i % wide;
      float sums[4] = {};
      int k = 0;
      for (; k + 4 <= p; k += 4)
#pragma unroll
        for (int n = 0; n < 4; ++n)
          sums[n] = fmaf(to_float(w1[(k + n) * l + row]), products[(k + n) * wide + j], sums[n]);
      for (; k < p; ++k) sums[0] = fmaf(to_float(w1[k * l + row]), products[k * wide + j], sums[0]);
      add_to(part.y[row * o + from + j], (sums[0] + sums[1]) + (sums[2] + sums[3]));
    }
    __syncthreads();
  }
}

// y[column] += the sum of the values from bounds[column] on, times the inputs that they are for.
template <typename T, typename Index>
__device__ __forceinline__ void sparse(const Part<T>& part, const int32_t* bounds, const Index* inputs,
                                       const T* values) {
  const int group = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const int begin = part.tile * kColumns, end = min(begin + kColumns, part.width);
  for (int first = begin; first < end; first += kGroups) {  // the same for all lanes of a warp, which exchange sums
    const int column = first + group;
    float sum = 0;
    if (column < end) {
      const int last = bounds[column + 1];
#pragma unroll 4
      for (int k = bounds[column] + lane; k < last; k += kLanes)
        sum = fmaf(to_float(values[k]), to_float(part.x[inputs[k]]), sum);
    }
#pragma unroll
    for (int step = kLanes / 2; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane == 0 && column < end) add_to(part.y[column], sum);
  }
}

// Output a of a group and output a + group / 2 are a pair, which one thread reads and writes.
template <typename T>
__device__ __forceinline__ void mix(const Part<T>& part, const Structure& s, const char* data) {
  const int group = s.mix.group, half = group / 2, pairs = part.width / 2;
  const bool one_each = s.mix.one_each;
  const int begin = part.tile * (kColumns / 2), end = min(begin + kColumns / 2, pairs);
  const T* f1 = reinterpret_cast<const T*>(data);
  const int64_t count = one_each ? pairs : part.width;
  const T* f2 = reinterpret_cast<const T*>(data + aligned(count * sizeof(T)));
  for (int pair = begin + static_cast<int>(threadIdx.x); pair < end; pair += kStructuredThreads) {
    const int first = pair / half * group + pair % half, second = first + half;
    if (second >= part.width) continue;
    const int i = one_each ? pair : first, j = one_each ? pair : second;
    const float a = to_float(part.y[first]), b = to_float(part.y[second]);
    add_to(part.y[first], fmaf(a, to_float(f1[i]), -b * to_float(f2[i])));
    add_to(part.y[second], fmaf(b, to_float(f1[j]), a * to_float(f2[j])));
  }
}

// Grid: (group of rows_each rows, tile of all slices), tiles innermost. A CTA takes its rows one after the other, and
// each by itself: neighbours change none of a row's bits. Rows of tenants that have nothing here cost a look-up.
template <typename T>
__global__ void __launch_bounds__(kStructuredThreads) structured_kernel(const __grid_constant__ StructuredParams p) {
  __shared__ float inner[kKroneckerValues], products[kKroneckerValues];
  pdl_trigger();
  const int all = p.tiles[p.slices], first = static_cast<int>(blockIdx.x) / all * p.rows_each;
  int tile = static_cast<int>(blockIdx.x) % all, slice = 0;
  while (tile >= p.tiles[slice + 1]) ++slice;
  tile -= p.tiles[slice];
  const int lane = threadIdx.x % 32, count = min(p.rows_each, p.rows - first);
  const int slot = lane < count ? p.row_slot[first + lane] : -1;
  int64_t offset = kAbsent;
  if (slot >= 0 && slot < p.slots) offset = p.table[static_cast<int64_t>(slot) * p.modules + slice].structure;
  unsigned left = __ballot_sync(~0u, offset != kAbsent);  // the same in every warp
  pdl_wait();
  for (; left; left &= left - 1) {
    const int i = __ffs(left) - 1, row = first + i;
    const char* data = p.arena + __shfl_sync(~0u, static_cast<long long>(offset), i);
    const Structure s = *reinterpret_cast<const Structure*>(data);
    data += sizeof(Structure);
    const Part<T> part{static_cast<const T*>(p.x) + row * p.x_stride,
                       static_cast<T*>(p.y) + row * p.y_stride + p.columns[slice],
                       tile,
                       p.tiles[slice + 1] - p.tiles[slice],
                       p.columns[slice + 1] - p.columns[slice],
                       p.aligned};
    if (s.kind == kKronecker) {
      kronecker<T>(part, s, data, inner, products);
    } else if (s.kind == kSparse) {
      const int32_t* bounds = reinterpret_cast<const int32_t*>(data);
      const char* inputs = data + aligned((static_cast<int64_t>(part.width) + 1) * sizeof(int32_t));
      const int64_t index_bytes = static_cast<int64_t>(s.sparse.values) * s.sparse.index_bytes;
      const T* values = reinterpret_cast<const T*>(inputs + aligned(index_bytes));
      if (s.sparse.index_bytes == 2) sparse<T>(part, bounds, reinterpret_cast<const uint16_t*>(inputs), values);
      else sparse<T>(part, bounds, reinterpret_cast<const int32_t*>(inputs), values);
    } else if (s.kind == kMix) {
      mix<T>(part, s, data);
    }
  }
}

}  // namespace

void structured(const Tensor& x, const Tensor& row_slot, const Tensor& arena, const Tensor& table, int64_t module,
                IntArrayRef columns, Tensor& y) {
  check_structured(x, row_slot, arena, table, module, columns, y);
  if (x.size(0) == 0) return;
  const c10::cuda::CUDAGuard guard(x.device());
  StructuredParams p{};
  p.x = x.const_data_ptr();
  p.x_stride = x.stride(0);
  p.row_slot = row_slot.const_data_ptr<int32_t>();
  p.arena = reinterpret_cast<const char*>(arena.const_data_ptr());
  p.table = reinterpret_cast<const Entry*>(table.const_data_ptr<int64_t>()) + module;
  p.modules = static_cast<int>(table.size(1));
  p.slots = static_cast<int>(table.size(0));
  p.y = y.data_ptr();
  p.y_stride = y.stride(0);
  p.rows = static_cast<int>(x.size(0));
  p.rows_each = p.rows <= 256 ? 1 : kManyRows;
  p.aligned = reinterpret_cast<uintptr_t>(p.x) % 16 == 0 && p.x_stride * x.element_size() % 16 == 0;
  p.slices = static_cast<int>(columns.size()) - 1;
  std::copy(columns.begin(), columns.end(), p.columns);
  for (int i = 0; i < p.slices; ++i)
    p.tiles[i + 1] = p.tiles[i] + (p.columns[i + 1] - p.columns[i] + kColumns - 1) / kColumns;
  if (p.tiles[p.slices] == 0) return;
  const int64_t grid = static_cast<int64_t>((p.rows + p.rows_each - 1) / p.rows_each) * p.tiles[p.slices];
  SCUTE_CUDA_DISPATCH(x.scalar_type(),
                      [&] { launch(structured_kernel<scalar_t>, grid, kStructuredThreads, 0, true, p); });
}

}  // namespace scute::cuda
