// How every kernel of this package is launched: current stream, optional programmatic dependence, checked.
#pragma once
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime.h>

#include <cstdlib>

namespace scute::cuda {

// Whether kernels may start before their predecessor ends (they wait inside, see pdl_wait). SCUTE_PDL=0 turns
// it off. Needs code compiled for 9.0 or later: older code has no wait in it.
bool dependent_launch();

// Only inside a captured graph is it known what ran before: device table, slots and arena are written outside.
inline bool capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  C10_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
  return status == cudaStreamCaptureStatusActive;
}

inline int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  C10_CUDA_CHECK(cudaGetDevice(&device));
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&value, attribute, device));
  return value;
}

// Whether the current GPU runs code of this kernel that was compiled for 9.0 or later: with clusters, copies of boxes and
// dependent launch in it.
template <typename Params>
bool has_code_for_90(void (*kernel)(Params)) {
  cudaFuncAttributes attributes{};
  if (cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)) != cudaSuccess) {  // no code at all
    cudaGetLastError();
    return false;
  }
  return attributes.ptxVersion >= 90 && device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9;
}

inline int multiprocessors() {
  static const int count = device_attribute(cudaDevAttrMultiProcessorCount);
  return count;
}

inline int driver_version() {
  static const int version = [] {
    int found = 0;
    C10_CUDA_CHECK(cudaDriverGetVersion(&found));
    return found;
  }();
  return version;
}

// Integer setting for tuning runs; read once by the caller.
inline int tuned(const char* name, int fallback) {
  const char* text = std::getenv(name);
  return text && *text ? std::atoi(text) : fallback;
}

// `all_shared`: the multiprocessor keeps all of its memory for shared memory, so that a successor that needs it can start
// beside the kernel instead of after it.
template <typename Params>
void launch(void (*kernel)(Params), int64_t grid, int threads, size_t smem, bool dependent, const Params& params,
            bool all_shared = false) {
  if (smem > 16 * 1024) {  // beyond 48 KB, with what the kernel declares itself, only when asked for
    C10_CUDA_CHECK(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                        cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(smem)));
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(grid));
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = smem;
  config.stream = c10::cuda::getCurrentCUDAStream();
  cudaLaunchAttribute attributes[2]{};
  config.attrs = attributes;
  if (dependent && dependent_launch() && capturing(config.stream)) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
#if CUDART_VERSION >= 12050
  if (all_shared && driver_version() >= 12050) {
    attributes[config.numAttrs].id = cudaLaunchAttributePreferredSharedMemoryCarveout;
    attributes[config.numAttrs++].val.sharedMemCarveout = 100;
  }
#endif
  C10_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, params));
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace scute::cuda
