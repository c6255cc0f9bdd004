"""The memory layout that host code, CPU ops and CUDA ops agree on; csrc/layout.h says the same in C++.

Arena: one flat uint8 tensor on the serving device. A tenant owns one block of it, aligned to BLOCK bytes;
inside a block every tensor is aligned to ALIGN bytes and stored in the serving dtype:

    A        [rank8 / 8][in / 8][8 ranks][8 inputs]   ("core matrices": 8 x 8, inputs innermost)
    A of an embedding   [vocabulary][rank8]
    B        [rank8 / 8][out][8 ranks]
    scale, bias, d, e, diagonal R     plain vectors (d padded to rank8)
    rotation [in / b or 1][b][b]
    structure: STRUCTURE_HEADER int32 words, a kind and its sizes, then the kind's own tensors (structured.py)
    tokens: ROWS_HEADER int32 words, ROWS and the number n of tokens; n ids in ascending order, int32, of those that
            this rank holds; at the next multiple of ALIGN the rows [n][width]

rank8 is the rank rounded up to a multiple of 8, the tail filled with zeros.

Device table: int64 [slots][modules][FIELDS]: byte offsets into the arena (-1: absent) and one packed word, META.
Slot table: int32 [slots][SLOT_FIELDS]. Shared sets: int64 [sets][SET_FIELDS].
Plan: int32 buffer for at most n rows, see ``plan_size``; written by ``scute::plan``.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256
ALIGN = 16
RANK_STEP = 8
K_CHUNK = 1024  # a shrink sums its inputs in chunks of this many, in order, in every batch

# table[slot][module][...]
A, B, SCALE, BIAS, D, E, ROTATION, META, STRUCTURE, TOKENS = range(10)
FIELDS = 10  # kernels read an entry in 16-byte words, so their number is even
# META = rank8 | rotation block size << 16 (0: none, 1: diagonal) | one block serves all << 32

# the first word of a block of own rows
ROWS, ROWS_HEADER = 4, 8

# slot table[slot][...]
LIVE, SHARED_SET, RANK = range(3)  # RANK: the largest rank8 in any module
SLOT_FIELDS = 3
# bits of LIVE: which ops have work for this tenant
DELTA, SHARED, ROTATED, STRUCTURED = 1, 2, 4, 8

# the first word of a structured block
KRONECKER, SPARSE, MIX, HADAMARD, BLOCK_AFFINE = range(1, 6)
STRUCTURE_HEADER = 8
# A Kronecker product's inner sums lie in a CTA's shared memory: limits of p, and of p * r
KRONECKER_ROWS, KRONECKER_VALUES = 512, 4096
BLOCK_AFFINE_INPUTS = 1024  # and so does a block's transformed input

# sets[set][...]: byte offsets of A [rank8/8][in/8][8][8] and B [rank8/8][out][8], and their sizes
SET_A, SET_B, SET_RANK, SET_IN, SET_OUT = range(5)
SET_FIELDS = 5

# plan buffer: header, then for n rows: tiles[n][4], shared_tiles[n][4], shares[max(n, WORKERS)][4], perm[n], shared_perm[n]
# header: tiles in use, shared tiles in use, union of LIVE bits, workers in use, largest RANK of private and of shared tiles
# tile: slot (or shared set), first position in perm (or shared_perm), rows, first of the workers it shares with no other
# share, of one worker: slot (or shared set), first position | rows << 20 | shared << 31, first and last part of the columns
# in units of 2**-31; all zeros: no work
PLAN_HEADER = 16
# Workers are shared out by weight, RANK + TILE_WEIGHT: each tile has one and its part of those that are over.
WORKERS, TILE_WEIGHT = 512, 8

LINEAR_ROWS = 24  # that the op linear takes on CUDA


def linear_fits(rows: int, room: int) -> bool:
    """Whether linear is to take so many rows with ``room`` columns of v a slice, which leave it memory to be fast."""
    return rows <= LINEAR_ROWS and rows * room <= LINEAR_ROWS * 512


def plan_size(rows: int) -> int:
    """int32 words of a plan for at most ``rows`` rows."""
    return PLAN_HEADER + 10 * rows + 4 * max(rows, WORKERS)


def plan_rows(words: int) -> int:
    """Inverse of :func:`plan_size`."""
    rows = (words - plan_size(0)) // 10
    return rows if rows <= WORKERS else (words - PLAN_HEADER) // 14


def pack_meta(rank8: int, rotation_block: int = 0, one_block: bool = False) -> int:
    return rank8 | rotation_block << 16 | int(one_block) << 32


def round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def pack_a(A: Tensor) -> Tensor:
    """(rank, in) -> [rank8 / 8][in / 8][8][8], contiguous. ``in`` must be a multiple of 8."""
    rank, width = A.shape
    if width % 8:
        raise ValueError(f"A has {width} inputs; the layout needs a multiple of 8")
    A = torch.nn.functional.pad(A, (0, 0, 0, round_up(rank, RANK_STEP) - rank))
    return A.view(-1, RANK_STEP, width // 8, 8).permute(0, 2, 1, 3).contiguous()


def unpack_a(packed: Tensor) -> Tensor:
    """Inverse of :func:`pack_a`: (rank8, in)."""
    return packed.permute(0, 2, 1, 3).reshape(packed.shape[0] * RANK_STEP, -1)


def pack_embedding_a(A: Tensor) -> Tensor:
    """(rank, vocabulary) -> [vocabulary][rank8], contiguous."""
    return torch.nn.functional.pad(A, (0, 0, 0, round_up(A.shape[0], RANK_STEP) - A.shape[0])).T.contiguous()


def pack_b(B: Tensor) -> Tensor:
    """(out, rank) -> [rank8 / 8][out][8], contiguous."""
    out, rank = B.shape
    B = torch.nn.functional.pad(B, (0, round_up(rank, RANK_STEP) - rank))
    return B.view(out, -1, RANK_STEP).permute(1, 0, 2).contiguous()


def unpack_b(packed: Tensor) -> Tensor:
    """Inverse of :func:`pack_b`: (out, rank8)."""
    return packed.permute(1, 0, 2).reshape(packed.shape[1], -1)


def pack_rows(ids: Tensor, rows: Tensor) -> Tensor:
    """Ascending ids (n,) and rows (n, width) -> their block, uint8."""
    head = torch.zeros(ROWS_HEADER + round_up(len(ids), 4), dtype=torch.int32)
    head[:2] = torch.tensor([ROWS, len(ids)])
    head[ROWS_HEADER : ROWS_HEADER + len(ids)] = ids
    return torch.cat([head.view(torch.uint8), rows.contiguous().view(torch.uint8).flatten()])


def unpack_rows(data: Tensor, offset: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Inverse of :func:`pack_rows` for the block at a byte offset: views, ids int32 (n,) and rows (n, width)."""
    begin = offset + 4 * ROWS_HEADER
    kind, count = data[offset:begin].view(torch.int32)[:2].tolist()
    if kind != ROWS:
        raise ValueError(f"a block of kind {kind}; want {ROWS}")
    ids = data[begin : begin + 4 * count].view(torch.int32)
    begin += 4 * round_up(count, 4)
    return ids, data[begin : begin + count * width * dtype.itemsize].view(dtype).view(count, width)
