#include "check.h"
#include "common.cuh"
#include "launch.h"
#include "ops.h"
#include "tokens.cuh"

namespace scute::cuda {
namespace {

struct TokenLogitsParams {
  const void* x;  // (rows, in), x_stride elements between rows
  int64_t x_stride;
  Tenants t;
  void* y;  // (rows, vocabulary), y_stride elements between rows
  int64_t y_stride;
  int in, columns, parts;
  bool aligned;  // x and its rows, to 16 bytes
};

constexpr int kLogitsThreads = 128, kLogitsWarps = kLogitsThreads / 32;

// Grid: (row of the batch, part of its tenant's tokens), parts innermost. A warp sums one product at a time, always in
// the same order, so that a logit's bits depend on neither neighbours nor parts.
template <typename T>
__global__ void __launch_bounds__(kLogitsThreads) token_logits_kernel(const __grid_constant__ TokenLogitsParams p) {
  pdl_trigger();
  const int row = blockIdx.x / p.parts, part = blockIdx.x % p.parts;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Tokens<T> own = tokens_of<T>(p.t, row, p.in);
  pdl_wait();
  const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
  T* y = static_cast<T*>(p.y) + row * p.y_stride;
  for (int k = part * kLogitsWarps + warp; k < own.count; k += p.parts * kLogitsWarps) {
    const T* w = own.rows + static_cast<int64_t>(k) * p.in;
    float sum = 0;
    for (int j = lane * 8; j < p.in; j += 32 * 8) {
      float a[8], b[8];
      load_eight(x + j, p.aligned, a);
      load_eight(w + j, b);  // in is a multiple of 8, and the block begins at one of 16 bytes
#pragma unroll
      for (int i = 0; i < 8; ++i) sum = fmaf(a[i], b[i], sum);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    const int column = own.ids[k];
    if (lane == 0 && column >= 0 && column < p.columns) y[column] = from_float<T>(sum);
  }
}

}  // namespace

void token_logits(const Tensor& x, const Tensor& row_slot, const Tensor& arena, const Tensor& table, int64_t module,
                  Tensor& y) {
  check_token_logits(x, row_slot, arena, table, module, y);
  if (x.size(0) == 0) return;
  const c10::cuda::CUDAGuard guard(x.device());
  TokenLogitsParams p{};
  p.x = x.const_data_ptr();
  p.x_stride = x.stride(0);
  p.t = tenants_of(row_slot, arena, table, module);
  p.y = y.data_ptr();
  p.y_stride = y.stride(0);
  p.in = static_cast<int>(x.size(1));
  p.columns = static_cast<int>(y.size(1));
  p.aligned = rows_aligned(x);
  // How many tokens a tenant has is not known here: few rows get all of the GPU, as for many tokens.
  p.parts = static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(32, 4 * multiprocessors() / x.size(0))));
  SCUTE_CUDA_DISPATCH(x.scalar_type(),
                      [&] { launch(token_logits_kernel<scalar_t>, x.size(0) * p.parts, kLogitsThreads, 0, true, p); });
}

}  // namespace scute::cuda
