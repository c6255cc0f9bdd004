// Thread block clusters (compute capability 9.0 on): CTAs that run together and read each other's shared memory.
// Code for older GPUs knows only clusters of one CTA.
#pragma once
#include "common.cuh"
#include "launch.h"

namespace scute::cuda {

__device__ __forceinline__ int cluster_size() {
  int size = 1;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
#endif
  return size;
}

__device__ __forceinline__ int cluster_rank() {
  int rank = 0;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctaid.x;" : "=r"(rank));
#endif
  return rank;
}

// All threads of the cluster: what they wrote to shared memory before, all of them see after.
__device__ __forceinline__ void cluster_sync() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

// Where another CTA of the cluster keeps what this one keeps at `shared`.
template <typename V>
__device__ __forceinline__ const V* peer_address(const V* shared, int rank) {
#if __CUDA_ARCH__ >= 900
  uint64_t address;
  asm("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(shared), "r"(rank));
  return reinterpret_cast<const V*>(address);
#else
  return shared;
#endif
}

template <typename Params>
void launch_clusters(void (*kernel)(Params), int64_t clusters, int size, int threads, size_t smem,
                     const Params& params) {
  if (size == 1) return launch(kernel, clusters, threads, smem, true, params);
  C10_CUDA_CHECK(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                      cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(smem)));
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(clusters * size));
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = smem;
  config.stream = c10::cuda::getCurrentCUDAStream();
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = size;
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = attributes;
  config.numAttrs = dependent_launch() && capturing(config.stream) ? 2 : 1;
  C10_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, params));
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace scute::cuda
