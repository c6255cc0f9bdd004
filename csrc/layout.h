// The memory layout that ops share with python/scute_sgl/layout.py, which documents it.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#define SCUTE_HD __host__ __device__
#else
#define SCUTE_HD
#endif

namespace scute {

constexpr int kRankStep = 8;
constexpr int kChunk = 1024;     // inputs summed per partial of a shrink
constexpr int kPlanHeader = 16;  // int32 words
constexpr int64_t kAbsent = -1;  // offset of a tensor that a tenant does not have
constexpr int kMaxSlices = 4;    // of a fused layer
constexpr int kWorkers = 512;    // CTAs of an expand, which the plan shares out among the tiles
constexpr int kTileWeight = 8;   // a tile's share grows with its tenant's rank plus this, for what every tile costs
constexpr int kLinearRows = 24;  // of a linear on CUDA, at most

enum Live : int32_t { kDelta = 1, kShared = 2, kRotated = 4, kStructured = 8 };

// One row of the device table: what a tenant does to one projection. Offsets are bytes into the arena.
struct Entry {
  int64_t a, b, scale, bias, d, e, rotation, meta, structure, tokens;
};
static_assert(sizeof(Entry) % 16 == 0);  // kernels read it in 16-byte words

// What a structured block begins with: its kind and its sizes. From kHadamard on they are made of the base's weight, by
// another op than the rest. Everything after it begins at a multiple of kAlign.
enum Kind : int32_t { kKronecker = 1, kSparse = 2, kMix = 3, kHadamard = 4, kBlockAffine = 5 };
struct alignas(16) Structure {
  int32_t kind;
  union {
    struct {
      int32_t l, p, o, q, r;  // r: 0 where w2 is one matrix
    } kronecker;
    struct {
      int32_t outputs, inputs, values, index_bytes;
    } sparse;
    struct {
      int32_t outputs, group, one_each;  // one_each: one number for both outputs of a pair
    } mix;
    struct {
      int32_t outputs, inputs, rank;  // rank8
    } hadamard;
    struct {
      int32_t outputs, side;  // of the square blocks
    } block_affine;
    int32_t sizes[7];
  };
};
static_assert(sizeof(Structure) == 32);
constexpr int kAlign = 16;
SCUTE_HD inline int64_t aligned(int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }
constexpr int kKroneckerRows = 512, kKroneckerValues = 4096;  // limits of p, and of p * r
constexpr int kBlockAffineInputs = 1024;                      // limit of side

// A tenant's own rows of the vocabulary: this, their token ids in ascending order, the rows.
constexpr int kRows = 4;
struct TokenRows {
  int32_t kind, count, unused[6];
};
static_assert(sizeof(TokenRows) == 32);

SCUTE_HD inline int entry_rank(int64_t meta) { return static_cast<int>(meta & 0xffff); }
SCUTE_HD inline int entry_block(int64_t meta) { return static_cast<int>(meta >> 16 & 0xffff); }
SCUTE_HD inline bool entry_one_block(int64_t meta) { return meta >> 32 & 1; }

// Bytes from the beginning of a block of so many tokens to its rows.
SCUTE_HD inline int64_t token_rows_at(int64_t count) {
  return static_cast<int64_t>(sizeof(TokenRows)) + (count + 3) / 4 * 16;
}

struct Slot {
  int32_t live, shared_set, rank;  // the largest rank8 in any module
};

struct SharedSet {
  int64_t a, b, rank, in, out;
};

// A run of at most `tile_rows` rows of one tenant (or of one shared set). Its workers end where the next tile's begin.
struct Tile {
  int32_t slot, begin, rows, worker;
};

// What one CTA of an expand works on: of a tile's columns, the part from `from` to `to`, in units of 2^-31 of them all.
struct Share {
  int32_t slot, rows;  // rows: the first position in perm, the number of rows << 20, and the sign bit for a shared tile
  uint32_t from, to;
};
constexpr int kMostRows = 1 << 20, kMostTileRows = (1 << 11) - 1;

// Words of a plan's header.
enum Header { kTiles, kSharedTiles, kLiveBits, kWorkersUsed, kLargestRank, kLargestSharedRank };

// View of a plan buffer for at most n rows. Tiles come first: kernels read them whole, and so they stay aligned for any
// n.
struct Plan {
  int32_t* header;
  Tile *tiles, *shared_tiles;
  Share* shares;  // shares_of(n) of them; those not in use have no rows
  int32_t *perm, *shared_perm;
};

SCUTE_HD inline int64_t shares_of(int64_t n) { return n > kWorkers ? n : kWorkers; }
inline int64_t plan_size(int64_t n) { return kPlanHeader + 10 * n + 4 * shares_of(n); }

SCUTE_HD inline Plan plan_view(int32_t* words, int64_t n) {
  Tile* tiles = reinterpret_cast<Tile*>(words + kPlanHeader);
  Share* shares = reinterpret_cast<Share*>(tiles + 2 * n);
  int32_t* perm = reinterpret_cast<int32_t*>(shares + shares_of(n));
  return {words, tiles, tiles + n, shares, perm, perm + n};
}

inline int64_t plan_rows(int64_t words) {
  const int64_t n = (words - plan_size(0)) / 10;
  return n > kWorkers ? (words - kPlanHeader) / 14 : n;
}

// The `index`-th of `count` equal shares of a tile.
SCUTE_HD inline Share share_of(const Tile& tile, bool shared, int index, int count) {
  const auto part = [&](int i) { return static_cast<uint32_t>((static_cast<uint64_t>(i) << 31) / count); };
  return {tile.slot, static_cast<int32_t>(tile.begin | tile.rows << 20 | static_cast<uint32_t>(shared) << 31),
          part(index), part(index + 1)};
}

// Workers of a tile of so much weight: one, and its part of those that are over.
SCUTE_HD inline int tile_workers(int64_t weight, int64_t all_weights, int64_t tiles) {
  const int64_t over = tiles < kWorkers ? kWorkers - tiles : 0;
  return 1 + static_cast<int>(over * weight / all_weights);
}

}  // namespace scute
