// Device helpers: programmatic dependence, 16-byte loads, 16-bit tensor-core products, conversions.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "layout.h"

namespace scute::cuda {

// Programmatic dependent launch. Every CTA of every kernel here calls pdl_wait before it ends, also one without
// work: a grid that ends early would let its successor overtake its predecessor. Before the wait only
// weights and the tables (entries, slots, sets, row -> slot, plan) may be read; the plan op ends with a full edge for
// that. One exception: shrink and project wait before they let a successor start, so a linear right behind them may
// read x, which was complete before they began, by copies that go past the L1 cache.
__device__ __forceinline__ void pdl_trigger() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// What every launch reads first, or every layer again, is to stay in the L2 cache while the base's weights pass
// through.
__device__ __forceinline__ uint64_t keep_policy() {
  uint64_t policy = 0;
#if __CUDA_ARCH__ >= 800
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
#endif
  return policy;
}

__device__ __forceinline__ int load_kept(const int* p) {
#if __CUDA_ARCH__ >= 800
  int word;
  asm volatile("ld.global.L2::cache_hint.s32 %0, [%1], %2;" : "=r"(word) : "l"(p), "l"(keep_policy()));
  return word;
#else
  return *p;
#endif
}
__device__ __forceinline__ uint4 load_kept(const uint4* p) {
#if __CUDA_ARCH__ >= 800
  uint4 w;
  asm volatile("ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
               : "l"(p), "l"(keep_policy()));
  return w;
#else
  return *p;
#endif
}
__device__ __forceinline__ int64_t word64(uint32_t low, uint32_t high) {
  return static_cast<int64_t>(static_cast<uint64_t>(high) << 32 | low);
}

// Volatile, so that the compiler leaves the loads where they are written: before the wait.
template <bool kKept = false>
__device__ __forceinline__ uint4 load_weights(const void* p) {
#ifdef __CUDA_ARCH__
  uint4 w;
  if constexpr (kKept && __CUDA_ARCH__ >= 800) {
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
                 : "l"(p), "l"(keep_policy()));
  } else {
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
                 : "l"(p));
  }
  return w;
#else
  return *static_cast<const uint4*>(p);
#endif
}
__device__ __forceinline__ uint2 load_weights8(const void* p) {
#ifdef __CUDA_ARCH__
  uint2 w;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(w.x), "=r"(w.y) : "l"(p));
  return w;
#else
  return *static_cast<const uint2*>(p);
#endif
}

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(__half v) { return __half2float(v); }
__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }

template <typename T>
__device__ __forceinline__ T from_float(float v) {
  if constexpr (std::is_same_v<T, float>) {
    return v;
  } else if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(v);
  } else {
    return __float2bfloat16_rn(v);
  }
}

template <typename T>
__device__ __forceinline__ float2 unpack(uint32_t pair) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half22float2(*reinterpret_cast<__half2*>(&pair));
  } else {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
  }
}

template <typename T>
__device__ __forceinline__ void add_to(T& y, float delta) {
  y = from_float<T>(to_float(y) + delta);
}

// Eight neighbours of x, which begin at a multiple of 16 bytes.
__device__ __forceinline__ void load_eight(const float* x, float (&to)[8]) {
  const float4 low = reinterpret_cast<const float4*>(x)[0], high = reinterpret_cast<const float4*>(x)[1];
  to[0] = low.x, to[1] = low.y, to[2] = low.z, to[3] = low.w;
  to[4] = high.x, to[5] = high.y, to[6] = high.z, to[7] = high.w;
}
template <typename T>
__device__ __forceinline__ void load_eight(const T* x, float (&to)[8]) {
  const uint4 words = *reinterpret_cast<const uint4*>(x);
  const float2 a = unpack<T>(words.x), b = unpack<T>(words.y), c = unpack<T>(words.z), d = unpack<T>(words.w);
  to[0] = a.x, to[1] = a.y, to[2] = b.x, to[3] = b.y;
  to[4] = c.x, to[5] = c.y, to[6] = d.x, to[7] = d.y;
}
// And such that begin anywhere.
template <typename T>
__device__ __forceinline__ void load_eight(const T* from, bool eights, float (&to)[8]) {
  if (eights) return load_eight(from, to);
#pragma unroll
  for (int i = 0; i < 8; ++i) to[i] = to_float(from[i]);
}

template <typename T>
__device__ __forceinline__ uint32_t pack(T low, T high) {
  static_assert(sizeof(T) == 2);
  return *reinterpret_cast<uint16_t*>(&low) | static_cast<uint32_t>(*reinterpret_cast<uint16_t*>(&high)) << 16;
}

template <typename T>
__device__ __forceinline__ void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                    uint32_t b1) {
  if constexpr (std::is_same_v<T, __half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

// c[16 x 8] += W[16 x 32] X[32 x 8]. Lane 4 g + t holds, 16 bytes each, inputs 8 t .. 8 t + 7 of weight row g (w0)
// and of weight row g + 8 (w1), and of column g of X (x): the order of k inside the two products is permuted, the
// same way for both operands, so that memory is read in 16-byte pieces and needs no rearranging.
// Result: c[0], c[1] at row g, columns 2 t, 2 t + 1; c[2], c[3] at row g + 8.
template <typename T>
__device__ __forceinline__ void mma32(float (&c)[4], const uint4& w0, const uint4& w1, const uint4& x) {
  mma<T>(c, w0.x, w1.x, w0.y, w1.y, x.x, x.y);
  mma<T>(c, w0.z, w1.z, w0.w, w1.w, x.z, x.w);
}

// Lane 4 g + t gives row g, columns 2 t, 2 t + 1 of an 8 x 8 matrix and gets column g, rows 2 t, 2 t + 1.
__device__ __forceinline__ uint32_t transposed(uint32_t pair) {
  uint32_t result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}

__device__ __forceinline__ uint32_t word(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

__device__ __forceinline__ void cp_async16(void* shared, const void* global, bool valid) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  // Zero source bytes: the 16 bytes are filled with zeros and `global` is not read.
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global), "r"(valid ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Runs a lambda with scalar_t set to the CUDA type of a serving dtype.
#define SCUTE_CUDA_DISPATCH(dtype, ...)              \
  [&] {                                              \
    const auto body = [&](auto zero) {               \
      using scalar_t = decltype(zero);               \
      (__VA_ARGS__)();                               \
    };                                               \
    switch (dtype) {                                 \
      case at::kFloat:                               \
        return body(float{});                        \
      case at::kHalf:                                \
        return body(__half{});                       \
      case at::kBFloat16:                            \
        return body(__nv_bfloat16{});                \
      default:                                       \
        TORCH_CHECK(false, "no kernel for ", dtype); \
    }                                                \
  }()

}  // namespace scute::cuda
