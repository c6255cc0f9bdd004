#include "check.h"
#include "common.cuh"
#include "launch.h"
#include "ops.h"
#include "tokens.cuh"

namespace scute::cuda {
namespace {

struct TokenRowsParams {
  const int64_t* ids;  // (rows,)
  Tenants t;
  void* y;  // (rows, width), y_stride elements between rows
  int64_t y_stride;
  int width;
  bool aligned;  // y and its rows, to 16 bytes
};

constexpr int kTokenRowsThreads = 128;

// A CTA has one row of the batch. Its threads look the token up together: all read the same few words.
template <typename T>
__global__ void __launch_bounds__(kTokenRowsThreads) token_rows_kernel(const __grid_constant__ TokenRowsParams p) {
  pdl_trigger();
  const Tokens<T> own = tokens_of<T>(p.t, blockIdx.x, p.width);
  pdl_wait();
  if (own.count == 0) return;
  const int64_t id = p.ids[blockIdx.x];
  int begin = 0, end = own.count;  // the first token that is not below id
  while (begin < end) {
    const int middle = (begin + end) / 2;
    if (own.ids[middle] < id) begin = middle + 1;
    else end = middle;
  }
  if (begin == own.count || own.ids[begin] != id) return;
  const T* from = own.rows + static_cast<int64_t>(begin) * p.width;
  T* to = static_cast<T*>(p.y) + blockIdx.x * p.y_stride;
  constexpr int kEach = 16 / sizeof(T);
  const int vectors = p.aligned ? p.width / kEach : 0;  // of 16 bytes
  for (int i = threadIdx.x; i < vectors; i += kTokenRowsThreads)
    reinterpret_cast<uint4*>(to)[i] = load_weights(from + i * kEach);
  for (int i = vectors * kEach + threadIdx.x; i < p.width; i += kTokenRowsThreads) to[i] = from[i];
}

}  // namespace

void token_rows(const Tensor& ids, const Tensor& row_slot, const Tensor& arena, const Tensor& table, int64_t module,
                Tensor& y) {
  check_token_rows(ids, row_slot, arena, table, module, y);
  if (ids.size(0) == 0) return;
  const c10::cuda::CUDAGuard guard(ids.device());
  TokenRowsParams p{};
  p.ids = ids.const_data_ptr<int64_t>();
  p.t = tenants_of(row_slot, arena, table, module);
  p.y = y.data_ptr();
  p.y_stride = y.stride(0);
  p.width = static_cast<int>(y.size(1));
  p.aligned = rows_aligned(y) && p.width * y.element_size() % 16 == 0;
  SCUTE_CUDA_DISPATCH(y.scalar_type(),
                      [&] { launch(token_rows_kernel<scalar_t>, ids.size(0), kTokenRowsThreads, 0, true, p); });
}

}  // namespace scute::cuda
