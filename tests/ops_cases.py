"""Inputs of the op tests: a zoo of tenants of one fused layer in an arena, and batches that use them.

Whatever an op must not read is NaN: the gaps of the arena, ranks that v has room for, stale plans. The tests run
on every device that the extension was built for and that is here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor

from scute_sgl import layout, ops, structured
from scute_sgl.structured import Structure

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
DEVICES = ["cpu"] + ["cuda"] * bool(torch.cuda.is_available() and ops.build_info()["cuda_archs"])
WIDTHS = (136, 24, 13)
COLUMNS = (0, 136, 160, 173)
SLICES = len(WIDTHS)
OUT_BEGIN = (3, 0, 50)  # where each slice begins in a shared B: a rank's part of a larger one
IN_BEGIN = 16
MODULE = 2  # modules before and after the layer's belong to nobody
POISON = 0xFF  # four of these are NaN in every serving dtype
NO_PLAN = 2**31 - 1


@dataclass(frozen=True)
class Case:
    inputs: int
    rank: int
    rows: int
    popularity: str
    tile_rows: int = 8
    split: bool = False  # v holds one partial sum a chunk
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    def __str__(self) -> str:
        shape = f"{self.inputs}x{self.rank}x{self.rows}{'-split' * self.split}-tile{self.tile_rows}"
        return f"{self.device}-{str(self.dtype).removeprefix('torch.')}-{shape}-{self.popularity}"

    @property
    def chunks(self) -> int:
        return -(-self.inputs // layout.K_CHUNK) if self.split else 1


SHAPES = (
    Case(8, 1, 1, "distinct"),
    Case(24, 3, 7, "uniform"),
    Case(24, 8, 64, "base"),
    Case(1024, 8, 7, "uniform", split=True),
    Case(1032, 16, 64, "skewed", tile_rows=64, split=True),
    Case(520, 20, 133, "distinct", tile_rows=64),
    Case(1544, 64, 7, "uniform", tile_rows=1),
    Case(1544, 64, 133, "skewed"),
    Case(2056, 512, 7, "distinct", split=True),
)


def cases(*shapes: Case) -> list[Case]:
    """Every shape in every dtype on every device; tiles of one row are for the CPU only."""
    return [
        replace(shape, dtype=dtype, device=device)
        for device, dtype, shape in product(DEVICES, DTYPES, shapes)
        if device == "cpu" or shape.tile_rows > 1
    ]


@dataclass(frozen=True)
class Part:
    """What a tenant does to one slice; a standard deviation of 0 and a size of 0 mean absent."""

    rank: int = 0
    scale: float = 0.0
    bias: float = 0.0
    rotation: int = 0  # block size, 1 for a diagonal
    one_block: bool = False
    shared: bool = False


ABSENT = Part()


def zoo(rank: int) -> list[tuple[Part, Part, Part]]:
    """Tenants of one, several and no kinds of slots, of different ranks, near the identity and far from it.

    None has both a rank of its own and a shared set, and 2 and 6 have the same set.
    """
    low = max(1, rank // 2)
    return [
        (Part(rank), Part(rank), Part(rank)),
        (Part(low, rotation=8), ABSENT, Part(rank, bias=1.0)),
        (Part(scale=0.002, bias=0.01), Part(scale=1.0), Part(shared=True)),
        (Part(shared=True, rotation=1), Part(shared=True), Part(shared=True, rotation=4)),
        (ABSENT, ABSENT, ABSENT),
        (Part(rank, 0.5, 0.5), Part(1, rotation=8, one_block=True), Part(bias=0.1, rotation=2)),
        (Part(scale=0.5, bias=0.5, shared=True), Part(scale=0.1, shared=True), ABSENT),
    ]


@dataclass(frozen=True)
class World:
    arena: Tensor
    table: Tensor
    slots: Tensor
    sets: Tensor


class Arena:
    """Grows by appending tensors, each followed by NaN."""

    def __init__(self, dtype: torch.dtype, generator: torch.Generator):
        self.dtype, self.generator = dtype, generator
        self.pieces: list[Tensor] = []
        self.size = 0

    def fill(self, step: int) -> None:
        """At least one and at most two ``step`` of poison, up to a multiple of it."""
        count = layout.round_up(self.size + 1, step) + step - self.size
        self._append(torch.full((count,), POISON, dtype=torch.uint8))

    def put(self, tensor: Tensor) -> int:
        self.fill(layout.ALIGN)
        offset = self.size
        self._append(tensor.to(self.dtype).contiguous().flatten().view(torch.uint8))
        return offset

    def put_structure(self, structure: Structure) -> int:
        """Its block, as image.py lays it out, with NaN between its tensors."""
        self.fill(layout.ALIGN)
        offset = self.size
        for part in structured.parts(structure).values():
            part = part.to(self.dtype) if part.is_floating_point() else part
            self._append(part.contiguous().flatten().view(torch.uint8))
            self._append(torch.full((-self.size % layout.ALIGN,), POISON, dtype=torch.uint8))
        return offset

    def random(self, *shape: int, std: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=self.generator) * std

    def _append(self, piece: Tensor) -> None:
        self.pieces.append(piece)
        self.size += piece.numel()


def world_of(case: Case) -> World:
    return world(case.dtype, case.inputs, case.rank, case.device)


@lru_cache(maxsize=2)
def world(dtype: torch.dtype, inputs: int, rank: int, device: str) -> World:
    """The zoo in an arena, with two shared sets of different ranks."""
    arena = Arena(dtype, torch.Generator().manual_seed(inputs + rank))
    sets = [_put_set(arena, set_rank, inputs + IN_BEGIN + 8) for set_rank in (rank, max(1, rank // 2))]
    tenants = zoo(rank)
    table = torch.full((len(tenants), MODULE + SLICES + 1, layout.FIELDS), -1, dtype=torch.int64)
    slots = torch.zeros(len(tenants), layout.SLOT_FIELDS, dtype=torch.int32)
    for slot, parts in enumerate(tenants):
        arena.fill(layout.BLOCK)
        shared_set = slot % len(sets)
        set_rank = sets[shared_set][layout.SET_RANK]
        slots[slot] = torch.tensor([_live(parts), shared_set, max(_rank(part, set_rank) for part in parts)])
        for i, part in enumerate(parts):
            table[slot, MODULE + i] = _put_part(arena, part, inputs, WIDTHS[i], set_rank)
    arena.fill(layout.BLOCK)
    tensors = torch.cat(arena.pieces), table, slots, torch.tensor(sets)
    return World(*(tensor.to(device) for tensor in tensors))


def _live(parts: tuple[Part, ...]) -> int:
    delta = any(part.rank or part.scale or part.bias for part in parts)
    shared, rotated = any(part.shared for part in parts), any(part.rotation for part in parts)
    return delta * layout.DELTA | shared * layout.SHARED | rotated * layout.ROTATED


def _rank(part: Part, set_rank: int) -> int:
    return set_rank if part.shared else layout.round_up(part.rank, layout.RANK_STEP)


def _put_set(arena: Arena, rank: int, inputs: int) -> list[int]:
    outputs = max(map(sum, zip(OUT_BEGIN, WIDTHS))) + 5
    A = arena.put(layout.pack_a(arena.random(rank, inputs, std=inputs**-0.5)))
    B = arena.put(layout.pack_b(arena.random(outputs, rank)))
    return [A, B, layout.round_up(rank, layout.RANK_STEP), inputs, outputs]


def _put_part(arena: Arena, part: Part, inputs: int, outputs: int, set_rank: int) -> Tensor:
    fields = torch.full((layout.FIELDS,), -1, dtype=torch.int64)
    if part.rank:
        fields[layout.A] = arena.put(layout.pack_a(arena.random(part.rank, inputs, std=inputs**-0.5)))
        fields[layout.B] = arena.put(layout.pack_b(arena.random(outputs, part.rank)))
    if part.scale:
        fields[layout.SCALE] = arena.put(arena.random(outputs, std=part.scale))
    if part.bias:
        fields[layout.BIAS] = arena.put(arena.random(outputs, std=part.bias))
    if part.shared:
        fields[layout.D] = arena.put(arena.random(set_rank))
        fields[layout.E] = arena.put(arena.random(outputs))
    if part.rotation:
        blocks = 1 if part.one_block else inputs // part.rotation
        fields[layout.ROTATION] = arena.put(arena.random(blocks, part.rotation, part.rotation, std=0.1))
    rank8 = layout.round_up(part.rank, layout.RANK_STEP)
    fields[layout.META] = layout.pack_meta(rank8, part.rotation, part.one_block)
    return fields


def row_slots(case: Case) -> Tensor:
    """int32 (rows,): which tenant each row belongs to."""
    slots = len(zoo(1))
    generator = torch.Generator().manual_seed(case.rows)
    anyone = torch.randint(-1, slots, (case.rows,), generator=generator)
    popular = 5 + torch.arange(case.rows) % 2  # one with factors of its own, one with shared ones
    chosen = {
        "base": torch.full((case.rows,), -1),
        "one": torch.full((case.rows,), 5),
        "distinct": torch.arange(case.rows) % slots,
        "uniform": anyone,
        "skewed": torch.where(torch.rand(case.rows, generator=generator) < 0.8, popular, anyone),
    }[case.popularity]
    return chosen.to(torch.int32).to(case.device)


def make_plan(row_slot: Tensor, slots: Tensor, tile_rows: int) -> Tensor:
    plan = torch.full((layout.plan_size(len(row_slot)),), NO_PLAN, dtype=torch.int32, device=row_slot.device)
    ops.plan(row_slot, slots, tile_rows, plan)
    return plan


def partials(case: Case, slices: int) -> Tensor:
    """v for this case: NaN, with room for more ranks and rows than needed."""
    stride = layout.round_up(case.rank, layout.RANK_STEP) + layout.RANK_STEP
    return torch.full((case.chunks, case.rows + 3, slices * stride), torch.nan, device=case.device)


def activations(case: Case, width: int, seed: int) -> Tensor:
    """(rows, width), the rows further apart than they are long."""
    wide = torch.randn(case.rows, width + 24, generator=torch.Generator().manual_seed(seed))
    return wide.to(case.dtype).to(case.device)[:, 8 : 8 + width]


def shrink_arguments(case: Case) -> dict:
    zoo, row_slot = world_of(case), row_slots(case)
    return {
        "x": activations(case, case.inputs, seed=1),
        "arena": zoo.arena,
        "table": zoo.table,
        "plan": make_plan(row_slot, zoo.slots, case.tile_rows),
        "tile_rows": case.tile_rows,
        "module": MODULE,
        "slices": SLICES,
        "v": partials(case, SLICES),
    }
