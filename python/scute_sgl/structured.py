"""Structures, which no low-rank term holds at their own size: what they are as a block of the arena, and back.

A block begins with a header of STRUCTURE_HEADER int32 words; each tensor after it begins at a multiple of ALIGN bytes:

    KRONECKER, l, p, o, q, r   w1 [p][l], then w2 [q][o] and r = 0, or w2_b [q][r] and w2 [r][o]
    SPARSE, out, in, n, bytes  int32 [out + 1] where each row's values begin and end; columns of 2 or 4 bytes [n];
                               values [n]
    MIX, out, group, one_each  f1 - 1, f2: [out], or with one_each [out / 2]
    HADAMARD, out, in, rank8   A and B, packed as those of a low-rank term (layout.py)
    BLOCK_AFFINE, out, r       M, each of its matrices transposed [out / r][r][r]

The last dimension is what neighbouring threads read. Columns have 2 bytes where this rank has up to 65,536 inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from scute_sgl import layout
from scute_sgl.linalg import dense, kronecker_term, product
from scute_sgl.slots import BlockAffine, Hadamard, Kronecker, Mix, Sparse, Structure, Term

OF_WEIGHT = Hadamard, BlockAffine  # S is made of W, which the op reweigh reads


def fits(s: Kronecker) -> bool:
    """Whether the op has room for the product's inner sums."""
    p, r = s.w1.shape[1], 0 if s.w2_b is None else len(s.w2_b)
    return p <= layout.KRONECKER_ROWS and p * r <= layout.KRONECKER_VALUES


def kronecker(first: Term, second: Term) -> Kronecker:
    """kron(B1 A1, B2 A2), the second matrix in two where that has fewer values and the op has room for it."""
    w1, (w2, w2_b) = first.B @ first.A, (second.B, second.A)
    split = Kronecker(w1, w2, w2_b)
    return split if w2.numel() + w2_b.numel() < len(w2) * w2_b.shape[1] and fits(split) else Kronecker(w1, w2 @ w2_b)


def sizes(s: Structure) -> tuple[int, int | None]:
    """Outputs and inputs, None where a structure does not tell."""
    if isinstance(s, Kronecker):
        o, q = s.inner
        return len(s.w1) * o, s.w1.shape[1] * q
    if isinstance(s, Hadamard):
        return len(s.B), s.A.shape[1]
    if isinstance(s, BlockAffine):
        return s.M.shape[0] * s.M.shape[1], None
    return s.shape if isinstance(s, Sparse) else (len(s.f1) * (1 + s.one_each), None)


def sparse(rows: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, int], rounded: bool = False) -> Sparse:
    """With places in any order; values of the same place are added up."""
    places, back = (rows.long() * shape[1] + columns.long()).unique(return_inverse=True)
    sums = torch.zeros(len(places), dtype=values.dtype).index_add_(0, back, values)
    return Sparse(places // shape[1], places % shape[1], sums, shape, rounded)


def folded_structure(s: Structure | None, norm: Tensor | None, weight: Callable[[], Tensor]) -> Structure | None:
    """What the ops need of a rank's part: float32, f1 - 1, inputs times ``norm`` (in,), values as W's dtype leaves them.

    Where a norm cannot be multiplied in, shard.py has made a term of the structure or refused it.
    """
    if isinstance(s, Mix):
        return replace(s, f1=(s.f1.double() - 1).float(), f2=s.f2.float())
    if isinstance(s, Sparse):
        values = _as_rounded(s, weight()) if s.rounded else s.values
        by = None if norm is None else norm[s.columns]
        return replace(s, values=product(values, by).float(), rounded=False)
    if isinstance(s, Hadamard):
        return Hadamard(product(s.A, norm).float(), s.B.float())
    if isinstance(s, BlockAffine):
        return BlockAffine(s.M.float())
    if isinstance(s, Kronecker):
        return replace(s, w1=s.w1.float(), w2=s.w2.float(), w2_b=None if s.w2_b is None else s.w2_b.float())
    return None


def _as_rounded(s: Sparse, W: Tensor) -> Tensor:
    """round(W + value) - W for every value, float32 on the host: W's own dtype decides what is left."""
    base = W[s.rows.to(W.device), s.columns.to(W.device)]
    wide = torch.promote_types(base.dtype, torch.float32)
    moved = (base.to(wide) + s.values.to(W.device, wide)).to(base.dtype)
    return (moved.to(wide) - base.to(wide)).float().cpu()


def as_term(s: Kronecker) -> Term:
    """The product as a low-rank term, far larger."""
    return kronecker_term(dense(s.w1), dense(s.w2) if s.w2_b is None else Term(s.w2_b, s.w2))


def parts(s: Structure) -> dict[str, Tensor]:
    """The tensors of a folded structure's block by name, the header first; numbers in any dtype."""
    if isinstance(s, Kronecker):
        r = 0 if s.w2_b is None else len(s.w2_b)
        header = layout.KRONECKER, *s.w1.shape, *s.inner, r
        found = {"w1": s.w1.T} | ({} if s.w2_b is None else {"w2_b": s.w2_b.T}) | {"w2": s.w2.T}
    elif isinstance(s, Sparse):
        index = torch.uint16 if s.shape[1] <= 1 << 16 else torch.int32
        header = layout.SPARSE, *s.shape, len(s.values), index.itemsize
        ends = torch.searchsorted(s.rows, torch.arange(s.shape[0] + 1)).int()
        found = {"rows": ends, "columns": s.columns.to(index), "values": s.values}
    elif isinstance(s, Hadamard):
        header = layout.HADAMARD, *sizes(s), layout.round_up(len(s.A), layout.RANK_STEP)
        found = {"A": layout.pack_a(s.A), "B": layout.pack_b(s.B)}
    elif isinstance(s, BlockAffine):
        header = layout.BLOCK_AFFINE, sizes(s)[0], s.M.shape[1]
        found = {"M": s.M.transpose(1, 2)}
    else:
        header = layout.MIX, sizes(s)[0], s.group, int(s.one_each)
        found = {"f1": s.f1, "f2": s.f2}
    words = torch.tensor([*header, *[0] * (layout.STRUCTURE_HEADER - len(header))], dtype=torch.int32)
    return {"header": words} | found


def unpack(data: Tensor, offset: int, dtype: torch.dtype) -> Structure:
    """The block at a byte offset of uint8 data, whose numbers are of this dtype: inverse of :func:`parts`."""

    def take(kind: torch.dtype, *shape: int) -> Tensor:
        nonlocal offset
        begin, count = offset, prod(shape) * kind.itemsize
        offset = layout.round_up(begin + count, layout.ALIGN)
        return data[begin : begin + count].view(kind).view(shape)

    kind, *words = take(torch.int32, layout.STRUCTURE_HEADER).tolist()
    if kind == layout.KRONECKER:
        l, p, o, q, r = words[:5]
        w1 = take(dtype, p, l).T
        w2_b = take(dtype, q, r).T if r else None
        return Kronecker(w1, take(dtype, r or q, o).T, w2_b)
    if kind == layout.SPARSE:
        outputs, inputs, n, index_bytes = words[:4]
        counts = take(torch.int32, outputs + 1).long().diff()
        columns = take(torch.uint16 if index_bytes == 2 else torch.int32, n).to(torch.int64)
        rows = torch.arange(outputs, device=data.device).repeat_interleave(counts)
        return Sparse(rows, columns, take(dtype, n), (outputs, inputs))
    if kind == layout.HADAMARD:
        outputs, inputs, rank8 = words[:3]
        A = layout.unpack_a(take(dtype, rank8 // 8, inputs // 8, 8, 8))
        return Hadamard(A, layout.unpack_b(take(dtype, rank8 // 8, outputs, 8)))
    if kind == layout.BLOCK_AFFINE:
        outputs, r = words[:2]
        return BlockAffine(take(dtype, outputs // r, r, r).transpose(1, 2))
    outputs, group, one_each = words[:3]
    return Mix(*(take(dtype, outputs // (1 + one_each)) for _ in range(2)), group, bool(one_each))
