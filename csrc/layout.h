// The memory layout that ops share with python/scute_sgl/layout.py, which documents it.
#pragma once
#include <cstdint>

namespace scute {

constexpr int kRankStep = 8;
constexpr int kChunk = 512;       // inputs summed per partial of a shrink
constexpr int kPlanHeader = 16;   // int32 words
constexpr int64_t kAbsent = -1;   // offset of a tensor that a tenant does not have

enum Live : int32_t { kDelta = 1, kShared = 2, kRotated = 4 };

// One row of the device table: what a tenant does to one projection. Offsets are bytes into the arena.
struct Entry {
  int64_t a, b, scale, bias, d, e, rotation, meta;
};
static_assert(sizeof(Entry) == 64);

#ifdef __CUDACC__
#define SCUTE_HD __host__ __device__
#else
#define SCUTE_HD
#endif
SCUTE_HD inline int entry_rank(int64_t meta) { return static_cast<int>(meta & 0xffff); }
SCUTE_HD inline int entry_block(int64_t meta) { return static_cast<int>(meta >> 16 & 0xffff); }
SCUTE_HD inline bool entry_one_block(int64_t meta) { return meta >> 32 & 1; }

struct Slot {
  int32_t live, shared_set;
};

struct SharedSet {
  int64_t a, b, rank, in, out;
};

// A run of at most `tile_rows` rows of one tenant (or of one shared set).
struct Tile {
  int32_t slot, begin, rows, unused;
};

// View of a plan buffer for at most n rows. Tiles come first: kernels read them whole, and so they stay aligned for any n.
struct Plan {
  int32_t* header;  // tiles, shared tiles, live bits
  Tile *tiles, *shared_tiles;
  int32_t *perm, *shared_perm;
};

SCUTE_HD inline Plan plan_view(int32_t* words, int64_t n) {
  Tile* tiles = reinterpret_cast<Tile*>(words + kPlanHeader);
  int32_t* perm = reinterpret_cast<int32_t*>(tiles + 2 * n);
  return {words, tiles, tiles + n, perm, perm + n};
}

inline int64_t plan_rows(int64_t words) { return (words - kPlanHeader) / 10; }

}  // namespace scute
