// Division of a launch's work among its CTAs: by plain arithmetic on sizes that the host knows, never by the batch.
#pragma once
#include "common.cuh"

namespace scute::cuda {

constexpr int kTokens = 8;  // rows a tensor-core product takes; longer tiles are cut into pieces of 8

// Division by a number that the host knows, of numbers below 2^31.
struct Divisor {
  uint32_t value = 1, magic = 1u << 31;
  int shift = 31;

  Divisor() = default;
  explicit Divisor(int64_t by) : value(static_cast<uint32_t>(by)) {
    int log = 0;
    while ((int64_t{1} << log) < by) ++log;
    shift = 31 + log;
    magic = static_cast<uint32_t>(((uint64_t{1} << shift) + value - 1) / value);
  }
  __device__ __forceinline__ int quotient(int a) const {
    return static_cast<int>(static_cast<uint64_t>(static_cast<uint32_t>(a)) * magic >> shift);
  }
  // Leaves the remainder in `a`.
  __device__ __forceinline__ int split(int& a) const {
    const int q = quotient(a);
    a -= q * static_cast<int>(value);
    return q;
  }
};

// Items are numbered turn by turn, in a turn tile by tile, in a tile piece by piece, `units` a piece: turns hold what
// only large ranks need, so that the items of small ones come first and spread evenly over the CTAs.
struct WorkList {
  const int32_t* count;    // tiles in use
  const int32_t* largest;  // rank among their tenants
  int span;                // ranks of a turn
  const Tile* tiles;
  const int32_t* perm;
  int capacity;              // tiles that there may be
  int items;                 // in all turns
  Divisor turn, tile, unit;  // items of a turn, of a tile, of a piece
};

// `owners`: tenants or shared sets; each has at most one tile that is not full.
inline void divide_work(WorkList& list, int64_t rows, int64_t tile_rows, int64_t owners, int64_t units, int64_t turns) {
  const int64_t tiles = std::min(rows, rows / tile_rows + owners), pieces = (tile_rows + kTokens - 1) / kTokens;
  TORCH_CHECK(tiles * pieces * units * turns < 1 << 30, "too much work for one launch: ", rows, " rows");
  list.capacity = static_cast<int>(tiles);
  list.items = static_cast<int>(tiles * pieces * units * turns);
  list.unit = Divisor(units);
  list.tile = Divisor(pieces * units);
  list.turn = Divisor(std::max<int64_t>(1, tiles) * pieces * units);
}

// Where an item stands in the plan.
struct Place {
  int turn, slot, begin, rows, unit;
};

// The tile and the number of tiles are asked for at once. False: no such tile, or not so many rows in it.
__device__ __forceinline__ bool find_place(const WorkList& list, int item, Place& place) {
  place.turn = list.turn.split(item);
  const int tile = list.tile.split(item);
  const uint4 words = load_kept(reinterpret_cast<const uint4*>(list.tiles + tile));
  const int count = load_kept(list.count);
  const int skipped = list.unit.split(item) * kTokens;
  place.unit = item;
  place.slot = words.x;
  place.begin = words.y + skipped;
  place.rows = min(kTokens, static_cast<int>(words.z) - skipped);
  return tile < count && place.rows > 0;
}

constexpr int kWindow = 32;  // items of one CTA that are looked up at a time, one a lane of the first warp

// The items of this CTA that have work, of the numbers blockIdx.x, + gridDim.x, ... A window of them is looked up at
// the same time, so that between two items no CTA waits for the plan or the table:
//   for (; items.look_up(); ) for (item = items.next(); item; item = items.next()) ...
// All threads call the members together. There are at least as many items as CTAs.
template <typename Item>
struct ItemsShared {
  Item item[kWindow];
  unsigned live;
};

template <typename Item, typename Resolve>
struct Items {
  ItemsShared<Item>& shared;
  const Resolve resolve;  // (place, item) -> whether there is work; fills in the item
  int base = blockIdx.x, items = 0;
  unsigned live = 0;

  __device__ Items(ItemsShared<Item>& shared, const Resolve& resolve) : shared(shared), resolve(resolve) {}

  // False: there are no more windows.
  __device__ __forceinline__ bool look_up() {
    const WorkList& list = resolve.p.list;
    if (base >= static_cast<int>(gridDim.x)) __syncthreads();
    else
      items =
          min(list.items, (load_kept(list.largest) + list.span - 1) / list.span * static_cast<int>(list.turn.value));
    if (base >= items) return false;
    if (threadIdx.x < kWindow) {
      const int number = base + static_cast<int>(threadIdx.x * gridDim.x);
      Place place;
      const bool found = number < items && find_place(list, number, place) && resolve(place, shared.item[threadIdx.x]);
      const unsigned mask = __ballot_sync(~0u, found);
      if (threadIdx.x == 0) shared.live = mask;
    }
    __syncthreads();
    live = shared.live;
    base += kWindow * gridDim.x;
    return true;
  }

  // Null: the window is done.
  __device__ __forceinline__ const Item* next() {
    if (!live) return nullptr;
    const int index = __ffs(live) - 1;
    live &= live - 1;
    return &shared.item[index];
  }
};

}  // namespace scute::cuda
