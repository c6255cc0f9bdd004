// y += x S, or pairs of outputs mixed, by a block of the arena that says itself what S is: see Structure in layout.h.
#include "check.h"
#include "kronecker.cuh"
#include "launch.h"
#include "ops.h"
#include "tenants.cuh"

namespace scute::cuda {
namespace {

struct StructuredParams {
  const void* x;  // (rows, in), x_stride elements between rows
  int64_t x_stride;
  Tenants t;
  int64_t arena_bytes;
  void* y;  // (rows, ...), y_stride elements between rows
  int64_t y_stride;
  int rows, in, rows_each, groups;
  bool aligned;  // x, to 16 bytes in every row
  int slices;
  int columns[kMaxSlices + 1];
  int tiles[kMaxSlices + 1];  // before each slice
};

constexpr int kManyRows = 8;      // of a CTA, where a pass has many
constexpr int kFewColumns = 64;   // that are worth a CTA
constexpr int kFirstLines = 320;  // of a block, 64 bytes each: as much as factors of large layers have

// Asks for what a block is likely to begin with while its header is on the way: all of a Kronecker product's factors,
// each tile some of them, and a sparse matrix's bounds for this tile. The arena may end before.
__device__ __forceinline__ void prefetch_block(const char* data, const char* end, int tile, int tiles, int begin,
                                               int last) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  if (warp > 3) return;
  const int line = tile + lane * tiles, bound = begin + ((warp - 1) * 32 + lane) * 16;
  if (warp == 0 ? line >= kFirstLines : bound > last) return;
  data += sizeof(Structure) + (warp == 0 ? int64_t{64} * line : int64_t{4} * bound);
  if (data < end) prefetch(data);
}

// Grid: (tile of all slices, group of rows_each rows), groups innermost. A CTA takes its rows one after the other, and
// each by itself: neighbours change none of a row's bits. Rows of tenants that have nothing here cost a look-up.
template <typename T>
__global__ void __launch_bounds__(kStructuredThreads, kStructuredCtas)
    structured_kernel(const __grid_constant__ StructuredParams p) {
  extern __shared__ __align__(16) unsigned char memory[];
  pdl_trigger();
  const int first = static_cast<int>(blockIdx.x) % p.groups * p.rows_each;
  int tile = static_cast<int>(blockIdx.x) / p.groups, slice = 0;
  while (tile >= p.tiles[slice + 1]) ++slice;
  tile -= p.tiles[slice];
  const int lane = threadIdx.x % 32, count = min(p.rows_each, p.rows - first);
  const int slot = lane < count ? load_kept(p.t.row_slot + first + lane) : -1;
  int64_t offset = kAbsent;
  if (slot >= 0 && slot < p.t.slots) {
    const Entry& entry = p.t.table[static_cast<int64_t>(slot) * p.t.modules + slice];
    const uint4 words = load_kept(reinterpret_cast<const uint4*>(&entry.structure));
    offset = word64(words.x, words.y);
  }
  unsigned left = __ballot_sync(~0u, offset != kAbsent);  // the same in every warp
#pragma unroll 1
  while (left) {
    const int i = __ffs(left) - 1, row = first + i;
    const char* data = p.t.arena + __shfl_sync(~0u, static_cast<long long>(offset), i);
    const Part<T> part{static_cast<const T*>(p.x) + row * p.x_stride,
                       static_cast<T*>(p.y) + row * p.y_stride + p.columns[slice],
                       p.in,
                       tile,
                       p.tiles[slice + 1] - p.tiles[slice],
                       p.columns[slice + 1] - p.columns[slice],
                       p.aligned};
    prefetch_block(data, p.t.arena + p.arena_bytes, tile, part.tiles, part.bound(part.width, 0),
                   part.bound(part.width, 1));
    const Structure s = *reinterpret_cast<const Structure*>(data);
    data += sizeof(Structure);
    KroneckerShared<T>& shared = *reinterpret_cast<KroneckerShared<T>*>(memory);
    T* staged = reinterpret_cast<T*>(memory + sizeof(KroneckerShared<T>));
    if (s.kind == kKronecker) kronecker<T>(part, s, data, shared, staged);
    else if (s.kind == kSparse) sparse<T>(part, s, data, staged);
    else if (s.kind == kMix) mix<T>(part, s, data);
    left &= left - 1;
    if (left) __syncthreads();  // shared memory is the next row's
  }
  pdl_wait();
}

// Parts of a row: as many as `room` CTAs a group of rows are. A slice has its share of them by inputs + outputs, as it
// has of a sparse matrix's values where that is as large as a low-rank term.
void divide(StructuredParams& p, int64_t room) {
  int tiles[kMaxSlices] = {};
  const auto width = [&](int i) { return p.columns[i + 1] - p.columns[i]; };
  for (int i = 0; i < p.slices; ++i) room -= tiles[i] = width(i) > 0;
  for (; room > 0; --room) {
    int largest = -1;
    for (int i = 0; i < p.slices; ++i) {
      if (tiles[i] * kFewColumns >= width(i)) continue;
      const auto weight = [&](int k) { return static_cast<int64_t>(p.in + width(k)); };
      if (largest < 0 || weight(i) * tiles[largest] > weight(largest) * tiles[i]) largest = i;
    }
    if (largest < 0) break;
    ++tiles[largest];
  }
  for (int i = 0; i < p.slices; ++i) p.tiles[i + 1] = p.tiles[i] + tiles[i];
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
  p.t = tenants_of(row_slot, arena, table, module);
  p.arena_bytes = arena.numel();
  p.y = y.data_ptr();
  p.y_stride = y.stride(0);
  p.rows = static_cast<int>(x.size(0));
  p.in = static_cast<int>(x.size(1));
  p.rows_each = p.rows <= 256 ? 1 : kManyRows;
  p.groups = (p.rows + p.rows_each - 1) / p.rows_each;
  p.aligned = rows_aligned(x);
  p.slices = static_cast<int>(columns.size()) - 1;
  std::copy(columns.begin(), columns.end(), p.columns);
  const int64_t waves = p.rows <= 64 ? 1 : 4;  // of CTAs: one to wait for nothing twice, or a few to end together
  divide(p, waves * multiprocessors() * kStructuredCtas / p.groups);
  if (p.tiles[p.slices] == 0) return;
  const int64_t grid = static_cast<int64_t>(p.groups) * p.tiles[p.slices], row = x.size(1) * x.element_size();
  SCUTE_CUDA_DISPATCH(x.scalar_type(), [&] {
    const size_t smem = sizeof(KroneckerShared<scalar_t>) + (row <= kStagedBytes ? row : 0);
    launch(structured_kernel<scalar_t>, grid, kStructuredThreads, smem, true, p);
  });
}

}  // namespace scute::cuda
