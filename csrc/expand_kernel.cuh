// The kernels of the decode expand.
#pragma once
#include "expand_parts.cuh"

namespace scute::cuda {

// `more`: to what earlier windows of ranks gave.
__device__ __forceinline__ void put_results(float* results, const float (&sums)[4][4], float unscale,
                                            bool more = false) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float low = (sums[i][0] + sums[i][1]) * unscale, high = (sums[i][2] + sums[i][3]) * unscale;
    results[16 * i] = more ? results[16 * i] + low : low;
    results[16 * i + 8] = more ? results[16 * i + 8] + high : high;
  }
}

// One slice of a job, up to 16 private ranks. A product's eight columns are the high and the low parts of four tokens'
// v: pieces of more than four rows take two products. A warp depends on no other.
template <typename T>
__device__ __forceinline__ void expand_narrow(const ExpandParams& p, const Job& job, const Weights& weights,
                                              const Row<T>& mine, ExpandShared<T>& s, int slice, int unit, int end) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int width = p.columns[slice + 1] - p.columns[slice];
  const bool many = job.rows > 4;
  const int high = many && lane / 8 + 4 < job.rows ? p.perm[job.begin + 4 + lane / 8] : -1;
  UnitWeights<true> w;
  Columns<T, true> columns{static_cast<T*>(p.y) + p.columns[slice],
                           p.y_stride,
                           p.y_pairs,
                           width,
                           mine.row,
                           high,
                           mine.scale,
                           mine.bias,
                           s};
  unit += warp;
  const bool there = t / 2 < weights.blocks, low_there = there && mine.row >= 0, high_there = there && high >= 0;
  const float* from = p.own.v + slice * p.own.slice + t * 4;
  const float *low_from = from + mine.row * p.own.row, *high_from = from + high * p.own.row;
  PartSum parts;
  parts.ask(p.own, low_from, low_there, 0);
  w.template load<T>(weights, 0, unit * kUnit, unit < end ? width : 0);
  if (unit < end) columns.ask(0, job.rows, unit * kUnit + 2 * lane);
  float unscale[2];
  const uint2 low = narrow_operand<T>(parts.finish(p.own, low_from, low_there), g % 2, unscale[0]);
  uint2 highs = low;
  if (many) {
    parts.ask(p.own, high_from, high_there, 0);
    highs = narrow_operand<T>(parts.finish(p.own, high_from, high_there), g % 2, unscale[1]);
  }
  float* results = s.results[warp];
#pragma unroll 1
  while (unit < end) {
    const int column = unit * kUnit, next = unit + kExpandWarps;
    float sums[4][4] = {}, more[4][4] = {};
    w.template multiply<T>(low, sums);
    if (many) w.template multiply<T>(highs, more);
    w.template load<T>(weights, 0, next * kUnit, next < end ? width : 0);
    put_results(results + t * kResultRow + g, sums, unscale[0]);
    if (many) put_results(results + (4 + t) * kResultRow + g, more, unscale[1]);
    __syncwarp();
#pragma unroll 1
    for (int half = 0; half < 1 + many; ++half) {
      if (half) columns.ask(4, job.rows, column + 2 * lane);
      columns.finish(4 * half, job.rows, column + 2 * lane, results + 2 * lane);
    }
    __syncwarp();
    unit = next;
    if (unit < end) columns.ask(0, job.rows, unit * kUnit + 2 * lane);
  }
}

// The same for larger ranks and shared factors. A product takes 32 ranks. From 128 on, where steps would follow one
// another for long, all warps do a unit together, each some of its ranks, and then each some of its rows.
template <typename T>
__device__ __forceinline__ void expand_wide(const ExpandParams& p, const Job& job, const Weights& weights,
                                            const Row<T>& mine, ExpandShared<T>& s, char* operands, int slice, int unit,
                                            int end) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int width = p.columns[slice + 1] - p.columns[slice], steps = (weights.blocks + 3) / 4;
  const int split = steps < kExpandWarps ? 1 : kExpandWarps, part = warp % split, units = kExpandWarps / split;
  // The steps of a window that are this warp's: from the first to, excluded, the last.
  const auto mine_of = [&](int window, int part) { return window + min(kStepWindow, steps - window) * part / split; };
  const int rows = min(kTokens, job.rows), share = kTokens / split, from = part * share, to = min(rows, from + share);
  const bool many = rows > 4;
  unit += warp / split;
  UnitWeights<false> w;
  w.template load<T>(weights, mine_of(0, part), unit * kUnit, unit < end ? width : 0);
  __syncthreads();
  if (warp == 0 && lane < kTokens) {
    Row<T> row = mine;  // of a tenant of its own, but for private factors
    if (!job.shared) row.row = lane < rows ? p.perm[job.begin + lane] : -1;
    s.rows[lane] = row;
  }
  __syncthreads();
  Columns<T, false> columns{static_cast<T*>(p.y) + p.columns[slice], p.y_stride, p.y_pairs, width, 0, 0, nullptr,
                            nullptr, s};
  if (unit < end) columns.ask(from, to, unit * kUnit + 2 * lane);
  if (steps <= kStepWindow) stage_operands<T>(p, job, slice, 0, weights.blocks * 8, operands, s);
  const char* operand = operands + g / 2 * p.operand + t * 32 + g % 2 * 16;
  float* results = s.results[warp];
  const float* together = s.results[warp - part];
#pragma unroll 1
  for (int begin = unit - warp / split; begin < end; begin += units) {  // the same for all warps
    const bool done = unit >= end;
    const int column = unit * kUnit, next = unit + units;
#pragma unroll 1
    for (int window = 0; window < max(1, steps); window += kStepWindow) {
      if (steps > kStepWindow) {
        __syncthreads();
        stage_operands<T>(p, job, slice, window * 32, weights.blocks * 8, operands, s);
      }
      float sums[4][4] = {}, more[4][4] = {};
      const int last = mine_of(window, part + 1), then = window + kStepWindow < steps ? window + kStepWindow : 0;
#pragma unroll 1
      for (int step = mine_of(window, part); step < last; ++step) {
        const char* v = operand + (step - window) * 128;
        w.template multiply<T>(*reinterpret_cast<const uint4*>(v), sums);
        if (many) w.template multiply<T>(*reinterpret_cast<const uint4*>(v + 4 * p.operand), more);
        const bool over = step + 1 == last, leave = over && then == 0;
        w.template load<T>(weights, over ? mine_of(then, part) : step + 1, leave ? next * kUnit : column,
                           done || (leave && next >= end) ? 0 : width);
      }
      put_results(results + t * kResultRow + g, sums, s.unscale[t], window > 0);
      if (many) put_results(results + (4 + t) * kResultRow + g, more, s.unscale[4 + t], window > 0);
    }
    if (split > 1) __syncthreads();
    else __syncwarp();
    if (!done) {
#pragma unroll 1
      for (int token = from; token < to; token += 4) {
        if (token > from) columns.ask(token, to, column + 2 * lane);
        columns.finish(token, to, column + 2 * lane, together + 2 * lane, split);
      }
    }
    if (split > 1) __syncthreads();
    else __syncwarp();
    unit = next;
    if (unit < end) columns.ask(from, to, unit * kUnit + 2 * lane);
  }
}

// 16 bit: tensor cores. Only weights and tables are read before the wait; after it v, and y.
template <typename T>
__global__ void __launch_bounds__(kExpandThreads, kExpandCtas) expand_kernel(const __grid_constant__ ExpandParams p) {
  extern __shared__ __align__(16) char operands[];
  __shared__ ExpandShared<T> s;
  pdl_trigger();
#pragma unroll 1
  for (int worker = blockIdx.x; worker < p.workers; worker += gridDim.x) {
    Job job = job_of(p, worker);
    if (job.rows == 0) break;
    if (worker == static_cast<int>(blockIdx.x)) pdl_wait();
    if (!(job.shared ? p.shared : p.own).v) continue;
    const int token = job.shared ? threadIdx.x % kTokens : threadIdx.x % 32 / 8;
#pragma unroll 1
    for (; job.rows > 0; job.rows -= kTokens, job.begin += kTokens) {
      for_each_slice(p, job, [&](int slice, int begin, int end) {
        Weights weights;
        Row<T> mine;
        look_up<T>(p, job, token, slice, weights, mine);
        const bool any = mine.scale || mine.bias || mine.d || (!job.shared && weights.blocks);
        if (!__ballot_sync(~0u, any)) return;
        if (weights.blocks <= 2 && !job.shared) expand_narrow<T>(p, job, weights, mine, s, slice, begin, end);
        else expand_wide<T>(p, job, weights, mine, s, operands, slice, begin, end);
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
        const PartialSums& sums = job.shared ? p.shared : p.own;
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
