// y += y * scale + bias + B v for many rows with private factors; with shared ones (kShared) B (d * v) times e.
//
// Grid: a fixed number of CTAs. The blocks of 256 columns of all slices of all tiles lie on a line, a tile's blocks one
// after another; CTA b owns the b-th of gridDim.x equal stretches of it. y and the first weights of a block are asked
// for while the block before is at work, across the borders of tiles. Each of the eight warps has 32 columns of a block
// and all 64 rows. y, scale and bias wait in shared memory, each lane's where only that lane reads them.
#pragma once
#include "prefill_columns.cuh"

namespace scute::cuda::prefill {

struct ExpandShared {
  int row[kTileRows];
  float unscale[kTileRows];
  const void *scale[kTileRows], *bias[kTileRows], *e[kTileRows];  // shared factors: the row's own; null: absent
};

// v of a tile and slice as tensor cores take it, 16 bit in two parts: [rank block][row][8 ranks]. fp16 has few
// exponents, so a row's largest value is brought near 2^10; its scale depends on that row only.
template <typename T, bool kShared>
__device__ __forceinline__ void stage_v(const ExpandParams& p, const Work<T>& w, ExpandShared& s, T* high, T* low) {
  __syncthreads();
  const int q = threadIdx.x % 8;
  for (int i = threadIdx.x / 8; i < kTileRows; i += kExpandThreads / 8) {
    const int row = i < w.rows ? p.t.perm[w.begin + i] : -1;
    const T* d = nullptr;
    bool live = row >= 0 && w.blocks > 0;
    if constexpr (kShared) {
      const Entry* entry = row >= 0 ? row_entry(p.t, row, w.slice) : nullptr;
      live &= entry && entry->d != kAbsent;
      if (live) d = reinterpret_cast<const T*>(p.t.arena + entry->d);
      if (q == 0) {
        const auto vector = [&](int64_t offset) { return offset == kAbsent ? nullptr : p.t.arena + offset; };
        s.scale[i] = entry ? vector(entry->scale) : nullptr;
        s.bias[i] = entry ? vector(entry->bias) : nullptr;
        s.e[i] = live ? vector(entry->e) : nullptr;
      }
    }
    const float* v = p.v + row * p.v_row + w.slice * p.v_slice + q;
    const auto value = [&](int block) {
      if (!live || block >= w.blocks) return 0.0f;
      return kShared ? v[block * 8] * to_float(d[block * 8 + q]) : v[block * 8];
    };
    int shift = 0;
    if constexpr (std::is_same_v<T, __half>) {
      float largest = 0;
      for (int block = 0; block < w.blocks; ++block) largest = fmaxf(largest, fabsf(value(block)));
      for (int step = 4; step; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
      const int exponent = __float_as_int(largest) >> 23 & 0xff;  // biased by 127
      if (largest > 0 && exponent < 255) shift = max(-126, min(126, 127 + 10 - exponent));
    }
    const float scale = __int_as_float((127 + shift) << 23);
    for (int block = 0; block < max(2, w.blocks + w.blocks % 2); ++block) {
      const float scaled = value(block) * scale;
      const T part = from_float<T>(scaled);
      high[(block * kTileRows + i) * 8 + q] = part;
      low[(block * kTileRows + i) * 8 + q] = from_float<T>(scaled - to_float(part));
    }
    if (q == 0) s.row[i] = row, s.unscale[i] = __int_as_float((127 - shift) << 23);
  }
  __syncthreads();
}

// sums[rows 16 m ..][product i] += v B for 16 ranks.
template <typename T>
__device__ __forceinline__ void multiply(const uint32_t* v, int rows, const uint32_t (&b)[4][2],
                                         float (&sums)[4][4][4]) {
  const int lane = threadIdx.x % 32, second = kTileRows * 4;  // words from one rank block to the next
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    if (m * 16 >= rows) break;
    const uint32_t* a = v + m * 64 + lane;
#pragma unroll
    for (int i = 0; i < 4; ++i) mma<T>(sums[m][i], a[0], a[32], a[second], a[second + 32], b[i][0], b[i][1]);
  }
}

template <typename T>
struct Eight {  // columns in a row, as 16 bytes
  uint4 words;
  __device__ __forceinline__ T& operator[](int i) { return reinterpret_cast<T*>(&words)[i]; }
};

// One read and one rounding of the lane's part of y.
template <typename T, bool kShared>
__device__ __forceinline__ void finish(const ExpandParams& p, const Work<T>& w, const ExpandShared& s,
                                       const uint4* held, const float (&sums)[4][4][4]) {
  const int lane = threadIdx.x % 32, column = warp_column(w) + lane % 4 * 8, width = width_of(p, w);
  if (column >= width) return;
  const bool vector = whole(p, w, column);
  const auto load = [&](const void* vector) { return load_weights(static_cast<const T*>(vector) + column); };
  Eight<T> scale{}, bias{};
  Eight<T> e[kPieces / 2];  // of rows of different tenants: several under way at a time
  bool scaled = false, biased = false;
  if constexpr (!kShared) {
    const Entry* entry = slot_entry(p.t, w.slot, w.slice);
    scaled = entry->scale != kAbsent, biased = entry->bias != kAbsent;
    if (scaled) scale.words = held[kScale * kExpandThreads];
    if (biased) bias.words = held[kBias * kExpandThreads];
  }
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int at = i * 8 + lane / 4;
    if constexpr (kShared) {
      if (i % 4 == 0)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (at + j * 8 < w.rows && s.e[at + j * 8]) e[j].words = load(s.e[at + j * 8]);
    }
    if (at >= w.rows) break;
    if constexpr (kShared) {
      scaled = s.scale[at] != nullptr, biased = s.bias[at] != nullptr;
      if (scaled) scale.words = load(s.scale[at]);
      if (biased) bias.words = load(s.bias[at]);
    }
    T* y = output(p, w, s.row[at], column);
    Eight<T> piece{};
    if (vector) {
      piece.words = held[i * kExpandThreads];
    } else {
#pragma unroll
      for (int c = 0; c < 8; ++c)
        if (column + c < width) piece[c] = y[c];
    }
    const float unscale = s.unscale[at];
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const float before = to_float(piece[c]);
      float delta = sums[i / 2][c / 2][i % 2 * 2 + c % 2] * unscale;
      if constexpr (kShared) delta = s.e[at] ? delta * to_float(e[i % 4][c]) : 0;
      if (scaled) delta = fmaf(before, to_float(scale[c]), delta);
      if (biased) delta += to_float(bias[c]);
      piece[c] = from_float<T>(before + delta);
    }
    if (vector) {
      *reinterpret_cast<uint4*>(y) = piece.words;
    } else {
#pragma unroll
      for (int c = 0; c < 8; ++c)
        if (column + c < width) y[c] = piece[c];
    }
  }
}

template <typename T, bool kShared>
__global__ void __launch_bounds__(kExpandThreads, 2) expand_kernel(const __grid_constant__ ExpandParams p) {
  extern __shared__ __align__(16) unsigned char staging[];
  __shared__ ExpandShared s;
  const auto held = [&](int64_t at) {  // of even blocks, then of odd ones
    return reinterpret_cast<uint4*>(staging) + at % 2 * kHeld * kExpandThreads + threadIdx.x;
  };
  uint32_t* high = reinterpret_cast<uint32_t*>(staging) + 2 * kHeld * kExpandThreads * 4;
  uint32_t* low = high + p.room * kTileRows * 4;
  pdl_trigger();
  const int64_t total = static_cast<int64_t>(*p.t.count) * p.blocks[p.t.slices];
  const int64_t begin = total * blockIdx.x / gridDim.x, end = total * (blockIdx.x + 1) / gridDim.x;
  Work<T> next;
  uint32_t b[4][2];
  if (begin < end) {
    locate<T, kShared>(p, begin, next);
    load_b(p, next, 0, b);
  }
  pdl_wait();
  if (begin < end) fetch<T, kShared>(p, next, held(begin));
  cp_async_commit();
  int tile = -1, slice = -1;  // whose v is staged
  for (int64_t at = begin; at < end; ++at) {
    const Work<T> w = next;
    if (at + 1 < end) {
      locate<T, kShared>(p, at + 1, next);
      fetch<T, kShared>(p, next, held(at + 1));
    }
    cp_async_commit();
    if (w.blocks >= 0 && (tile != w.tile || slice != w.slice)) {
      stage_v<T, kShared>(p, w, s, reinterpret_cast<T*>(high), reinterpret_cast<T*>(low));
      tile = w.tile, slice = w.slice;
    }
    float sums[4][4][4] = {};
    for (int step = 0;; ++step) {
      uint32_t now[4][2];
#pragma unroll
      for (int i = 0; i < 4; ++i) now[i][0] = b[i][0], now[i][1] = b[i][1];
      const bool last = step * 2 + 2 >= w.blocks;
      if (!last) load_b(p, w, step + 1, b);
      else if (at + 1 < end) load_b(p, next, 0, b);
      if (w.blocks > 0) {
        multiply<T>(high + step * 2 * kTileRows * 4, w.rows, now, sums);
        multiply<T>(low + step * 2 * kTileRows * 4, w.rows, now, sums);
      }
      if (last) break;
    }
    cp_async_wait<1>();
    if (w.blocks >= 0) finish<T, kShared>(p, w, s, held(at), sums);
  }
}

// What there is of shared memory decides which ranks this path serves.
inline size_t expand_bytes(int64_t v_columns) {
  const size_t room = (v_columns / 8 + 1) / 2 * 2;
  return 2 * kHeld * kExpandThreads * sizeof(uint4) + std::max<size_t>(2, room) * kTileRows * 2 * sizeof(uint4);
}
inline bool expand_fits(int64_t v_columns) {
  static const int most = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - 4096;
  return expand_bytes(v_columns) <= static_cast<size_t>(most);
}

// `out_begin` is empty for private factors.
template <bool kShared>
void launch_expand(const at::Tensor& v, const Tenants& t, at::IntArrayRef columns, at::IntArrayRef out_begin,
                   at::Tensor& y) {
  const int64_t v_slice = kShared ? v.size(2) : v.size(2) / t.slices;
  ExpandParams p{t, v.const_data_ptr<float>(), v.stride(1), kShared ? 0 : v_slice};
  p.room = std::max(2, static_cast<int>((v_slice / 8 + 1) / 2 * 2));
  p.y = y.data_ptr();
  p.y_stride = y.stride(0);
  p.y_aligned = rows_aligned(y);
  for (int i = 0; i <= t.slices; ++i) {
    p.columns[i] = static_cast<int>(columns[i]);
    p.y_aligned &= i == t.slices || columns[i] % 8 == 0;
    if (i) p.blocks[i] = p.blocks[i - 1] + (p.columns[i] - p.columns[i - 1] + kColumns - 1) / kColumns;
  }
  std::copy(out_begin.begin(), out_begin.end(), p.out_begin);
  const size_t smem = expand_bytes(v_slice);
  const int64_t most = most_tiles(y.size(0), t.slots) * p.blocks[t.slices];
  const int64_t grid = std::min<int64_t>(most, multiprocessors() * (smem <= 110 * 1024 ? 2 : 1));
  if (grid == 0) return;
  SCUTE_PREFILL_DISPATCH(y.scalar_type(),
                         [&] { launch(expand_kernel<scalar_t, kShared>, grid, kExpandThreads, smem, true, p); });
}

// False if this path does not serve what is asked for. No row has both private and shared factors.
inline bool expand(const std::optional<at::Tensor>& v, const std::optional<at::Tensor>& shared_v,
                   const at::Tensor& row_slot, const at::Tensor& arena, const at::Tensor& table, const at::Tensor& sets,
                   const at::Tensor& plan, int64_t tile_rows, int64_t module, at::IntArrayRef columns,
                   at::IntArrayRef out_begin, at::Tensor& y) {
  const int64_t slices = columns.size() - 1;
  if (!serves(y, tile_rows, slices) || (v && (v->size(0) > 1 || !expand_fits(v->size(2) / slices))) ||
      (shared_v && (shared_v->size(0) > 1 || !expand_fits(shared_v->size(2)))))
    return false;
  if (v) launch_expand<false>(*v, tenants_of(arena, table, plan, y.size(0), module, slices), columns, {}, y);
  if (shared_v) {
    const Tenants t = tenants_of(arena, table, plan, y.size(0), module, slices, &sets, &row_slot);
    launch_expand<true>(*shared_v, t, columns, out_begin, y);
  }
  return true;
}

}  // namespace scute::cuda::prefill
