// Division of a launch's work among a fixed grid: nothing in the launch depends on the batch.
#pragma once
#include "common.cuh"

namespace scute::cuda {

constexpr int kThreads = 128;  // of every work-list kernel: four warps
constexpr int kWarps = kThreads / 32;
constexpr int kTokens = 8;     // rows a tensor-core product takes; longer tiles are cut into pieces of 8
constexpr int kMaxSlices = 4;  // of a fused layer

struct WorkList {
  const int32_t* count;  // tiles in use
  const Tile* tiles;
  const int32_t* perm;
  int capacity;
};

// What a tile's tenant has for one slice of the layer.
struct Slice {
  int64_t offset;  // of its matrix in the arena
  int rank8;       // -1: the slice is no work
};

struct WorkShared {
  int prefix[kThreads];  // work of the window's tiles, inclusive sums
  int cost[kThreads];    // of one piece (8 rows) of the tile
  Tile tile[kThreads];
  Slice slice[kMaxSlices][kThreads];
  int sums[kWarps];
};

// A piece of a tile, the same in every thread of the CTA. `offset` is where in the piece's work the cursor stands.
struct Piece {
  int index, slot, begin, rows, offset;  // index: of the tile in WorkShared
};

// The pieces of all tiles lie one after another on a line, each as long as its work; CTA b owns the b-th of gridDim.x
// equal parts. `cost(tile, perm, slice)` gives the work of one piece of the tile and says what it consists of; one thread
// calls it for each tile. All threads of the CTA call the members together.
template <typename Cost>
struct Cursor {
  WorkShared& shared;
  const WorkList list;
  const Cost cost;
  const int count;         // tiles
  int window, begin, end;  // first tile and stretch of the line of what is in shared memory
  int position, limit;     // what is left of this CTA's stretch

  __device__ Cursor(WorkShared& shared, const WorkList& list, const Cost& cost)
      : shared(shared), list(list), cost(cost), count(*list.count), window(0), begin(0) {
    int total = end = load(shared, list, cost, 0, count);
    if (count > kThreads) {
      for (int more = kThreads; more < count; more += kThreads) total += load_again(shared, list, cost, more, count);
      load_again(shared, list, cost, 0, count);
    }
    const unsigned share = static_cast<unsigned>(total) / gridDim.x, rest = total - share * gridDim.x;
    position = share * blockIdx.x + min(blockIdx.x, rest);
    limit = position + share + (blockIdx.x < rest);
  }

  // Reads the window's tiles into shared memory; returns the window's work.
  static __device__ __forceinline__ int load(WorkShared& shared, const WorkList& list, const Cost& cost, int window,
                                             int count) {
    __syncthreads();
    const int t = window + threadIdx.x, lane = threadIdx.x % 32;
    int work = 0;
    if (t < list.capacity) {
      const Tile tile = list.tiles[t];
      if (t < count) {
        Slice slice[kMaxSlices];
        const int piece = cost(tile, list.perm, slice);
        shared.tile[threadIdx.x] = tile;
#pragma unroll
        for (int i = 0; i < kMaxSlices; ++i) shared.slice[i][threadIdx.x] = slice[i];
        shared.cost[threadIdx.x] = piece;
        work = piece * ((tile.rows + kTokens - 1) / kTokens);
      }
    }
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, work, step);
      if (lane >= step) work += other;
    }
    if (lane == 31) shared.sums[threadIdx.x / 32] = work;
    __syncthreads();
    int before = 0, all = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w < threadIdx.x / 32) before += shared.sums[w];
      all += shared.sums[w];
    }
    shared.prefix[threadIdx.x] = before + work;
    __syncthreads();
    return all;
  }

  // Kept apart, so that the code every launch runs through stays short.
  static __device__ __noinline__ int load_again(WorkShared& shared, const WorkList& list, const Cost& cost, int window,
                                                int count) {
    return load(shared, list, cost, window, count);
  }

  // The piece at the cursor, or false at the end of this CTA's stretch.
  __device__ bool find(Piece& piece) {
    if (position >= limit) return false;
    while (position >= end) {
      window += kThreads;
      begin = end;
      end += load_again(shared, list, cost, window, count);
    }
    const int local = position - begin, lane = threadIdx.x % 32;
    int index = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) index += __popc(__ballot_sync(~0u, shared.prefix[w * 32 + lane] <= local));
    const Tile tile = shared.tile[index];
    piece.index = index;
    const int each = shared.cost[index], inside = local - (index ? shared.prefix[index - 1] : 0);
    const int part = inside < each ? 0 : inside / each;
    piece.slot = tile.slot;
    piece.begin = tile.begin + part * kTokens;
    piece.rows = min(kTokens, tile.rows - part * kTokens);
    piece.offset = inside - part * each;
    return true;
  }
};

}  // namespace scute::cuda
