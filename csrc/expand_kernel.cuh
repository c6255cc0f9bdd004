// The kernels of expand and vera.
#pragma once
#include "expand.cuh"

namespace scute::cuda {

// The weights of an item that one warp has in flight: eight 16-byte registers a lane, in the order of its products.
// Columns are the rows of a product (16), tokens its columns (8).
struct ExpandLoad {
  const char* b;  // this lane's first
  int block;      // bytes from one rank block to the next
  int blocks, width;  // what is left of them from there

  template <typename T>
  __device__ static ExpandLoad of(const ExpandItem& item, int shape) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int column = (shape == kDeep ? warp % 2 : warp) * (shape == kNarrow ? 128 : shape == kMiddle ? 64 : 32) + g;
    const int block = shape == kNarrow ? t / 2 : shape == kDeep ? warp / 2 * 8 + t : t;
    const char* b = static_cast<const char*>(item.b) + (block * item.block + column * 8) * 2;
    return {shape == kNarrow ? b + t % 2 * 8 : b, item.block * 2, item.blocks - block, item.width - column};
  }
  // Ranks up to 16: product i has columns 16 i ..; a lane has 4 ranks of column g and 4 of column g + 8.
  __device__ __forceinline__ void narrow(int i, uint4& w) const {
    uint2 low = make_uint2(0, 0), high = low;
    if (blocks > 0) {
      if (i * 16 < width) low = load_weights8(b + i * 256);
      if (i * 16 + 8 < width) high = load_weights8(b + i * 256 + 128);
    }
    w = make_uint4(low.x, low.y, high.x, high.y);
  }
  // Beyond: a lane has 8 ranks of a column. Registers i, i + 1 (even i) are columns g and g + 8 of one product, of
  // columns 16 * .. on: four groups of them at 32 ranks, two groups at twice 32.
  template <bool kKept>
  __device__ __forceinline__ void wide(int i, bool middle, int pass, uint4& w) const {
    const int group = middle ? i / 2 : i / 4, step = middle ? 0 : i / 2 % 2;
    const int column = group * 16 + i % 2 * 8, from = pass * 16 + step * 4;
    w = make_uint4(0, 0, 0, 0);
    if (from < blocks && column < width) w = load_weights<kKept>(b + from * block + column * 16);
  }
};

template <typename T, bool kShared>
__device__ __forceinline__ void load_item(const ExpandItem& item, uint4 (&w)[8]) {
  const int shape = shape_of(item.blocks * 8);
  const ExpandLoad load = ExpandLoad::of<T>(item, shape);
  if (shape == kNarrow) {
#pragma unroll
    for (int i = 0; i < 8; ++i) load.narrow(i, w[i]);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) load.template wide<kShared>(i, shape == kMiddle, 0, w[i]);
  }
}

// results: [2 at the deepest shape, else 1][token][columns + 4]. `sums` are of columns g and g + 8 from `column` on,
// tokens 2 t and 2 t + 1.
__device__ __forceinline__ void write_results(float* results, int row, int rows, int column, const float (&sums)[4]) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (2 * t + i % 2 < rows) results[(2 * t + i % 2) * row + column + i / 2 * 8 + g] = sums[i];
}

// Products of the item's weights with the operands. At the deepest shape a warp has half of the ranks.
template <typename T, bool kShared>
__device__ __forceinline__ void multiply(const ExpandItem& item, const char* operands, int operand, float* results, uint4 (&w)[8]) {
  const int shape = shape_of(item.blocks * 8), row = shape_columns(shape) + 4, rows = item.rows;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  operands += g * operand;
  if (shape == kNarrow) {
    const uint2 high = *reinterpret_cast<const uint2*>(operands + t / 2 * 32 + t % 2 * 8);
    const uint2 low = *reinterpret_cast<const uint2*>(operands + t / 2 * 32 + t % 2 * 8 + 16);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float sums[4] = {};
      mma<T>(sums, w[i].x, w[i].z, w[i].y, w[i].w, high.x, high.y);
      mma<T>(sums, w[i].x, w[i].z, w[i].y, w[i].w, low.x, low.y);
      write_results(results, row, rows, warp * 128 + i * 16, sums);
    }
  } else if (shape == kMiddle) {
    const uint4 high = *reinterpret_cast<const uint4*>(operands + t * 32);
    const uint4 low = *reinterpret_cast<const uint4*>(operands + t * 32 + 16);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float sums[4] = {};
      mma32<T>(sums, w[2 * i], w[2 * i + 1], high);
      mma32<T>(sums, w[2 * i], w[2 * i + 1], low);
      write_results(results, row, rows, warp * 64 + i * 16, sums);
    }
  } else {
    const ExpandLoad load = ExpandLoad::of<T>(item, shape);
    const int passes = shape == kWide ? 1 : (item.blocks + 15) / 16, half = shape == kDeep ? warp / 2 : 0;
    operands += (half * 8 + t) * 32;
    float sums[2][4] = {};
    for (int pass = 0; pass < passes; ++pass) {
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        const uint4 high = *reinterpret_cast<const uint4*>(operands + pass * 512 + step * 128);
        const uint4 low = *reinterpret_cast<const uint4*>(operands + pass * 512 + step * 128 + 16);
#pragma unroll
        for (int group = 0; group < 2; ++group) {
          uint4 &w0 = w[group * 4 + step * 2], &w1 = w[group * 4 + step * 2 + 1];
          mma32<T>(sums[group], w0, w1, high);
          mma32<T>(sums[group], w0, w1, low);
          if (pass + 1 < passes) {
            load.template wide<kShared>(group * 4 + step * 2, false, pass + 1, w0);
            load.template wide<kShared>(group * 4 + step * 2 + 1, false, pass + 1, w1);
          }
        }
      }
    }
    const int column = (shape == kDeep ? warp % 2 : warp) * 32;
#pragma unroll
    for (int group = 0; group < 2; ++group)
      write_results(results + half * kTokens * row, row, rows, column + group * 16, sums[group]);
  }
}

// The first `left` of four neighbouring numbers; zeros for the others.
template <typename T>
__device__ __noinline__ uint2 load_some(const T* p, int left) {
  const T zero = from_float<T>(0);
  return make_uint2(pack(p[0], left > 1 ? p[1] : zero), pack(left > 2 ? p[2] : zero, left > 3 ? p[3] : zero));
}
template <typename T>
__device__ __forceinline__ void store_four(T* p, const float (&v)[4], int left, bool whole) {
  if (whole) {
    *reinterpret_cast<uint2*>(p) = make_uint2(pack(from_float<T>(v[0]), from_float<T>(v[1])),
                                              pack(from_float<T>(v[2]), from_float<T>(v[3])));
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (i < left) p[i] = from_float<T>(v[i]);
  }
}
template <typename T>
__device__ __forceinline__ void unpack_four(uint2 words, float (&v)[4]) {
  const float2 low = unpack<T>(words.x), high = unpack<T>(words.y);
  v[0] = low.x, v[1] = low.y, v[2] = high.x, v[3] = high.y;
}

// A thread's part of an item's y: four columns, tokens `first`, + step, ...
template <typename T>
struct Fours {
  int column, left, first, step;
  T* y;

  __device__ Fours(const ExpandParams& p, const ExpandItem& item) {
    const int fours = shape_columns(shape_of(item.blocks * 8)) / 4;
    column = threadIdx.x % fours * 4;
    left = item.width - column;
    first = threadIdx.x / fours;
    step = kExpandThreads / fours;
    y = static_cast<T*>(p.y) + p.columns[item.slice] + item.column + column;
  }
  // Of a vector of the tenant's, which begins at the item's first column.
  __device__ __forceinline__ uint2 vector(const void* numbers) const {
    if (!numbers || left <= 0) return make_uint2(0, 0);
    const T* from = static_cast<const T*>(numbers) + column;
    return left >= 4 ? *reinterpret_cast<const uint2*>(from) : load_some(from, left);
  }
};

// Everything about an item that does not depend on what came before the launch: the weights come to registers.
template <typename T, bool kShared>
__device__ __forceinline__ void begin_item(const ExpandParams& p, const ExpandItem& item, uint4 (&w)[8], ExpandRows& rows) {
  load_item<T, kShared>(item, w);
  if (threadIdx.x < kTokens) {
    look_up_row<T, kShared>(p, item, rows, threadIdx.x);
  } else if (!kShared && threadIdx.x / 32 == 1) {
    const int size = min(item.width, shape_columns(shape_of(item.blocks * 8))) * sizeof(T), at = threadIdx.x % 32 * 128;
    if (item.scale && at < size) prefetch(static_cast<const char*>(item.scale) + at, 1);
    if (item.bias && at < size) prefetch(static_cast<const char*>(item.bias) + at, 1);
  }
}

// 16 bit: tensor cores. Only weights and tables are read before the wait; after it v, and y.
template <typename T, bool kShared>
__global__ void __launch_bounds__(kExpandThreads, 6) expand_kernel(const __grid_constant__ ExpandParams p) {
  __shared__ ItemsShared<ExpandItem> work;
  __shared__ ExpandRows both[2];
  extern __shared__ __align__(16) unsigned char staging[];
  pdl_trigger();
  const int operand = operand_row(p.room);
  float* results = reinterpret_cast<float*>(staging + kTokens * operand);
  constexpr int kAhead = 4;  // rows of y asked for before they are needed

  Items<ExpandItem, ExpandResolve<T, kShared>> items(work, {p});
  bool waited = false;
  for (int turn = 0; items.look_up();) {
    const ExpandItem* next = items.next();
    uint4 w[8];
    if (next) begin_item<T, kShared>(p, *next, w, both[turn]);
    if (!waited) pdl_wait();
    waited = true;
    for (; next; turn ^= 1) {
      const ExpandItem& item = *next;
      ExpandRows& rows = both[turn];
      const Fours<T> own(p, item);
      __syncthreads();
      uint2 before[kAhead];
      const bool whole = p.y_aligned && own.left >= 4;
      const auto ask = [&](int token, uint2& four) {
        if (whole && token < item.rows) four = *reinterpret_cast<const uint2*>(own.y + rows.row[token] * p.y_stride);
      };
#pragma unroll
      for (int i = 0; i < kAhead; ++i) ask(own.first + i * own.step, before[i]);
      const int shape = shape_of(item.blocks * 8), row = shape_columns(shape) + 4;
      float* sums = reinterpret_cast<float*>(staging);
      sum_chunks<T, kShared>(p, item, rows, results, sums, operand / 4);
      split_sums<T>(item, rows, sums, operand / 4, shape_ranks(shape, item.blocks * 8));
      __syncthreads();
      multiply<T, kShared>(item, reinterpret_cast<const char*>(staging), operand, results, w);
      float scale[4], bias[4];
      if constexpr (!kShared) {
        unpack_four<T>(own.vector(item.scale), scale);
        unpack_four<T>(own.vector(item.bias), bias);
      }

      // The next item's weights are under way while this one's y is read and written.
      next = items.next();
      if (next) begin_item<T, kShared>(p, *next, w, both[turn ^ 1]);
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kTokens; ++i) {
        const int token = own.first + i * own.step;
        if (token >= item.rows) break;
        T* out = own.y + rows.row[token] * p.y_stride;
        float y[4], e[4];
        if (own.left > 0 && !whole) before[i % kAhead] = load_some(out, own.left);
        unpack_four<T>(before[i % kAhead], y);
        if (i + kAhead < kTokens) ask(token + kAhead * own.step, before[i % kAhead]);
        if (own.left <= 0) continue;
        if constexpr (kShared) {
          if (!rows.e[token]) continue;
          unpack_four<T>(own.vector(rows.e[token]), e);
        }
        float4 delta = *reinterpret_cast<const float4*>(results + token * row + own.column);
        if (shape == kDeep) {
          const float4 rest = *reinterpret_cast<const float4*>(results + (kTokens + token) * row + own.column);
          delta.x += rest.x, delta.y += rest.y, delta.z += rest.z, delta.w += rest.w;
        }
        const float d[4] = {delta.x, delta.y, delta.z, delta.w}, unscale = rows.unscale[token];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if constexpr (kShared) y[j] += d[j] * unscale * e[j];
          else y[j] += fmaf(y[j], scale[j], d[j] * unscale) + bias[j];
        }
        store_four(out, y, whole ? 4 : own.left, whole);
      }
    }
  }
}

// fp32: plain multiply-adds, one column a thread at a time.
template <bool kShared>
__global__ void __launch_bounds__(kExpandThreads) expand_fp32_kernel(const __grid_constant__ ExpandParams p) {
  __shared__ ItemsShared<ExpandItem> work;
  __shared__ ExpandRows rows;
  extern __shared__ __align__(16) unsigned char staging[];
  pdl_trigger();
  float* sums = reinterpret_cast<float*>(staging);
  float* space = sums + kTokens * operand_row(p.room) / 4;
  Items<ExpandItem, ExpandResolve<float, kShared>> items(work, {p});
  pdl_wait();
  const ExpandItem* next = nullptr;
  while ((next = items.next()) || items.look_up()) {
    if (!next) continue;
    const ExpandItem& item = *next;
    __syncthreads();
    if (threadIdx.x < kTokens) look_up_row<float, kShared>(p, item, rows, threadIdx.x);
    __syncthreads();
    sum_chunks<float, kShared>(p, item, rows, space, sums, operand_row(p.room) / 4);
    __syncthreads();
    for (int column = threadIdx.x; column < min(kUnitColumns, item.width); column += kExpandThreads) {
      const float* b = static_cast<const float*>(item.b) + static_cast<int64_t>(column) * 8;
      for (int token = 0; token < item.rows; ++token) {
        float parts[8] = {};
        for (int block = 0; block < item.blocks; ++block)
#pragma unroll
          for (int i = 0; i < 8; ++i)
            parts[i] = fmaf(b[block * item.block + i], sums[token * operand_row(p.room) / 4 + block * 8 + i], parts[i]);
        float delta = ((parts[0] + parts[1]) + (parts[2] + parts[3])) + ((parts[4] + parts[5]) + (parts[6] + parts[7]));
        float& y = (static_cast<float*>(p.y) + rows.row[token] * p.y_stride)[p.columns[item.slice] + item.column + column];
        if constexpr (kShared) {
          if (!rows.e[token]) continue;
          delta *= static_cast<const float*>(rows.e[token])[column];
        } else {
          if (item.scale) delta = fmaf(y, static_cast<const float*>(item.scale)[column], delta);
          if (item.bias) delta += static_cast<const float*>(item.bias)[column];
        }
        y += delta;
      }
    }
  }
}

// Used by expand and by vera, which set everything but what is read off the tensors here.
template <bool kShared>
void launch_expand(at::Tensor& y, at::IntArrayRef columns, int64_t tile_rows, int64_t owners, ExpandParams p) {
  p.y = y.data_ptr();
  p.y_stride = y.stride(0);
  p.y_aligned = reinterpret_cast<uintptr_t>(p.y) % 8 == 0 && p.y_stride % 4 == 0;
  p.v_aligned = reinterpret_cast<uintptr_t>(p.v) % 16 == 0 && (p.v_chunk | p.v_row | p.v_slice) % 4 == 0;
  std::copy(columns.begin(), columns.end(), p.columns);
  int64_t units = 0;
  for (int i = 0; i < p.slices; ++i) {
    p.y_aligned &= p.columns[i] % 4 == 0;
    p.units[i] = (p.columns[i + 1] - p.columns[i] + kUnitColumns - 1) / kUnitColumns;
    units += p.units[i];
  }
  const bool tensor = y.element_size() == 2;
  const int turns = tensor ? 1 << shape_of(p.room) : 1;
  p.turn_step = kUnitStripes / turns;
  divide_work(p.list, y.size(0), tile_rows, owners, units, turns);
  const int smem = kTokens * operand_row(p.room) + kResultBytes;
  p.fit = kResultBytes / 4 / p.chunks / 8 * 8;
  TORCH_CHECK(p.fit > 0, "v has ", p.chunks, " chunks; want at most 500");
  TORCH_CHECK(smem <= 90 * 1024, "v has room for rank ", p.room, "; want at most about 2500");
  static const int ctas = tuned("SCUTE_EXPAND_CTAS", 6);
  const int64_t grid = std::min<int64_t>(p.list.items, static_cast<int64_t>(multiprocessors()) * ctas);
  if (grid == 0) return;
  SCUTE_CUDA_DISPATCH(y.scalar_type(), [&] {
    if constexpr (sizeof(scalar_t) == 2) {
      launch(expand_kernel<scalar_t, kShared>, grid, kExpandThreads, smem, true, p);
    } else {
      launch(expand_fp32_kernel<kShared>, grid, kExpandThreads, smem, true, p);
    }
  });
}

}  // namespace scute::cuda
