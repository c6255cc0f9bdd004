// The kernels of the decode expand.
#pragma once
#include "expand_parts.cuh"

namespace scute::cuda {

__device__ __forceinline__ void put_results(float* results, const float (&sums)[4][4], float unscale) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    results[16 * i] = (sums[i][0] + sums[i][1]) * unscale;
    results[16 * i + 8] = (sums[i][2] + sums[i][3]) * unscale;
  }
}

// One slice of a job. A product's eight columns are the high and the low parts of four tokens' v: pieces of more than
// four rows take two products.
template <typename T, bool kNarrow>
__device__ __forceinline__ void expand_slice(const ExpandParams& p, const Job& job, const Weights& weights,
                                             const Row<T>& mine, ExpandShared<T>& s, char* operands, int slice,
                                             int unit, int end) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int width = p.columns[slice + 1] - p.columns[slice], steps = kNarrow ? 1 : (weights.blocks + 3) / 4;
  const bool many = job.rows > 4;
  int high = -1;
  if (many && lane / 8 + 4 < job.rows) high = (job.shared ? p.shared_perm : p.perm)[job.begin + 4 + lane / 8];
  UnitWeights<kNarrow> w;
  Columns<T, kNarrow> columns{static_cast<T*>(p.y) + p.columns[slice],
                              p.y_stride,
                              p.y_pairs,
                              width,
                              job.rows,
                              mine.row,
                              high,
                              mine.scale,
                              mine.bias,
                              s};
  unit += warp;
  uint2 v[2];
  float unscale[2];
  if constexpr (kNarrow) {
    const bool there = t / 2 < weights.blocks;
    const float* from = p.own.v + slice * p.own.slice + t * 4;
    float4 low_sum = make_float4(0, 0, 0, 0), high_sum = low_sum;
    if (there && mine.row >= 0) low_sum = *reinterpret_cast<const float4*>(from + mine.row * p.own.row);
    w.template load<T>(weights, 0, unit * kUnit, unit < end ? width : 0);
    if (unit < end) columns.ask(0, unit * kUnit + 2 * lane);
    if (there && mine.row >= 0) {
#pragma unroll 4
      for (int part = 1; part < p.own.parts; ++part)
        add(low_sum, *reinterpret_cast<const float4*>(from + mine.row * p.own.row + part * p.own.part));
    }
    v[0] = narrow_operand<T>(low_sum, g % 2, unscale[0]);
    if (many) {
      if (there && high >= 0) high_sum = sum_parts(p.own, from + high * p.own.row);
      v[1] = narrow_operand<T>(high_sum, g % 2, unscale[1]);
    }
  } else {
    w.template load<T>(weights, 0, unit * kUnit, unit < end ? width : 0);
    __syncthreads();
    if (warp == 0 && lane % 8 == 0) s.rows[lane / 8] = mine;
    if (many && warp == 1 && lane % 8 == 0) {
      Row<T> other = mine;
      if (job.shared) other = shared_row<T>(p, job, 4 + lane / 8, slice);
      other.row = high;
      s.rows[4 + lane / 8] = other;
    }
    __syncthreads();
    if (unit < end) columns.ask(0, unit * kUnit + 2 * lane);
    stage_operands<T>(p, job, slice, weights.blocks * 8, operands, s);
    __syncthreads();
    unscale[0] = s.unscale[t], unscale[1] = s.unscale[4 + t];
  }
  operands += g / 2 * p.operand + t * 32 + g % 2 * 16;
  float* results = s.results[warp];
#pragma unroll 1
  while (unit < end) {
    const int column = unit * kUnit, next = unit + kExpandWarps;
    float sums[4][4] = {}, more[4][4] = {};
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      if constexpr (kNarrow) {
        w.template multiply<T>(v[0], sums);
        if (many) w.template multiply<T>(v[1], more);
      } else {
        w.template multiply<T>(*reinterpret_cast<const uint4*>(operands + step * 128), sums);
        if (many) w.template multiply<T>(*reinterpret_cast<const uint4*>(operands + 4 * p.operand + step * 128), more);
      }
      const bool last = step + 1 == steps;
      w.template load<T>(weights, last ? 0 : step + 1, last ? next * kUnit : column, last && next >= end ? 0 : width);
    }
    put_results(results + t * kResultRow + g, sums, unscale[0]);
    if (many) put_results(results + (4 + t) * kResultRow + g, more, unscale[1]);
    __syncwarp();
#pragma unroll 1
    for (int half = 0; half < 1 + many; ++half) {
      if (half) columns.ask(1, column + 2 * lane);
      columns.finish(half, column + 2 * lane, results + 2 * lane);
    }
    __syncwarp();
    unit = next;
    if (unit < end) columns.ask(0, unit * kUnit + 2 * lane);
  }
}

// 16 bit: tensor cores. Only weights and tables are read before the wait; after it v, and y.
template <typename T>
__global__ void __launch_bounds__(kExpandThreads, kExpandCtas) expand_kernel(const __grid_constant__ ExpandParams p) {
  extern __shared__ __align__(16) char operands[];
  __shared__ ExpandShared<T> s;
  pdl_trigger();
  const int token = threadIdx.x % 32 / 8;
#pragma unroll 1
  for (int worker = blockIdx.x; worker < p.workers; worker += gridDim.x) {
    Job job = job_of(p, worker);
    if (job.rows == 0) break;
    if (worker == static_cast<int>(blockIdx.x)) pdl_wait();
    if (!(job.shared ? p.shared : p.own).v) continue;
#pragma unroll 1
    for (; job.rows > 0; job.rows -= kTokens, job.begin += kTokens) {
      for_each_slice(p, job, [&](int slice, int begin, int end) {
        Weights weights;
        Row<T> mine;
        look_up<T>(p, job, token, slice, weights, mine);
        bool any = mine.scale || mine.bias || mine.d || (!job.shared && weights.blocks);
        if (job.shared && job.rows > 4) {
          const Row<T> other = shared_row<T>(p, job, token + 4, slice);
          any |= other.scale || other.bias || other.d;
        }
        if (!__ballot_sync(~0u, any)) return;
        if (weights.blocks <= 2 && !job.shared)
          expand_slice<T, true>(p, job, weights, mine, s, operands, slice, begin, end);
        else expand_slice<T, false>(p, job, weights, mine, s, operands, slice, begin, end);
      });
    }
  }
  pdl_wait();
}

// fp32: plain multiply-adds, one column a thread at a time.
__global__ void __launch_bounds__(kExpandThreads) expand_fp32_kernel(const __grid_constant__ ExpandParams p) {
  pdl_trigger();
  pdl_wait();
#pragma unroll 1
  for (int worker = blockIdx.x; worker < p.workers; worker += gridDim.x) {
    const Job job = job_of(p, worker);
    if (!(job.shared ? p.shared : p.own).v) continue;
    for_each_slice(p, job, [&](int slice, int begin, int end) {
      Weights weights;
      Row<float> r;
      look_up<float>(p, job, 0, slice, weights, r);
      const int last = min(end * kUnit, p.columns[slice + 1] - p.columns[slice]);
      for (int token = 0; token < job.rows; ++token) {
        if (job.shared) r = shared_row<float>(p, job, token, slice);
        else r.row = p.perm[job.begin + token];
        const int blocks = job.shared && !r.d ? 0 : weights.blocks;
        const ExpandParams::Sums& sums = job.shared ? p.shared : p.own;
        const float* v = sums.v + r.row * sums.row + slice * sums.slice;
        for (int column = begin * kUnit + threadIdx.x; column < last; column += kExpandThreads) {
          const float* b = reinterpret_cast<const float*>(weights.b) + static_cast<int64_t>(column) * 8;
          float parts[8] = {};
          for (int block = 0; block < blocks; ++block)
#pragma unroll
            for (int i = 0; i < 8; ++i) {
              float sum = v[block * 8 + i];
              for (int part = 1; part < sums.parts; ++part) sum += v[part * sums.part + block * 8 + i];
              parts[i] = fmaf(b[block * weights.block + i], job.shared ? sum * r.d[block * 8 + i] : sum, parts[i]);
            }
          float delta =
              ((parts[0] + parts[1]) + (parts[2] + parts[3])) + ((parts[4] + parts[5]) + (parts[6] + parts[7]));
          if (blocks && r.e) delta *= r.e[column];
          float& y = (static_cast<float*>(p.y) + r.row * p.y_stride)[p.columns[slice] + column];
          if (r.scale) delta = fmaf(y, r.scale[column], delta);
          if (r.bias) delta += r.bias[column];
          y += delta;
        }
      }
    });
  }
}

}  // namespace scute::cuda
