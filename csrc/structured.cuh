// What the kernel of structured.cu does to one part of one row: sparse matrices and mixes; kronecker.cuh has products.
#pragma once
#include "common.cuh"

namespace scute::cuda {

constexpr int kStructuredThreads = 512, kStructuredCtas = 2;  // of a multiprocessor: with fewer registers they spill
constexpr int kStagedBytes = 56 * 1024;                       // of x, at most: a longer row stays where it is
constexpr int kSparseLanes = 4;                               // that sum one output of a sparse matrix, at least

// What a CTA works on: one row, and of one slice the tile-th of `tiles` parts.
template <typename T>
struct Part {
  const T* x;
  T* y;  // the slice's first column
  int in, tile, tiles, width;
  bool aligned;

  __device__ __forceinline__ bool staged() const { return in * sizeof(T) <= kStagedBytes; }
  // The part's bound, 0: the first, 1: the last, of `count` things that all parts share.
  __device__ __forceinline__ int bound(int count, int i) const {
    return static_cast<int>(static_cast<int64_t>(count) * (tile + i) / tiles);
  }
};

// Asks for x to come to shared memory: in no registers, so that all of it is under way at once.
template <typename T>
__device__ __forceinline__ void ask_for_row(const Part<T>& part, T* to) {
  constexpr int kWord = 16 / sizeof(T);
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x) * kWord; i < part.in; i += kStructuredThreads * kWord) {
    if (part.aligned) {
      cp_async16(to + i, part.x + i, true);
    } else {
#pragma unroll 2
      for (int j = 0; j < kWord; ++j) to[i + j] = part.x[i + j];
    }
  }
  cp_async_commit();
}

// Neighbouring lanes, and loads that follow, ask for other parts of the same sectors: these may stay in the L1 cache.
__device__ __forceinline__ uint4 load_near(const void* p) {
#ifdef __CUDA_ARCH__
  uint4 w;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w) : "l"(p));
  return w;
#else
  return *static_cast<const uint4*>(p);
#endif
}

__device__ __forceinline__ void prefetch(const void* p) {
#ifdef __CUDA_ARCH__
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
#endif
}

// Eight neighbouring values of a sparse matrix and the inputs that they are for.
template <typename T>
struct Chunk {
  static constexpr int kValues = 16 / sizeof(T);  // of a load
  uint4 inputs, values[8 / kValues];

  // Those from k on, a multiple of 8, or the last that an output has: lanes without any read what their neighbours do,
  // for without branches loads stay in registers and next to each other. `count`: values of the matrix, behind which
  // the arena may end.
  __device__ __forceinline__ void load(const uint16_t* input, const T* value, int k, int end, int count) {
    k = min(k, (max(end, 1) - 1) & ~7);
    inputs = load_near(input + k);
#pragma unroll
    for (int i = 0; i < 8 / kValues; ++i)
      values[i] = load_near(value + (i ? min(k + i * kValues, (count - 1) & ~(kValues - 1)) : k));
  }

  __device__ __forceinline__ float value(int i) const {
    if constexpr (sizeof(T) == 4) {
      return __uint_as_float(word(values[i / 4], i % 4));
    } else {
      const float2 pair = unpack<T>(word(values[0], i / 2));
      return i % 2 ? pair.y : pair.x;
    }
  }

  // Only those from `begin` to `end` are the output's. Beside them are inputs and values of others or, behind the last,
  // anything.
  __device__ __forceinline__ void add(const T* x, int k, int begin, int end, int count, float (&sums)[2]) {
    const uint32_t mine = 0xffu >> (8 - min(max(end - k, 0), 8)) & 0xffu << min(max(begin - k, 0), 8);
    if (k + 8 > count) {
      const auto kept = [&](int i) { return (mine >> i & 1) * 0xffffu | (mine >> (i + 1) & 1) * 0xffff0000u; };
      inputs.x &= kept(0), inputs.y &= kept(2), inputs.z &= kept(4), inputs.w &= kept(6);
    }
    float from[8];
#pragma unroll
    for (int i = 0; i < 8; ++i)
      from[i] = to_float(x[i % 2 ? word(inputs, i / 2) >> 16 : word(inputs, i / 2) & 0xffff]);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (mine >> i & 1) sums[i % 2] = fmaf(value(i), from[i], sums[i % 2]);
  }
};

// y[column] += the sum of the values from bounds[column] on, times the inputs that they are for. The order of a sum
// depends on where its values lie and on how many the matrix has. A chunk's successor, of this output or of the lane's
// next, is asked for as soon as the chunk is added: the other one's sum and the exchange of sums hide some of the wait.
template <typename T>
__device__ __forceinline__ void sparse(const Part<T>& part, const int32_t* bounds, const uint16_t* inputs,
                                       const T* values, int count, int lanes, T* x) {
  const int lane = static_cast<int>(threadIdx.x) % lanes, groups = kStructuredThreads / lanes, step = 8 * lanes;
  const int end = part.bound(part.width, 1);
  int column = part.bound(part.width, 0) + static_cast<int>(threadIdx.x) / lanes, from = 0, to = 0;
  if (column < end) from = bounds[column], to = bounds[column + 1];
  int k = (from & ~7) + 8 * lane;
  Chunk<T> a, b;
  a.load(inputs, values, k, to, count);
  b.load(inputs, values, k + step, to, count);
  pdl_wait();
  ask_for_row(part, x);
  T before{};
  if (lane == 0 && column < end) before = part.y[column];
  cp_async_wait<0>();
  __syncthreads();
#pragma unroll 1
  while (__ballot_sync(~0u, column < end)) {
    const int next = column + groups;
    int next_from = 0, next_to = 0;
    if (next < end) next_from = bounds[next], next_to = bounds[next + 1];
    float sums[2] = {};
#pragma unroll 1
    for (bool more = true; more;) {
      more = __ballot_sync(~0u, k + 2 * step < to);
      const int then = more ? k + 2 * step : (next_from & ~7) + 8 * lane, until = more ? to : next_to;
      a.add(x, k, from, to, count, sums);
      a.load(inputs, values, then, until, count);
      b.add(x, k + step, from, to, count, sums);
      b.load(inputs, values, then + step, until, count);
      k = then;
    }
    from = next_from, to = next_to;
    float sum = sums[0] + sums[1];
#pragma unroll 1
    for (int by = lanes / 2; by; by /= 2) sum += __shfl_xor_sync(~0u, sum, by);
    if (lane == 0 && column < end) part.y[column] = from_float<T>(to_float(before) + sum);
    column = next;
    if (lane == 0 && column < end) before = part.y[column];
  }
}

// The same where x is too long for shared memory: eight lanes to an output.
template <typename T, typename Index>
__device__ __forceinline__ void sparse_of_long_rows(const Part<T>& part, const int32_t* bounds, const Index* inputs,
                                                    const T* values) {
  constexpr int kLanes = 8, kGroups = kStructuredThreads / kLanes;
  const int group = static_cast<int>(threadIdx.x) / kLanes, lane = static_cast<int>(threadIdx.x) % kLanes;
  const int end = part.bound(part.width, 1);
  pdl_wait();
  for (int first = part.bound(part.width, 0); first < end; first += kGroups) {  // the same for all lanes of a warp
    const int column = first + group;
    float sum = 0;
    if (column < end) {
      const int last = bounds[column + 1];
#pragma unroll 2
      for (int k = bounds[column] + lane; k < last; k += kLanes)
        sum = fmaf(to_float(values[k]), to_float(part.x[inputs[k]]), sum);
    }
#pragma unroll
    for (int by = kLanes / 2; by; by /= 2) sum += __shfl_xor_sync(~0u, sum, by);
    if (lane == 0 && column < end) add_to(part.y[column], sum);
  }
}

template <typename T>
__device__ __forceinline__ void sparse(const Part<T>& part, const Structure& s, const char* data, T* staged) {
  const int32_t* bounds = reinterpret_cast<const int32_t*>(data);
  data += aligned((static_cast<int64_t>(part.width) + 1) * sizeof(int32_t));
  const int count = s.sparse.values;
  const T* values = reinterpret_cast<const T*>(data + aligned(static_cast<int64_t>(count) * s.sparse.index_bytes));
  if (count == 0) return;
  const uint16_t* inputs = reinterpret_cast<const uint16_t*>(data);
  if (s.sparse.index_bytes == 4) {  // of more inputs than shared memory has room for
    sparse_of_long_rows(part, bounds, reinterpret_cast<const int32_t*>(data), values);
  } else if (!part.staged()) {
    sparse_of_long_rows(part, bounds, inputs, values);
  } else {
    int lanes = kSparseLanes;  // twice as many where an output has more values than six loads of each bring
    while (lanes < 32 && count > static_cast<int64_t>(part.width) * lanes * 48) lanes *= 2;
    sparse(part, bounds, inputs, values, count, lanes, staged);
  }
}

// Output a of a group and output a + group / 2 are a pair, which one thread reads and writes.
template <typename T>
__device__ __forceinline__ void mix(const Part<T>& part, const Structure& s, const char* data) {
  const int group = s.mix.group, half = group / 2, pairs = part.width / 2, end = part.bound(pairs, 1);
  const bool one_each = s.mix.one_each;
  const T* f1 = reinterpret_cast<const T*>(data);
  const int64_t count = one_each ? pairs : part.width;
  const T* f2 = reinterpret_cast<const T*>(data + aligned(count * sizeof(T)));
  int first, second;
  T by[4];  // for the pair's first output, for its second
  const auto ask = [&](int pair) {
    first = pair / half * group + pair % half, second = first + half;
    if (pair >= end || second >= part.width) return;
    const int i = one_each ? pair : first, j = one_each ? pair : second;
    by[0] = f1[i], by[1] = f2[i], by[2] = f1[j], by[3] = f2[j];
  };
  int pair = part.bound(pairs, 0) + static_cast<int>(threadIdx.x);
  ask(pair);
  pdl_wait();
#pragma unroll 1
  for (; pair < end; pair += kStructuredThreads, ask(pair)) {
    if (second >= part.width) continue;
    const float a = to_float(part.y[first]), b = to_float(part.y[second]);
    part.y[first] = from_float<T>(a + fmaf(a, to_float(by[0]), -b * to_float(by[1])));
    part.y[second] = from_float<T>(b + fmaf(b, to_float(by[2]), a * to_float(by[3])));
  }
}

}  // namespace scute::cuda
