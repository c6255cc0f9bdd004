#include "linear.cuh"

#include "ops.h"

namespace scute::cuda {

CUtensorMap matrix_map(const void* data, at::ScalarType dtype, int64_t rows, int64_t inputs, int64_t stride,
                       int box_rows) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {  // by way of the runtime: the extension is loaded without a driver, too
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
    C10_CUDA_CHECK(
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result));
#else
    C10_CUDA_CHECK(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result));
#endif
    TORCH_CHECK(found && result == cudaDriverEntryPointSuccess,
                "the driver has no cuTensorMapEncodeTiled; want one for CUDA 12");
    return reinterpret_cast<Encode>(found);
  }();
  CUtensorMap map;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(inputs), static_cast<cuuint64_t>(rows)};
  const cuuint64_t bytes[] = {static_cast<cuuint64_t>(stride) * 2};
  const cuuint32_t box[] = {kBoxInputs, static_cast<cuuint32_t>(box_rows)}, step[] = {1, 1};
  const auto type = dtype == at::kHalf ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const CUresult status =
      encode(&map, type, 2, const_cast<void*>(data), sizes, bytes, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  TORCH_CHECK(status == CUDA_SUCCESS, "cuTensorMapEncodeTiled failed (", static_cast<int>(status), ") for ", rows,
              " x ", inputs, " with ", stride, " elements between rows");
  return map;
}

namespace {

void check_rows_aligned(const Tensor& t, int64_t stride, const char* name) {
  TORCH_CHECK(rows_aligned(t, stride), name, "'s rows begin anywhere; want them at multiples of 16 bytes");
}

// Of 9.0's 227 KB, and of 10.0's.
constexpr int kSharedMemory = 227 * 1024;

// Sixteens of columns that a tile may have.
constexpr int kTileWidths[] = {1, 2, 3, 4, 6, 8, 10, 14};

int tiles_of(IntArrayRef columns, int width, int (&before)[kMaxSlices + 1]) {
  before[0] = 0;
  for (size_t i = 0; i + 1 < columns.size(); ++i)
    before[i + 1] = before[i] + static_cast<int>((columns[i + 1] - columns[i] + width * 16 - 1) / (width * 16));
  return before[columns.size() - 1];
}

// What a ring may take: CTAs of the kernels that make v are to run beside it.
int ring_bytes(int columns, int tokens, const LinearParams& p) {
  constexpr int kLeft = 40 * 1024;  // with what the kernel declares itself
  const int v = static_cast<int>(sizeof(float)) * p.rows * p.sums_row;
  return kSharedMemory - kLeft - linear_vectors(columns, tokens) - v;
}

// The width that leaves the fewest columns to any multiprocessor, and room for two stages.
int tile_width(IntArrayRef columns, const LinearParams& p) {
  int best = kTileWidths[0];
  int64_t least = INT64_MAX;
  const int tokens = (p.rows + 7) / 8 * 8;
  for (const int width : kTileWidths) {
    if (ring_bytes(width * 16, tokens, p) < 2 * linear_stage(width * 16, tokens)) break;
    int before[kMaxSlices + 1];
    const int64_t turns = (tiles_of(columns, width, before) + multiprocessors() - 1) / multiprocessors();
    const int64_t cost = turns * (width * 16 + 8);  // a turn begins with an empty ring
    if (cost < least) best = width, least = cost;
  }
  return best;
}

template <typename T, int kTokens8, int kColumns16>
void run(LinearParams& p, int64_t tiles) {
  constexpr int kColumns = kColumns16 * 16, kTokenRows = kTokens8 * 8, kStage = linear_stage(kColumns, kTokenRows);
  constexpr int kSums = sizeof(float) * linear_sums(kColumns, kTokenRows);
  p.stages = std::min(kMostStages, ring_bytes(kColumns, kTokenRows, p) / kStage);
  TORCH_CHECK(p.stages >= 2, "v has room for rank ", p.sums_row, ": too much for this GPU's shared memory");
  launch(linear_kernel<T, kTokens8, kColumns16>, tiles, kLinearThreads,
         1024 + std::max(p.stages * kStage, kSums) + linear_vectors(kColumns, kTokenRows) +
             sizeof(float) * p.rows * p.sums_row,
         true, p);
}

template <typename T, int kTokens8>
void run_width(LinearParams& p, int width, int64_t tiles) {
  switch (width) {
    case 1: return run<T, kTokens8, 1>(p, tiles);
    case 2: return run<T, kTokens8, 2>(p, tiles);
    case 3: return run<T, kTokens8, 3>(p, tiles);
    case 4: return run<T, kTokens8, 4>(p, tiles);
    case 6: return run<T, kTokens8, 6>(p, tiles);
    case 8: return run<T, kTokens8, 8>(p, tiles);
    case 10: return run<T, kTokens8, 10>(p, tiles);
    case 14: return run<T, kTokens8, 14>(p, tiles);
    default: TORCH_CHECK(false, "no kernel for tiles of ", width * 16, " columns");
  }
}

}  // namespace

bool linear_runs() {
  return has_code_for_90(linear_kernel<__half, 1, 1>) &&
         device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) >= kSharedMemory;
}

void linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, const std::optional<Tensor>& v,
            const std::optional<Tensor>& shared_v, const Tensor& row_slot, const Tensor& arena, const Tensor& table,
            const Tensor& slots, const Tensor& sets, int64_t module, IntArrayRef columns, IntArrayRef out_begin,
            Tensor& y) {
  check_linear(x, weight, bias, v, shared_v, row_slot, arena, table, slots, sets, module, columns, out_begin, y);
  const c10::cuda::CUDAGuard guard(y.device());
  TORCH_CHECK(linear_runs(), "linear needs a GPU of compute capability 9.0 or 10.0, and an extension built for it");
  if (y.numel() == 0) return;
  const int64_t rows = y.size(0), x_stride = rows > 1 ? x.stride(1) : x.size(0) > 1 ? x.stride(0) : x.size(2);
  TORCH_CHECK(x.size(0) == 1 || rows == 1 || x.stride(0) == rows * x_stride, "x has strides ", x.strides(),
              "; want one slice's rows right behind another's");
  check_rows_aligned(x, x_stride, "x");
  check_rows_aligned(weight, weight.stride(0), "weight");

  LinearParams p{};
  p.slices = static_cast<int>(columns.size()) - 1;
  if (v) p.own = own_sums(*v, p.slices);
  if (shared_v) p.shared = shared_sums(*shared_v);
  p.sums_row = static_cast<int>(std::max(p.own.room, p.shared.room));
  p.t = tenants_of(row_slot, arena, table, module);
  p.t.slots = static_cast<int>(std::min(table.size(0), slots.size(0)));
  p.tenants = reinterpret_cast<const Slot*>(slots.const_data_ptr<int32_t>());
  p.sets = reinterpret_cast<const SharedSet*>(sets.const_data_ptr<int64_t>());
  p.shared_sets = static_cast<int>(sets.size(0));
  p.bias = bias ? bias->const_data_ptr() : nullptr;
  p.y = y.data_ptr();
  p.y_stride = y.stride(0);
  p.rows = static_cast<int>(rows);
  p.chunks = static_cast<int>((x.size(2) + kLinearChunk - 1) / kLinearChunk);
  p.input_is_there = v || shared_v;
  p.input_slice = x.size(0) > 1 ? p.rows : 0;
  std::copy(columns.begin(), columns.end(), p.columns);
  std::copy(out_begin.begin(), out_begin.end(), p.out_begin);
  const int width = tile_width(columns, p), tiles = tiles_of(columns, width, p.tiles), eights = (p.rows + 7) / 8;
  p.weight = matrix_map(weight.const_data_ptr(), weight.scalar_type(), columns.back(), x.size(2), weight.stride(0),
                        width * 16);
  p.input = matrix_map(x.const_data_ptr(), x.scalar_type(), x.size(0) * p.rows, x.size(2), x_stride, eights * 8);
  const auto run_rows = [&](auto zero) {
    using T = decltype(zero);
    if (eights == 1) run_width<T, 1>(p, width, tiles);
    else if (eights == 2) run_width<T, 2>(p, width, tiles);
    else run_width<T, 3>(p, width, tiles);
  };
  if (y.scalar_type() == at::kHalf) run_rows(__half{});
  else run_rows(__nv_bfloat16{});
}

}  // namespace scute::cuda
