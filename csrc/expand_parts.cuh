// What a warp of the decode expand works with: v as operands, its columns of y, its weights.
#pragma once
#include "expand.cuh"

namespace scute::cuda {

// Operands of a rank above 16 in shared memory: for each token [blocks of 8 ranks][high, low][8]. Those of a very large
// rank come in windows of so many steps of 32 ranks.
constexpr int kStepWindow = 64;
__host__ __device__ __forceinline__ int operand_row(int room) {
  const int steps = (room + 31) / 32;
  return (steps < kStepWindow ? steps : kStepWindow) * 128 + 16;
}

constexpr int kResultRow = kUnit + 8;

template <typename T>
struct ExpandShared {
  float results[kExpandWarps][kTokens * kResultRow];
  float unscale[kTokens];
  Row<T> rows[kTokens];  // above rank 16
};

// The power of two that brings a row's largest value near 2^10: fp16 has few exponents. It depends on that row only.
template <typename T>
__device__ __forceinline__ int shift_of(float largest) {
  if constexpr (!std::is_same_v<T, __half>) return 0;
  const int exponent = __float_as_int(largest) >> 23 & 0xff;  // biased by 127
  return largest > 0 && exponent < 255 ? max(-126, min(126, 127 + 10 - exponent)) : 0;
}
__device__ __forceinline__ float power_of_two(int exponent) { return __int_as_float((127 + exponent) << 23); }

// A 16-bit number and what it misses of a value.
template <typename T>
__device__ __forceinline__ T part_of(float value, bool low) {
  const T high = from_float<T>(value);
  return low ? from_float<T>(value - to_float(high)) : high;
}

__device__ __forceinline__ void add(float4& sum, const float4& more) {
  sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
}

// The sum of v's parts for four ranks of a row. Seven are asked for at a time: as many as 7,168 inputs have, and half of
// those of 14,336. The loads that the compiler leaves over of an unrolled loop would wait for one another.
struct PartSum {
  static constexpr int kAtOnce = 7;
  float4 parts[kAtOnce];

  __device__ __forceinline__ void ask(const PartialSums& sums, const float* from, bool there, int first) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      parts[i] = make_float4(0, 0, 0, 0);
      if (there && first + i < sums.parts) parts[i] = *reinterpret_cast<const float4*>(from + (first + i) * sums.part);
    }
  }
  // What was asked for, and the rest.
  __device__ __forceinline__ float4 finish(const PartialSums& sums, const float* from, bool there) {
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 1
    for (int first = 0;; ask(sums, from, there, first)) {
#pragma unroll
      for (const float4& part : parts) add(sum, part);
      first += kAtOnce;
      if (first >= sums.parts) return sum;
    }
  }
};

// Up to 16 ranks: four of a row's sums as a lane needs them; the row's four lanes are neighbours.
template <typename T>
__device__ __forceinline__ uint2 narrow_operand(const float4& v, bool low, float& unscale) {
  float largest = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
  largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
  largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
  const int shift = shift_of<T>(largest);
  const float scale = power_of_two(shift);
  unscale = __shfl_sync(~0u, power_of_two(-shift), threadIdx.x % 4 * 8);  // of the token whose results the lane gets
  return make_uint2(pack(part_of<T>(v.x * scale, low), part_of<T>(v.y * scale, low)),
                    pack(part_of<T>(v.z * scale, low), part_of<T>(v.w * scale, low)));
}

// More ranks, or shared factors: all rows' operands in shared memory, of a window from rank `first` on. A warp has a row
// at a time, a lane every 32nd four of its ranks: first the sums, then each, in place, as two parts. All threads, after
// a barrier.
template <typename T>
__device__ __forceinline__ void stage_operands(const ExpandParams& p, const Job& job, int slice, int first, int rank8,
                                               char* operands, ExpandShared<T>& s) {
  rank8 = min(kStepWindow * 32, rank8 - first);
  const int lane = threadIdx.x % 32, padded = (rank8 + 31) / 32 * 32, rows = min(kTokens, job.rows);
  const PartialSums& sums = job.shared ? p.shared : p.own;
#pragma unroll 1
  for (int token = threadIdx.x / 32; token < rows; token += kExpandWarps) {
    const Row<T>& r = s.rows[token];
    char* row = operands + token * p.operand;
    const float* v = sums.v + r.row * sums.row + slice * sums.slice + first;
    const bool there = !job.shared || r.d;
    float largest = 0;
#pragma unroll 2
    for (int rank = lane * 4; rank < padded; rank += 128) {
      float4 sum = make_float4(0, 0, 0, 0);
      if (rank < rank8 && there) {
        uint2 words;
        if (job.shared) words = *reinterpret_cast<const uint2*>(r.d + first + rank);
        PartSum parts;
        parts.ask(sums, v + rank, true, 0);
        sum = parts.finish(sums, v + rank, true);
        if (job.shared) {
          const float2 low = unpack<T>(words.x), high = unpack<T>(words.y);
          sum.x *= low.x, sum.y *= low.y, sum.z *= high.x, sum.w *= high.y;
        }
      }
      *reinterpret_cast<float4*>(row + rank * 4) = sum;
      largest = fmaxf(largest, fmaxf(fmaxf(fabsf(sum.x), fabsf(sum.y)), fmaxf(fabsf(sum.z), fabsf(sum.w))));
    }
#pragma unroll
    for (int step = 16; step; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
    const int shift = shift_of<T>(largest);
    const float scale = power_of_two(shift);
    if (lane == 0) s.unscale[token] = power_of_two(-shift);
#pragma unroll 2
    for (int begin = 0; begin < padded; begin += 128) {
      const int rank = begin + lane * 4;
      float4 sum = make_float4(0, 0, 0, 0);
      if (rank < padded) sum = *reinterpret_cast<const float4*>(row + rank * 4);
      sum.x *= scale, sum.y *= scale, sum.z *= scale, sum.w *= scale;
      __syncwarp();  // a block's parts lie where the sums of two lanes were
      if (rank >= padded) continue;
      char* high = row + rank / 8 * 32 + rank % 8 * 2;
      *reinterpret_cast<uint2*>(high) = make_uint2(pack(part_of<T>(sum.x, false), part_of<T>(sum.y, false)),
                                                   pack(part_of<T>(sum.z, false), part_of<T>(sum.w, false)));
      *reinterpret_cast<uint2*>(high + 16) = make_uint2(pack(part_of<T>(sum.x, true), part_of<T>(sum.y, true)),
                                                        pack(part_of<T>(sum.z, true), part_of<T>(sum.w, true)));
    }
  }
  __syncthreads();
}

// Two neighbouring numbers of y of which `left` are there. What is rarely run is kept out of the way: between two
// layers a kernel's instructions come from far.
template <typename T>
__device__ __noinline__ uint32_t load_some(const T* p, int left) {
  return left > 0 ? pack(p[0], left > 1 ? p[1] : from_float<T>(0)) : 0;
}
template <typename T>
__device__ __noinline__ void store_some(T* p, uint32_t pair, int left) {
  if (left > 0) p[0] = reinterpret_cast<const T*>(&pair)[0];
  if (left > 1) p[1] = reinterpret_cast<const T*>(&pair)[1];
}

// A lane's two columns of a unit, in four rows at a time: y is asked for before the products, and finished after them.
template <typename T, bool kNarrow>
struct Columns {
  static constexpr int kRows = 4;
  T* y;  // of row 0, the slice's first column
  int64_t y_stride;
  bool pairs;
  int width;
  int low, high;          // up to 16 ranks: rows of tokens lane / 8 and 4 + lane / 8
  const T *scale, *bias;  // private factors
  const ExpandShared<T>& s;
  uint32_t before[kRows], e[kRows];

  __device__ __forceinline__ T* at(int token, int column) const {
    const int row = kNarrow ? __shfl_sync(~0u, token / kRows ? high : low, token % kRows * 8) : s.rows[token].row;
    return y + row * y_stride + column;
  }
  // Tokens first .. first + 3 below `rows`.
  __device__ __forceinline__ void ask(int first, int rows, int column) {
    const bool whole = pairs && column + 2 <= width;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (first + i >= rows) break;
      const T* from = at(first + i, column);
      before[i] = whole ? *reinterpret_cast<const uint32_t*>(from) : load_some(from, width - column);
      if constexpr (!kNarrow) {
        const T* vector = s.rows[first + i].e;
        e[i] = vector && column < width ? *reinterpret_cast<const uint32_t*>(vector + column) : 0;
      }
    }
  }
  __device__ __forceinline__ static float2 vector(const T* v, int column, bool there) {  // the arena has room behind it
    return unpack<T>(v && there ? *reinterpret_cast<const uint32_t*>(v + column) : 0);
  }
  // `results`: of token 0, from `parts` warps.
  __device__ __forceinline__ void finish(int first, int rows, int column, const float* results, int parts = 1) {
    const bool there = column < width, whole = pairs && column + 2 <= width;
    float2 by, add;
    if constexpr (kNarrow) by = vector(scale, column, there), add = vector(bias, column, there);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (first + i >= rows) break;
      const float* from = results + (first + i) * kResultRow;
      float2 delta = *reinterpret_cast<const float2*>(from);
      if constexpr (!kNarrow) {
        for (int part = 1; part < parts; ++part) {
          const float2 more = *reinterpret_cast<const float2*>(from + part * kTokens * kResultRow);
          delta.x += more.x, delta.y += more.y;
        }
        const Row<T>& r = s.rows[first + i];
        by = vector(r.scale, column, there), add = vector(r.bias, column, there);
        if (r.shared) {
          const float2 factor = unpack<T>(e[i]);
          delta.x = r.e ? delta.x * factor.x : 0, delta.y = r.e ? delta.y * factor.y : 0;
        }
      }
      const float2 was = unpack<T>(before[i]);
      const uint32_t now = pack(from_float<T>(was.x + (fmaf(was.x, by.x, delta.x) + add.x)),
                                from_float<T>(was.y + (fmaf(was.y, by.y, delta.y) + add.y)));
      T* to = at(first + i, column);
      if (whole) *reinterpret_cast<uint32_t*>(to) = now;
      else store_some(to, now, width - column);
    }
  }
};

// The weights of a unit, or of 32 ranks of it, as the 16-row operand of tensor cores: columns are rows, four groups of
// them. Lane 4 g + t has columns 16 i + g and 16 i + 8 + g: up to 16 ranks, four of rank block t / 2; else all of block
// t.
template <bool kNarrow>
struct UnitWeights {
  uint4 w[kNarrow ? 4 : 8];

  template <typename T>
  __device__ __forceinline__ void load(const Weights& weights, int step, int column, int width) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, block = kNarrow ? t / 2 : step * 4 + t;
    const char* b = weights.b + (block * weights.block + (column + g) * 8) * 2 + (kNarrow ? t % 2 * 8 : 0);
    const int there = block < weights.blocks ? width - column - g : 0;
    if (there >= kUnit - 7 && width - column >= kUnit) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (kNarrow) {
          const uint2 low = load_weights8(b + i * 256), high = load_weights8(b + i * 256 + 128);
          w[i] = make_uint4(low.x, high.x, low.y, high.y);
        } else {
          w[2 * i] = load_weights(b + i * 256), w[2 * i + 1] = load_weights(b + i * 256 + 128);
        }
      }
      return;
    }
#pragma unroll
    for (auto& words : w) words = make_uint4(0, 0, 0, 0);
    if (there <= 0) return;
#pragma unroll 1
    for (int i = 0; i < 8; ++i) {
      if (8 * i >= there) break;
      const uint4 words = kNarrow ? make_uint4(load_weights8(b + i * 128).x, load_weights8(b + i * 128).y, 0, 0)
                                  : load_weights(b + i * 128);
#pragma unroll
      for (int j = 0; j < 4; ++j) {  // a register has no index
        if constexpr (kNarrow) {
          if (i == 2 * j) w[j].x = words.x, w[j].z = words.y;
          if (i == 2 * j + 1) w[j].y = words.x, w[j].w = words.y;
        } else {
          if (i == 2 * j) w[2 * j] = words;
          if (i == 2 * j + 1) w[2 * j + 1] = words;
        }
      }
    }
  }
  // sums[i] of columns 16 i + g (0, 1) and 16 i + 8 + g (2, 3), the high and the low part of a token's v.
  template <typename T, typename Operand>
  __device__ __forceinline__ void multiply(const Operand& v, float (&sums)[4][4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kNarrow) mma<T>(sums[i], w[i].x, w[i].y, w[i].z, w[i].w, v.x, v.y);
      else mma32<T>(sums[i], w[2 * i], w[2 * i + 1], v);
    }
  }
};

}  // namespace scute::cuda
