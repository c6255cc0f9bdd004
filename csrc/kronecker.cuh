// y[l, o] += sum over p of w1[p][l] (sum over q of x[p, q] w2[q][o]), the product of two matrices, for structured.cu.
#pragma once
#include "structured.cuh"

namespace scute::cuda {

constexpr int kWarps = kStructuredThreads / 32;
constexpr int kEach = 4, kOutputs = kStructuredThreads * kEach;  // outputs that a thread, and a CTA, makes at a time
static_assert(kKroneckerRows <= kOutputs);

// Room for `inner` = x w_b, [p][r], where w2 = w_b w_a, w_b [q][r] and w_a [r][o]; for `outer` = w1 inner, [l][r], or
// w1 x, [l][q], lines beginning at a multiple of eight; for w1 of some l, [p][l]; and for w_b and the last factor, if
// they fit. Few ranks: w1 before w_a takes l p r + l r o multiplications, the other way p r o + p l o.
template <typename T>
struct KroneckerShared {
  float inner[kKroneckerValues], outer[kOutputs];
  T first[kOutputs], others[kOutputs];
};

// a / b for 0 <= a < 2^22 and 0 < b, faster than the exact instruction sequence.
__device__ __forceinline__ int quotient(int a, int b) {
  int q = static_cast<int>(__fdividef(static_cast<float>(a), static_cast<float>(b)));
  if (q * b > a) --q;
  if (a - q * b >= b) ++q;
  return q;
}

// The sum of x[k] w[k * stride] for k below n. The order depends on n alone: both paths add the same numbers up.
template <typename X, typename T>
__device__ __forceinline__ float dot(const X* x, const T* w, int n, int64_t stride, bool eights) {
  float sums[8] = {};
  int k = 0;
#pragma unroll 1
  for (; k + 8 <= n; k += 8) {
    float eight[8];
    load_eight(x + k, eights, eight);
#pragma unroll
    for (int i = 0; i < 8; ++i, w += stride) sums[i] = fmaf(eight[i], to_float(*w), sums[i]);
  }
#pragma unroll 1
  for (; k < n; ++k, w += stride) sums[0] = fmaf(to_float(x[k]), to_float(*w), sums[0]);
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

// inner = x w_b on tensor cores: a warp has 16 rows of x and 8 columns of w_b at a time. q is a multiple of 8.
template <typename T>
__device__ __forceinline__ void inner_tiles(const T* x, const T* right, int p, int q, int r, bool eights,
                                            float* inner) {
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4, tall = (p + 15) / 16;
  const auto eight_of = [&](const T* from) {
    if (eights) return *reinterpret_cast<const uint4*>(from);
    return make_uint4(pack(from[0], from[1]), pack(from[2], from[3]), pack(from[4], from[5]), pack(from[6], from[7]));
  };
#pragma unroll 1
  for (int unit = static_cast<int>(threadIdx.x) / 32; unit < tall * ((r + 7) / 8); unit += kWarps) {
    const int block = quotient(unit, tall), low = (unit - block * tall) * 16 + g, high = low + 8, column = block * 8;
    float sums[4] = {};
#pragma unroll 2
    for (int from = 0; from < q; from += 32) {
      const int k = from + 8 * t;
      uint4 w0 = make_uint4(0, 0, 0, 0), w1 = w0, b = w0;
      if (k < q && low < p) w0 = eight_of(x + low * q + k);
      if (k < q && high < p) w1 = eight_of(x + high * q + k);
      if (k < q && column + g < r) {
        const T* w = right + static_cast<int64_t>(k) * r + column + g;
        b = make_uint4(pack(w[0], w[r]), pack(w[2 * r], w[3 * r]), pack(w[4 * r], w[5 * r]), pack(w[6 * r], w[7 * r]));
      }
      mma32<T>(sums, w0, w1, b);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = i < 2 ? low : high, j = column + 2 * t + i % 2;
      if (row < p && j < r) inner[row * r + j] = sums[i];
    }
  }
}

// A lane's part, every fourth row, of the sum of w1[k * rows] values[k * stride] for k below p.
template <typename V, typename T>
__device__ __forceinline__ float some_rows(const V* values, int stride, const T* w1, int rows, int p) {
  float sums[4] = {};
  int k = static_cast<int>(threadIdx.x) % 32 / 8;
#pragma unroll 1
  for (; k + 12 < p; k += 16)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = k + 4 * i;
      sums[i] = fmaf(to_float(w1[row * rows]), to_float(values[row * stride]), sums[i]);
    }
#pragma unroll 1
  for (; k < p; k += 4) sums[0] = fmaf(to_float(w1[k * rows]), to_float(values[k * stride]), sums[0]);
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// What a CTA makes at a time: outputs of `rows` of w1's columns and `columns` of the last factor's.
struct Outputs {
  int row, rows, column, columns;

  __device__ __forceinline__ bool find(int e, int& i, int& j) const {
    i = static_cast<int>(threadIdx.x) + e * kStructuredThreads;
    if (i >= rows * columns) return false;
    j = i, i = quotient(i, columns);
    j -= i * columns;
    return true;
  }
};

template <typename T>
__device__ __forceinline__ void kronecker(const Part<T>& part, const Structure& s, const char* data,
                                          KroneckerShared<T>& shared, T* staged) {
  const int l = s.kronecker.l, p = s.kronecker.p, o = s.kronecker.o, q = s.kronecker.q, r = s.kronecker.r;
  // A tile has some columns of w1 or, where those are few, of one of them some of the last factor's.
  const int split = max(1, min(part.tiles / l, o)), shares = min(part.tiles, l * split);
  if (part.tile >= shares) return;
  const auto bound = [](int count, int i, int of) { return static_cast<int>(static_cast<int64_t>(count) * i / of); };
  const int share = part.tile / split, piece = part.tile % split;
  const int top = bound(l, share, shares / split), bottom = bound(l, share + 1, shares / split);
  const int left = bound(o, piece, split), right = bound(o, piece + 1, split);

  const T* w1 = reinterpret_cast<const T*>(data);
  data += aligned(static_cast<int64_t>(p) * l * sizeof(T));
  const T* wb = reinterpret_cast<const T*>(data);
  if (r) data += aligned(static_cast<int64_t>(q) * r * sizeof(T));
  const T* last = reinterpret_cast<const T*>(data) + left;
  const int depth = r ? r : q, wide = right - left;
  // Those of the other factors that fit come to shared memory, one behind the other.
  const int64_t of_wb = static_cast<int64_t>(q) * r, of_last = static_cast<int64_t>(depth) * wide;
  const int held_wb = of_wb <= kOutputs ? static_cast<int>(of_wb) : 0;
  const int held_last = of_last <= kOutputs - held_wb ? static_cast<int>(of_last) : 0;
  // Sums over more than kOutputs are cut there, whatever the part: a row's bits are the same in any batch.
  const int deep = min(depth, kOutputs), apart = (deep + 7) / 8 * 8, most_columns = min(wide, kOutputs);
  const int most_rows = min(kOutputs / most_columns, min(kOutputs / apart, kOutputs / p));

  bool fresh = true;  // x and what follows from it is not there yet
  const T* x = part.staged() ? staged : part.x;
  const bool eights = (part.staged() || part.aligned) && q % 8 == 0;
#pragma unroll 1
  for (int row = top; row < bottom; row += most_rows) {
#pragma unroll 1
    for (int column = 0; column < wide; column += most_columns) {
      const Outputs outputs{row, min(most_rows, bottom - row), column, min(most_columns, wide - column)};
      const int rows = outputs.rows;
      T first[kEach], others[kEach], before[kEach];
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        const int i = static_cast<int>(threadIdx.x) + e * kStructuredThreads, j = i - held_wb;
        if (i < p * rows) {
          const int k = quotient(i, rows);
          first[e] = w1[k * l + row + i - k * rows];
        }
        if (fresh && j < 0) {
          others[e] = wb[i];
        } else if (fresh && j < held_last) {
          const int k = quotient(j, wide);
          others[e] = last[k * o + j - k * wide];
        }
      }
      if (fresh) {
        pdl_wait();
        if (part.staged()) ask_for_row(part, staged);
      }
#pragma unroll
      for (int e = 0; e < kEach; ++e)
        if (int i, j; outputs.find(e, i, j)) before[e] = part.y[(row + i) * o + left + column + j];
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        const int i = static_cast<int>(threadIdx.x) + e * kStructuredThreads;
        if (i < p * rows) shared.first[i] = first[e];
        if (fresh && i < held_wb + held_last) shared.others[i] = others[e];
      }
      cp_async_wait<0>();
      __syncthreads();
      if (fresh && r) {
        const T* factor = held_wb ? shared.others : wb;
        bool done = false;
        if constexpr (sizeof(T) == 2) {
          done = q % 8 == 0;
          if (done) inner_tiles(x, factor, p, q, r, eights, shared.inner);
        }
#pragma unroll 1
        for (int i = threadIdx.x; !done && i < p * r; i += kStructuredThreads)
          shared.inner[i] = dot(x + i / r * q, factor + i % r, q, r, eights);
        __syncthreads();
      }
      fresh = false;
      float sums[kEach] = {};
#pragma unroll 1
      for (int from = 0; from < depth; from += deep) {
        const int some = min(deep, depth - from), blocks = (some + 7) / 8, lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
        for (int unit = static_cast<int>(threadIdx.x) / 32; unit < rows * blocks; unit += kWarps) {
          const int i = quotient(unit, blocks), j = (unit - i * blocks) * 8 + lane % 8;
          float sum = 0;
          if (j < some)
            sum = r ? some_rows(shared.inner + from + j, r, shared.first + i, rows, p)
                    : some_rows(x + from + j, q, shared.first + i, rows, p);
          sum += __shfl_xor_sync(~0u, sum, 8);
          sum += __shfl_xor_sync(~0u, sum, 16);
          if (lane < 8 && j < some) shared.outer[i * apart + j] = sum;
        }
        __syncthreads();
        const T* factor = held_last ? shared.others + held_wb : last + static_cast<int64_t>(from) * o;
#pragma unroll
        for (int e = 0; e < kEach; ++e)
          if (int i, j; outputs.find(e, i, j))
            sums[e] += dot(shared.outer + i * apart, factor + column + j, some, held_last ? wide : o, true);
        __syncthreads();
      }
#pragma unroll
      for (int e = 0; e < kEach; ++e)
        if (int i, j; outputs.find(e, i, j))
          part.y[(row + i) * o + left + column + j] = from_float<T>(to_float(before[e]) + sums[e]);
    }
  }
}

}  // namespace scute::cuda
