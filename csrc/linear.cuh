// Decode: y = x W^T for few rows, with the adapters' part added to the sums before they are rounded.
//
// Few rows leave the GPU with one task, to read W. A producer warp asks for it, box by box, through a ring that takes
// all the shared memory there is, before the kernel may even read x; meanwhile other warps look up what the tenants
// have for the tile. A CTA has one tile of columns and all inputs.
#pragma once
#include "linear_adapters.cuh"

namespace scute::cuda {

constexpr int kLinearWarps = 8, kLookUpWarps = kLinearRows / 8;  // of products; of look-ups, eight rows each
constexpr int kLinearThreads = 32 * (kLinearWarps + kLookUpWarps + 1);
constexpr int kMostStages = 24;
static_assert(kLinearRows <= 32 && kLinearRows % 8 == 0);  // a lane, or four, for each row

// Bytes of a stage: two boxes of W, two of x.
constexpr int linear_stage(int columns, int tokens) { return 2 * (columns + tokens) * kBoxInputs * 2; }
// Blocks of B, 8 ranks each, that a stage has room for; a lane for each.
constexpr int stage_blocks(int columns, int tokens) {
  const int blocks = linear_stage(columns, tokens) / (columns * 16);
  return blocks < 32 ? blocks : 32;
}
// Floats of a row of one warp's sums in shared memory; four warps share the inputs of a stage.
constexpr int linear_sums_row(int columns) { return columns + 4; }
constexpr int linear_sums(int columns, int tokens) { return 4 * tokens * linear_sums_row(columns); }
constexpr int linear_vectors(int columns, int tokens) { return columns * tokens * 8; }  // bytes of LinearVectors

__device__ __forceinline__ LinearTile linear_tile(const LinearParams& p, int index, int tile_columns) {
  int slice = 0;
  while (slice + 1 < p.slices && index >= p.tiles[slice + 1]) ++slice;
  const int column = (index - p.tiles[slice]) * tile_columns;
  return {slice, column, min(tile_columns, p.columns[slice + 1] - p.columns[slice] - column)};
}

// Products of kTokens8 * 8 rows with a tile of kColumns16 * 16 columns: 16-bit, sums in float32. A row's sums do not
// depend on how many rows there are.
template <typename T, int kTokens8, int kColumns16>
__global__ void __launch_bounds__(kLinearThreads, 1) linear_kernel(const __grid_constant__ LinearParams p) {
#if __CUDA_ARCH__ >= 900 || !defined(__CUDA_ARCH__)
  constexpr int kColumns = kColumns16 * 16, kTokenRows = kTokens8 * 8, kRow = linear_sums_row(kColumns);
  constexpr int kWeightBox = kColumns * kBoxInputs * 2, kInputBox = kTokenRows * kBoxInputs * 2;
  constexpr int kStage = linear_stage(kColumns, kTokenRows), kBlocks = stage_blocks(kColumns, kTokenRows);
  constexpr int kHalf = (kColumns16 + 1) / 2;
  extern __shared__ __align__(16) char dynamic[];
  __shared__ uint64_t full[kMostStages], empty[kMostStages], listed, looked_up;
  __shared__ LinearAdapters<T> adapters;
  pdl_trigger();
  char* ring = dynamic + (-shared_address(dynamic) & 1023);  // boxes are swizzled by the address
  float* added = reinterpret_cast<float*>(ring + max(p.stages * kStage, static_cast<int>(sizeof(float)) *
                                                                            linear_sums(kColumns, kTokenRows)));
  T* scales = reinterpret_cast<T*>(added + kTokenRows * kColumns);
  const LinearVectors<T> vectors{added, scales, scales + kTokenRows * kColumns};
  float* v = reinterpret_cast<float*>(scales + 2 * kTokenRows * kColumns);
  float* partial = reinterpret_cast<float*>(ring);  // [4][tokens][kRow], when all has been read
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const LinearTile tile = linear_tile(p, blockIdx.x, kColumns);
  const int early = min(p.stages, p.chunks);
  // The adapters' weights pass through the ring too: late enough to know which, and before the last that it holds of W,
  // which are read while they are multiplied.
  const int adapters_at = max(early, p.chunks - p.stages);
  const uint64_t once = stream_policy(), keep = keep_policy();
  const auto ask_weight = [&](int stage, int chunk) {
    char* to = ring + stage * kStage;
    const int row = p.columns[tile.slice] + tile.column;
    barrier_expect(full + stage, kStage);
    copy_box(to, &p.weight, chunk * kLinearChunk, row, full + stage, once);
    copy_box(to + kWeightBox, &p.weight, chunk * kLinearChunk + kBoxInputs, row, full + stage, once);
  };
  const auto ask_input = [&](int stage, int chunk) {
    char* to = ring + stage * kStage + 2 * kWeightBox;
    const int row = tile.slice * p.input_slice;
    copy_box(to, &p.input, chunk * kLinearChunk, row, full + stage, keep);
    copy_box(to + kInputBox, &p.input, chunk * kLinearChunk + kBoxInputs, row, full + stage, keep);
  };
  if (threadIdx.x == kLinearWarps * 32) {
    prefetch_map(&p.weight), prefetch_map(&p.input);
    for (int i = 0; i < p.stages; ++i) barrier_init(full + i, 1), barrier_init(empty + i, kLinearWarps * 32);
    barrier_init(&listed, 32), barrier_init(&looked_up, kLookUpWarps * 32);
    barriers_ready();
  }
  __syncthreads();

  if (warp < kLinearWarps) {
    // A warp has a quarter of a stage's inputs, every second 16-byte piece of half a box, and half of the columns.
    const int quarter = warp % 4, half = warp / 4, piece = ((2 * t + quarter % 2) ^ g) * 16;
    const char* weight = ring + quarter / 2 * kWeightBox + (half * kHalf * 16 + g) * 128 + piece;
    const char* input = ring + 2 * kWeightBox + quarter / 2 * kInputBox + g * 128 + piece;
    float sums[kHalf][kTokens8][4] = {};
    int stage = 0, parity = 0;
    const auto release = [&] {
      barrier_arrive(empty + stage);
      if (++stage == p.stages) stage = 0, parity ^= 1;
    };
#pragma unroll 1
    for (int chunk = 0;; ++chunk) {
      if (chunk == adapters_at) {
        barrier_wait(&looked_up, 0);
        const LinearShare<kColumns, kLinearWarps> mine(p, adapters);
#pragma unroll 1
        for (int first = 0; first < adapters.blocks; first += kBlocks) {
          barrier_wait(full + stage, parity);
          multiply_blocks<kColumns, kBlocks, kLinearWarps>(p, tile, mine, adapters, vectors, first,
                                                           ring + stage * kStage, v);
          if (lanes_copy(kColumns)) fence_copies();
          release();
        }
      }
      if (chunk == p.chunks) break;
      barrier_wait(full + stage, parity);
      uint4 x[kTokens8];
#pragma unroll
      for (int j = 0; j < kTokens8; ++j) x[j] = *reinterpret_cast<const uint4*>(input + stage * kStage + j * 8 * 128);
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        if (kColumns16 % 2 && i == kHalf - 1 && half) break;
        const char* at = weight + stage * kStage + i * 16 * 128;
        const uint4 w0 = *reinterpret_cast<const uint4*>(at), w1 = *reinterpret_cast<const uint4*>(at + 8 * 128);
#pragma unroll
        for (int j = 0; j < kTokens8; ++j) mma32<T>(sums[i][j], w0, w1, x[j]);
      }
      release();
    }
    pdl_wait();
    const auto meet = [] { asm volatile("bar.sync 1, %0;" ::"n"(kLinearWarps * 32) : "memory"); };
    meet();  // all have read the ring
    float* own = partial + quarter * kTokenRows * kRow + half * kHalf * 16;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      if (kColumns16 % 2 && i == kHalf - 1 && half) break;
#pragma unroll
      for (int j = 0; j < kTokens8; ++j)
#pragma unroll
        for (int c = 0; c < 4; ++c)
          own[(j * 8 + 2 * t + c % 2) * kRow + i * 16 + c / 2 * 8 + g] = sums[i][j][c];
    }
    meet();
    finish_tile<kColumns, kLinearWarps * 32>(p, tile, adapters, vectors, [&](int row, int column) {
      const float* at = partial + row * kRow + column;
      return (at[0] + at[kTokenRows * kRow]) + (at[2 * kTokenRows * kRow] + at[3 * kTokenRows * kRow]);
    });
  } else {
    if (warp == kLinearWarps) {
      if (lane == 0) {
        for (int i = 0; i < early; ++i) {
          ask_weight(i, i);
          if (p.input_is_there) ask_input(i, i);
        }
        if (!p.input_is_there) {
          pdl_wait();
          for (int i = 0; i < early; ++i) ask_input(i, i);
        }
      }
      int stage = early % p.stages, parity = early < p.stages;
      const auto next = [&] {
        if (++stage == p.stages) stage = 0, parity ^= 1;
      };
#pragma unroll 1
      for (int chunk = early;; ++chunk) {
        if (chunk == adapters_at) {
          barrier_wait(&listed, 0);
          int factor = 0;
#pragma unroll 1
          for (int first = 0; first < adapters.blocks; first += kBlocks, next()) {
            barrier_wait(empty + stage, parity);
            copy_blocks<kColumns, kBlocks>(tile, adapters, first, factor, ring + stage * kStage, full + stage);
          }
        }
        if (chunk == p.chunks) break;
        barrier_wait(empty + stage, parity);
        if (lane == 0) ask_weight(stage, chunk), ask_input(stage, chunk);
        next();
      }
    } else {
      const int part = warp - kLinearWarps - 1;
      if (part == 0) {
        list_factors<T>(p, tile, adapters);
        barrier_arrive(&listed);
      }
      gather_sums<T>(p, tile, part * 8, v);
      barrier_wait(&listed, 0);
      copy_vectors<kColumns>(p, tile, adapters, vectors, part, kLookUpWarps);
      barrier_arrive(&looked_up);
    }
  }
#endif
}

}  // namespace scute::cuda
