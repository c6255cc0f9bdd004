// Copies of boxes of a matrix to shared memory by the tensor memory accelerator (9.0 and later), and their barriers.
#pragma once
#include <ATen/core/Tensor.h>
#include <cuda.h>
#include <cuda_runtime.h>

#include "common.cuh"

namespace scute::cuda {

constexpr int kBoxInputs = 64;  // 128 bytes of 16-bit numbers: a row of a swizzled box

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

#if __CUDA_ARCH__ >= 900 || !defined(__CUDA_ARCH__)

__device__ __forceinline__ void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
// Makes barriers known to the copies; before the CTA's threads meet.
__device__ __forceinline__ void barriers_ready() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra over;\n"
      "bra again;\nover:\n}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void barrier_expect(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
// For what is read once.
__device__ __forceinline__ uint64_t stream_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// The box of `map` whose first column and row are given; what lies outside the matrix is filled with zeros.
__device__ __forceinline__ void copy_box(void* to, const CUtensorMap* map, int column, int row, uint64_t* barrier,
                                         uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(to)),
      "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}
// A multiple of 16 bytes, from and to such.
__device__ __forceinline__ void copy_bytes(void* to, const void* from, int bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}
// The barrier's phase does not end before the thread's cp_async16 have.
__device__ __forceinline__ void barrier_arrive_copied(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// What has been written before it, copies of boxes may overwrite.
__device__ __forceinline__ void fence_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#endif

// The descriptor of a 16-bit matrix (rows, inputs), `stride` elements between rows, copied in boxes of `box_rows` rows
// and kBoxInputs columns whose 16-byte pieces are swizzled: piece i of row r lies at i ^ (r % 8).
CUtensorMap matrix_map(const void* data, at::ScalarType dtype, int64_t rows, int64_t inputs, int64_t stride,
                       int box_rows);

}  // namespace scute::cuda
