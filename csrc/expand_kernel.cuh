// The kernels of expand and vera. Grid: a fixed number of CTAs that share the work list.
#pragma once
#include "expand.cuh"

namespace scute::cuda {

// Ranks up to 24: a lane owns one column of each unit; its weights stay in registers for all the piece's rows.
template <typename T, int kBlocks>
__device__ __forceinline__ void load_columns(const ExpandItem& item, uint4 (&w)[8]) {
  const T* b = static_cast<const T*>(item.b);
#pragma unroll
  for (int unit = 0; unit < column_units(kBlocks); ++unit) {
    const int column = item.column + unit * kColumns + threadIdx.x;
    if (unit < item.units && column < item.width)
#pragma unroll
      for (int block = 0; block < kBlocks; ++block)
        w[unit * kBlocks + block] = load_weights(b + block * item.block + static_cast<int64_t>(column) * 8);
  }
}

// y of one row at the lane's columns, asked for before it is needed.
template <typename T>
__device__ __forceinline__ void load_before(const ExpandParams& p, const ExpandItem& item, int token, T (&before)[4]) {
  const T* y = output<T>(p, item, p.list.perm[item.begin + token], item.column + threadIdx.x);
#pragma unroll
  for (int unit = 0; unit < 4; ++unit)
    if (unit < item.units && item.column + unit * kColumns + static_cast<int>(threadIdx.x) < item.width)
      before[unit] = y[unit * kColumns];
}

template <typename T, bool kShared, int kBlocks>
__device__ __forceinline__ void column_pass(const ExpandParams& p, const ExpandItem& item, const uint4 (&w)[8],
                                            const Staged& s, const float* values, T (&before)[4]) {
  constexpr int kUnits = column_units(kBlocks);
  const int column = item.column + threadIdx.x;
  for (int token = 0; token < item.rows; ++token) {
    float sums[kUnits] = {}, base[kUnits];
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) base[unit] = to_float(before[unit]);
    if (token + 1 < item.rows) load_before(p, item, token + 1, before);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const float4* u = reinterpret_cast<const float4*>(values + token * p.room + block * 8);
      const float4 low = u[0], high = u[1];
#pragma unroll
      for (int unit = 0; unit < kUnits; ++unit) sums[unit] = dot8<T>(w[unit * kBlocks + block], low, high, sums[unit]);
    }
    T* y = output<T>(p, item, s.row[token], column);
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit)
      if (unit < item.units && column + unit * kColumns < item.width)
        finish<T, kShared>(s, token, column + unit * kColumns, base[unit], sums[unit], y + unit * kColumns);
  }
}

// Ranks from 32: 16 columns are the rows of a product, 8 tokens its columns, a step covers 32 ranks. Each warp has 32
// columns of the unit. A slot of four registers holds one step; at rank 32 the second slot is a second unit's.
template <typename T>
__device__ __forceinline__ void load_slot(const ExpandItem& item, int unit, int step, uint4* w) {
  const int lane = threadIdx.x % 32, g = lane / 4, block = step * 4 + lane % 4;
  const int first = item.column + unit * kColumns + threadIdx.x / 32 * 32 + g;
  const T* b = static_cast<const T*>(item.b) + block * item.block;
#pragma unroll
  for (int eight = 0; eight < 4; ++eight) {
    const int column = first + eight * 8;
    w[eight] = make_uint4(0, 0, 0, 0);
    if (block < item.blocks && column < item.width) w[eight] = load_weights(b + static_cast<int64_t>(column) * 8);
  }
}

template <typename T>
__device__ __forceinline__ void product(const uint4* w, const uint4* high, const uint4* low, int at, float (&sums)[2][4]) {
  const uint4 u = high[at], rest = low[at];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    mma32<T>(sums[half], w[2 * half], w[2 * half + 1], u);
    mma32<T>(sums[half], w[2 * half], w[2 * half + 1], rest);
  }
}

template <typename T, bool kShared>
__device__ __forceinline__ void load_first(const ExpandItem& item, uint4 (&w)[8]) {
  if (uses_tensor<kShared>(item.blocks)) {
    load_slot<T>(item, 0, 0, w);
    const bool wide = item.blocks <= kTensorBlocks;
    if (!wide || item.units == 2) load_slot<T>(item, wide, !wide, w + 4);
  } else if (item.blocks == 1) {
    load_columns<T, 1>(item, w);
  } else if (item.blocks == 2) {
    load_columns<T, 2>(item, w);
  } else if (item.blocks == 3) {
    load_columns<T, 3>(item, w);
  }
}

template <typename T, bool kShared>
__global__ void __launch_bounds__(kThreads, 4) expand_kernel(const __grid_constant__ ExpandParams p) {
  __shared__ WorkShared work;
  __shared__ Staged s;
  extern __shared__ __align__(16) unsigned char staging[];
  pdl_trigger();
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, units = operand_units(p.room);
  float* values = reinterpret_cast<float*>(staging);
  uint4* high = reinterpret_cast<uint4*>(values + kTokens * p.room);
  uint4* low = high + kTokens * units;
  if (threadIdx.x == 0) s.begin = -1;
  Cursor<ExpandCost<kShared>> cursor(work, p.list, {p});

  ExpandItem item{};
  uint4 w[8];
  for (bool fetched = false;;) {
    const ExpandItem done = item;
    const bool tensor = uses_tensor<kShared>(done.blocks), wide = done.blocks <= kTensorBlocks;
    float sums[2][2][4] = {};  // wide: one for each unit; else even and odd steps
    if (fetched) {
      T before[4] = {};
      if (!tensor) load_before(p, done, 0, before);
      stage<T, kShared>(p, done, s, values, high, low, tensor);
      if (!tensor) {
        switch (done.blocks) {
          case 0: column_pass<T, kShared, 0>(p, done, w, s, values, before); break;
          case 1: column_pass<T, kShared, 1>(p, done, w, s, values, before); break;
          case 2: column_pass<T, kShared, 2>(p, done, w, s, values, before); break;
          case 3: column_pass<T, kShared, 3>(p, done, w, s, values, before); break;
        }
      } else {
        const int steps = (done.blocks + 3) / 4, at = g * units + t;
        product<T>(w, high, low, at, sums[0]);
        if (wide) {
          if (done.units == 2) product<T>(w + 4, high, low, at, sums[1]);
        } else {
          for (int step = 1; step < steps; step += 2) {
            load_slot<T>(done, 0, step + 1, w);
            product<T>(w + 4, high, low, at + step * 4, sums[1]);
            if (step + 1 == steps) break;
            load_slot<T>(done, 0, step + 2, w + 4);
            product<T>(w, high, low, at + step * 4 + 4, sums[0]);
          }
        }
      }
    }

    // The next item's weights are under way while this one's y is read and written.
    const bool more = next_item<T, kShared>(p, cursor, item);
    if (more) load_first<T, kShared>(item, w);
    if (!fetched) pdl_wait();
    if (fetched && tensor) {
#pragma unroll
      for (int unit = 0; unit < 2; ++unit) {
        if (unit >= done.units) break;
        const int first = done.column + unit * kColumns + threadIdx.x / 32 * 32 + g;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int token = 2 * t + i % 2, column = first + i / 2 * 8;
          if (token >= done.rows || column >= done.width) continue;
          const float delta = wide ? sums[unit][i / 4][i % 4] : sums[0][i / 4][i % 4] + sums[1][i / 4][i % 4];
          T* y = output<T>(p, done, s.row[token], column);
          finish<T, kShared>(s, token, column, to_float(*y), delta * s.unscale[token], y);
        }
      }
    }
    if (!more) return;
    fetched = true;
  }
}

// fp32: plain multiply-adds, one column a thread.
template <bool kShared>
__global__ void __launch_bounds__(kThreads) expand_fp32_kernel(const __grid_constant__ ExpandParams p) {
  __shared__ WorkShared work;
  __shared__ Staged s;
  extern __shared__ __align__(16) unsigned char staging[];
  pdl_trigger();
  float* values = reinterpret_cast<float*>(staging);
  if (threadIdx.x == 0) s.begin = -1;
  Cursor<ExpandCost<kShared>> cursor(work, p.list, {p});
  pdl_wait();
  ExpandItem item;
  while (next_item<float, kShared>(p, cursor, item)) {
    stage<float, kShared>(p, item, s, values, nullptr, nullptr, false);
    for (int unit = 0; unit < item.units; ++unit) {
      const int column = item.column + unit * kColumns + threadIdx.x;
      if (column >= item.width) break;
      for (int token = 0; token < item.rows; ++token) {
        float sums[8] = {};
        for (int block = 0; block < item.blocks; ++block) {
          const float* b = static_cast<const float*>(item.b) + block * item.block + static_cast<int64_t>(column) * 8;
#pragma unroll
          for (int i = 0; i < 8; ++i) sums[i] = fmaf(b[i], values[token * p.room + block * 8 + i], sums[i]);
        }
        const float sum = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
        float* y = output<float>(p, item, s.row[token], column);
        finish<float, kShared>(s, token, column, *y, sum, y);
      }
    }
  }
}

// Used by expand and by vera, which set everything but what is read off the tensors here.
template <bool kShared>
void launch_expand(at::Tensor& y, at::IntArrayRef columns, ExpandParams p) {
  p.y = y.data_ptr();
  p.y_stride = y.stride(0);
  std::copy(columns.begin(), columns.end(), p.columns);
  const size_t smem = staging_bytes(p.room);
  TORCH_CHECK(smem <= 90 * 1024, "v has room for rank ", p.room, "; want at most about 1300");
  static const int ctas = tuned("SCUTE_EXPAND_CTAS", 4);
  const int64_t grid = static_cast<int64_t>(multiprocessors()) * ctas;
  SCUTE_CUDA_DISPATCH(y.scalar_type(), [&] {
    if constexpr (sizeof(scalar_t) == 2) {
      launch(expand_kernel<scalar_t, kShared>, grid, kThreads, smem, true, p);
    } else {
      launch(expand_fp32_kernel<kShared>, grid, kThreads, smem, true, p);
    }
  });
}

}  // namespace scute::cuda
