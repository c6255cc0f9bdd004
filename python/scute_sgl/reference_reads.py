"""What the ops read, unpacked in plain torch and float64: tiles of a plan, entries of a table, tensors of an arena.

reference.py computes with it; csrc/ reads the same bytes as they lie.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from math import prod

import torch
from torch import Tensor

from scute_sgl import layout
from scute_sgl.slots import Hadamard, Kronecker, Sparse, Structure
from scute_sgl.structured import unpack


class Entry:
    """What one slot does to one module: its tensors, unpacked from the arena, in float64."""

    def __init__(self, arena: Tensor, table: Tensor, dtype: torch.dtype, slot: int, module: int):
        self.arena, self.dtype, self.fields = arena, dtype, table[slot, module].tolist()
        meta = self.fields[layout.META]
        self.rank8, self.rotation_block, self.one_block = meta & 0xFFFF, meta >> 16 & 0xFFFF, bool(meta >> 32 & 1)

    def has(self, field: int) -> bool:
        return self.fields[field] >= 0

    def read(self, field: int, *shape: int) -> Tensor:
        return read(self.arena, self.dtype, self.fields[field], *shape)

    def structure(self) -> Structure | None:
        """In the serving dtype."""
        offset = self.fields[layout.STRUCTURE]
        return None if offset < 0 else unpack(self.arena, offset, self.dtype)

    def a(self, inputs: int) -> Tensor:
        return layout.unpack_a(self.read(layout.A, self.rank8 // 8, inputs // 8, 8, 8))

    def b(self, outputs: int) -> Tensor:
        return layout.unpack_b(self.read(layout.B, self.rank8 // 8, outputs, 8))

    def tokens(self, width: int) -> tuple[Tensor, Tensor]:
        """Its own tokens, and their rows."""
        ids, rows = layout.unpack_rows(self.arena, self.fields[layout.TOKENS], width, self.dtype)
        return ids, rows.double()


def read(arena: Tensor, dtype: torch.dtype, offset: int, *shape: int) -> Tensor:
    """The tensor at a byte offset of the arena, in float64."""
    return arena[offset : offset + prod(shape) * dtype.itemsize].view(dtype).view(shape).double()


def shared_set(arena: Tensor, sets: Tensor, dtype: torch.dtype, index: int) -> tuple[Tensor, Tensor]:
    """A (rank8, in) and B (out, rank8) of a shared set, in float64."""
    a, b, rank8, inputs, outputs = sets[index].tolist()
    A = read(arena, dtype, a, rank8 // 8, inputs // 8, 8, 8)
    B = read(arena, dtype, b, rank8 // 8, outputs, 8)
    return layout.unpack_a(A), layout.unpack_b(B)


def tenants(plan: Tensor, shared: bool = False) -> Iterator[tuple[int, Tensor]]:
    """(slot, rows) of every private tile, or (shared set, rows) of every shared one."""
    n = layout.plan_rows(len(plan))
    tiles = plan[layout.PLAN_HEADER + 4 * n * shared :][: 4 * n]
    perm = plan[len(plan) - 2 * n + n * shared :][:n]
    for key, begin, rows, _ in tiles.view(n, 4)[: plan[int(shared)]].tolist():
        yield key, perm[begin : begin + rows].long()


def of_weight(s: Structure, W: Tensor) -> Tensor:
    """S (out, in) in float64."""
    if isinstance(s, Hadamard):
        return W * (s.B.double() @ s.A.double())
    M, r = s.M.double(), s.M.shape[1]
    tiles = W.view(len(M), r, -1, r)  # [block of outputs, output, block of inputs, input]
    return (torch.einsum("konq,kqi->koni", tiles, M) + M[:, :, None]).reshape(W.shape)


def matrices(s: Structure, outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    """What a packed structure does: M (out, out) and S (out, in) in float64, y' = M y + S x."""
    numbers = {f.name: v.double() for f in fields(s) if isinstance(v := getattr(s, f.name), Tensor)}
    device = next(iter(numbers.values())).device
    M, S = torch.eye(outputs, device=device).double(), torch.zeros(outputs, inputs, device=device).double()
    if isinstance(s, Kronecker):
        w2 = numbers["w2"] if s.w2_b is None else numbers["w2"] @ numbers["w2_b"]
        return M, torch.einsum("lp,oq->lopq", numbers["w1"], w2).reshape(outputs, inputs)
    if isinstance(s, Sparse):
        return M, S.index_put_((s.rows, s.columns), numbers["values"])
    half, each = s.group // 2, 1 + s.one_each
    first = torch.arange(outputs, device=device).view(-1, 2, half)[:, 0].flatten()
    f1, f2 = (numbers[name].view(-1, half).repeat_interleave(each, 0).flatten() for name in ("f1", "f2"))
    M.diagonal().add_(f1)
    M[first, first + half], M[first + half, first] = -f2[first], f2[first + half]
    return M, S
