"""The ops in plain torch and float64: the definition of what ``csrc/`` computes.

Each function takes the arguments of the op of its name. Instead of writing to the last one or two, it returns
what they become, in float64 and unrounded; ``plan`` is integer and returns the plan itself. reference_reads.py holds
what they read.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from scute_sgl import layout
from scute_sgl.reference_reads import Entry, matrices, of_weight, shared_set, tenants
from scute_sgl.structured import OF_WEIGHT


def plan(row_slot: Tensor, slots: Tensor, tile_rows: int, plan: Tensor) -> Tensor:
    plan, tenants = plan.clone(), slots.tolist()
    lists, bits = ([], []), 0  # (slot or shared set, row, rank)
    for row, slot in enumerate(row_slot.tolist()):
        if slot < 0:
            continue
        live, shared_set, rank = tenants[slot]
        bits |= live
        if live & layout.SHARED:
            lists[1].append((shared_set, row, rank))
        elif live & layout.DELTA:
            lists[0].append((slot, row, rank))

    n, tiles, weights = len(row_slot), ([], []), []
    for i, keyed_rows in enumerate(lists):
        keyed_rows.sort()
        for position, (key, _, _) in enumerate(keyed_rows):
            if not tiles[i] or tiles[i][-1][0] != key or tiles[i][-1][2] == tile_rows:
                tiles[i].append([key, position, 0, 0])
                weights.append(layout.TILE_WEIGHT + max(rank for other, _, rank in keyed_rows if other == key))
            tiles[i][-1][2] += 1
    shares, over = [], max(0, layout.WORKERS - len(weights))
    for t, (tile, weight) in enumerate(zip(tiles[0] + tiles[1], weights, strict=True)):
        slot, begin, rows, tile[3] = *tile[:3], len(shares)
        where = begin | rows << 20 | (-1 << 31 if t >= len(tiles[0]) else 0)
        workers = 1 + over * weight // sum(weights)
        parts = [(i << 31) // workers for i in range(workers)] + [-1 << 31]  # 2**31 as an int32
        shares += [[slot, where, *pair] for pair in pairwise(parts)]

    ranks = [max((rank for _, _, rank in keyed_rows), default=0) for keyed_rows in lists]
    _put(plan, 0, [len(tiles[0]), len(tiles[1]), bits, len(shares), *ranks])
    after = layout.PLAN_HEADER + 8 * n
    _put(plan, after, sum(shares + [[0] * 4] * (max(n, layout.WORKERS) - len(shares)), []))
    for i in range(2):
        _put(plan, layout.PLAN_HEADER + 4 * n * i, sum(tiles[i], []))
        _put(plan, after + 4 * max(n, layout.WORKERS) + n * i, [row for _, row, _ in lists[i]])
    return plan


def shrink(
    x: Tensor, arena: Tensor, table: Tensor, plan: Tensor, tile_rows: int, module: int, slices: int, v: Tensor
) -> Tensor:
    v, stride = v.double(), v.shape[2] // slices
    for slot, rows in tenants(plan):
        for i in range(slices):
            entry = Entry(arena, table, x.dtype, slot, module + i)
            if entry.has(layout.A):
                _put_partials(v[:, :, i * stride :], rows, x[rows].double(), entry.a(x.shape[1]))
    return v


def lookup(
    ids: Tensor,
    arena: Tensor,
    table: Tensor,
    plan: Tensor,
    tile_rows: int,
    module: int,
    first_id: int,
    held_ids: int,
    dtype: torch.dtype,
    v: Tensor,
) -> Tensor:
    v = v.double()
    for slot, rows in tenants(plan):
        entry = Entry(arena, table, dtype, slot, module)
        if entry.has(layout.A):
            A = entry.read(layout.A, held_ids, entry.rank8)
            for row in rows.tolist():
                held = 0 <= ids[row] - first_id < held_ids
                v[0, row, : entry.rank8] = A[ids[row] - first_id] if held else 0
    return v


def project(
    x: Tensor,
    row_slot: Tensor,
    arena: Tensor,
    table: Tensor,
    sets: Tensor,
    plan: Tensor,
    tile_rows: int,
    module: int,
    slices: int,
    in_begin: int,
    v: Tensor,
) -> Tensor:
    v = v.double()
    for set_index, rows in tenants(plan, shared=True):
        A = shared_set(arena, sets, x.dtype, set_index)[0][:, in_begin : in_begin + x.shape[1]]
        for row in rows.tolist():
            parts = [Entry(arena, table, x.dtype, int(row_slot[row]), module + i) for i in range(slices)]
            if any(entry.has(layout.D) for entry in parts):
                v[0, row, : len(A)] = A @ x[row].double()
    return v


def expand(
    v: Tensor | None,
    shared_v: Tensor | None,
    row_slot: Tensor,
    arena: Tensor,
    table: Tensor,
    sets: Tensor,
    plan: Tensor,
    tile_rows: int,
    module: int,
    columns: Sequence[int],
    out_begin: Sequence[int],
    y: Tensor,
) -> Tensor:
    return _expand(y.double(), y.dtype, v, shared_v, row_slot, arena, table, sets, plan, module, columns, out_begin)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, v: Tensor | None, shared_v: Tensor | None, row_slot: Tensor,
    arena: Tensor, table: Tensor, slots: Tensor, sets: Tensor, module: int, columns: Sequence[int],
    out_begin: Sequence[int], y: Tensor,
) -> Tensor:
    own = x.double().expand(len(columns) - 1, -1, -1)
    z = [own[i] @ weight[begin:end].double().T for i, (begin, end) in enumerate(pairwise(columns))]
    z = torch.cat(z, 1) + (0.0 if bias is None else bias.double())
    listed = plan(row_slot, slots, 1, row_slot.new_zeros(layout.plan_size(len(row_slot))))
    return _expand(z, x.dtype, v, shared_v, row_slot, arena, table, sets, listed, module, columns, out_begin)


def _expand(
    y: Tensor, dtype: torch.dtype, v: Tensor | None, shared_v: Tensor | None, row_slot: Tensor, arena: Tensor,
    table: Tensor, sets: Tensor, plan: Tensor, module: int, columns: Sequence[int], out_begin: Sequence[int],
) -> Tensor:
    """Of a y in float64 and an arena in ``dtype``."""

    def update(rows: Tensor, entry: Entry, begin: int, end: int, delta: Tensor | float) -> None:
        part = total = y[rows, begin:end]
        if entry.has(layout.SCALE):
            total = total + part * entry.read(layout.SCALE, end - begin)
        if entry.has(layout.BIAS):
            total = total + entry.read(layout.BIAS, end - begin)
        y[rows, begin:end] = total + delta

    for slot, rows in tenants(plan) if v is not None else ():
        stride = v.shape[2] // (len(columns) - 1)
        for i, (begin, end) in enumerate(zip(columns, columns[1:])):
            entry, delta = Entry(arena, table, dtype, slot, module + i), 0.0
            if entry.has(layout.B):
                u = v[:, rows, i * stride : i * stride + entry.rank8].double().sum(0)
                delta = u @ entry.b(end - begin).T
            update(rows, entry, begin, end, delta)

    for set_index, rows in tenants(plan, shared=True) if shared_v is not None else ():
        A, B = shared_set(arena, sets, dtype, set_index)
        for row in rows:
            for i, (begin, end, first) in enumerate(zip(columns, columns[1:], out_begin)):
                entry, delta = Entry(arena, table, dtype, int(row_slot[row]), module + i), 0.0
                if entry.has(layout.D):
                    d, e = entry.read(layout.D, len(A)), entry.read(layout.E, end - begin)
                    delta = e * (B[first : first + end - begin] @ (d * shared_v[0, row, : len(A)].double()))
                update(row, entry, begin, end, delta)
    return y


def rotate(
    x: Tensor, row_slot: Tensor, arena: Tensor, table: Tensor, module: int, slices: int, out: Tensor
) -> Tensor:
    out = x.double().repeat(slices, 1, 1)
    for row, slot in enumerate(row_slot.tolist()):
        for i in range(slices):
            if slot >= 0 and (entry := Entry(arena, table, x.dtype, slot, module + i)).has(layout.ROTATION):
                size = entry.rotation_block
                blocks = entry.read(layout.ROTATION, 1 if entry.one_block else x.shape[1] // size, size, size)
                out[i, row] += (x[row].double().view(-1, 1, size) @ blocks).flatten()
    return out


def structured(
    x: Tensor, row_slot: Tensor, arena: Tensor, table: Tensor, module: int, columns: Sequence[int], y: Tensor
) -> Tensor:
    dtype, y = y.dtype, y.double()
    for slot in row_slot[row_slot >= 0].unique().tolist():
        rows = (row_slot == slot).nonzero().flatten()
        for i, (begin, end) in enumerate(pairwise(columns)):
            s = Entry(arena, table, dtype, slot, module + i).structure()
            if s is not None and not isinstance(s, OF_WEIGHT):
                M, S = matrices(s, end - begin, x.shape[1])
                y[rows, begin:end] = y[rows, begin:end] @ M.T + x[rows].double() @ S.T
    return y


def reweigh(
    x: Tensor, weight: Tensor, row_slot: Tensor, arena: Tensor, table: Tensor, module: int, columns: Sequence[int],
    y: Tensor,
) -> Tensor:
    dtype, y = y.dtype, y.double()
    for slot in row_slot[row_slot >= 0].unique().tolist():
        rows = (row_slot == slot).nonzero().flatten()
        for i, (begin, end) in enumerate(pairwise(columns)):
            if isinstance(s := Entry(arena, table, dtype, slot, module + i).structure(), OF_WEIGHT):
                y[rows, begin:end] += x[rows].double() @ of_weight(s, weight[begin:end].double()).T
    return y


def token_rows(ids: Tensor, row_slot: Tensor, arena: Tensor, table: Tensor, module: int, y: Tensor) -> Tensor:
    dtype, y = y.dtype, y.double()
    for row, slot in enumerate(row_slot.tolist()):
        if slot >= 0 and (entry := Entry(arena, table, dtype, slot, module)).has(layout.TOKENS):
            own, rows = entry.tokens(y.shape[1])
            if ids[row] in own:
                y[row] = rows[own == ids[row]]
    return y


def token_logits(x: Tensor, row_slot: Tensor, arena: Tensor, table: Tensor, module: int, y: Tensor) -> Tensor:
    y = y.double()
    for row, slot in enumerate(row_slot.tolist()):
        if slot >= 0 and (entry := Entry(arena, table, x.dtype, slot, module)).has(layout.TOKENS):
            own, rows = entry.tokens(x.shape[1])
            y[row, own.long()] = rows @ x[row].double()
    return y


def _put(plan: Tensor, begin: int, values: list[int]) -> None:
    plan[begin : begin + len(values)] = torch.tensor(values, dtype=plan.dtype)


def _put_partials(v: Tensor, rows: Tensor, x: Tensor, A: Tensor) -> None:
    """v[c, rows, :rank] = the c-th chunk's part of x A^T, or all of it when v has one chunk."""
    chunk = layout.K_CHUNK if len(v) > 1 else x.shape[1]
    for c, (x_part, A_part) in enumerate(zip(x.split(chunk, 1), A.split(chunk, 1))):
        v[c, rows, : len(A)] = x_part @ A_part.T
