"""Tenants with structures, and batches of them, for the tests of ``structured`` and ``reweigh``."""

import torch
from ops_cases import MODULE, Arena, Case, World, activations

from scute_sgl import layout
from scute_sgl.slots import BlockAffine, Hadamard, Kronecker, Mix
from scute_sgl.structured import sparse

def make(kind: str, inputs: int, outputs: int, rank: int, arena: Arena, pick: int):
    """A structure of this size; ``pick`` chooses among the ways to split it."""
    if kind in ("kronecker", "split"):
        l, p = (sorted(d for d in range(1, min(n, 256) + 1) if n % d == 0) for n in (outputs, inputs))
        l, p = l[pick % len(l)], p[(2 * pick + 1) % len(p)]
        w1, o, q = arena.random(l, p), outputs // l, inputs // p
        if kind == "kronecker":
            return Kronecker(w1, arena.random(o, q, std=q**-0.5))
        return Kronecker(w1, arena.random(o, rank), arena.random(rank, q, std=q**-0.5))
    if kind == "hadamard":
        return Hadamard(arena.random(rank, inputs, std=rank**-0.5), arena.random(outputs, rank))
    if kind == "block_affine":
        side = sorted(d for d in range(1, 65) if outputs % d == 0 and inputs % d == 0)[-1 - pick % 2]
        return BlockAffine(arena.random(outputs // side, side, side, std=side**-0.5))
    if kind in ("sparse", "few"):
        n = outputs * inputs // 3 if kind == "sparse" else 3  # of the few, most outputs have none
        places = torch.randperm(outputs * inputs, generator=arena.generator)[:n]
        return sparse(places // inputs, places % inputs, arena.random(n), (outputs, inputs))
    group, count = 2 * (1 + pick % 2) if outputs % 4 == 0 else 2, outputs // (2 if kind == "pairs" else 1)
    return Mix(arena.random(count, std=0.3), arena.random(count), group, kind == "pairs")


def make_world(
    tenants: list[tuple[str, ...]], widths: tuple[int, ...], dtype: torch.dtype, inputs: int, rank: int, device: str
) -> World:
    """Of each tenant what it has in the slices: kinds of :func:`make`, a Hadamard of half the rank ("low"), or nothing."""
    arena = Arena(dtype, torch.Generator().manual_seed(inputs + rank))
    table = torch.full((len(tenants), MODULE + len(widths) + 1, layout.FIELDS), -1, dtype=torch.int64)
    for slot, kinds in enumerate(tenants):
        arena.fill(layout.BLOCK)
        for i, (kind, width) in enumerate(zip(kinds, widths, strict=True)):
            own = max(1, rank // 2) if kind == "low" else rank
            if kind:
                structure = make(kind.replace("low", "hadamard"), inputs, width, own, arena, slot + 2 * i)
                table[slot, MODULE + i, layout.STRUCTURE] = arena.put_structure(structure)
    arena.fill(layout.BLOCK)
    slots = torch.tensor([[layout.STRUCTURED, -1, 0]] * len(tenants), dtype=torch.int32)
    tensors = torch.cat(arena.pieces), table, slots, torch.empty(0, layout.SET_FIELDS, dtype=torch.int64)
    return World(*(tensor.to(device) for tensor in tensors))


def arguments(case: Case, made: World, columns: tuple[int, ...], favourite: int) -> dict:
    """Of a batch in which a skewed popularity prefers that slot. y is wider than its slices."""
    slots = len(made.slots)
    anyone = torch.randint(-1, slots, (case.rows,), generator=torch.Generator().manual_seed(case.rows))
    chosen = {"base": torch.full((case.rows,), -1), "distinct": torch.arange(case.rows) % slots, "uniform": anyone,
              "skewed": torch.where(anyone < 3, favourite, anyone)}  # fmt: skip
    return {
        "x": activations(case, case.inputs, seed=1),
        "row_slot": chosen[case.popularity].to(torch.int32).to(case.device),
        "arena": made.arena,
        "table": made.table,
        "module": MODULE,
        "columns": columns,
        "y": activations(case, columns[-1] + 3, seed=2),
    }
