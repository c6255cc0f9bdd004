"""Tenants, batches and checks of the GPU's own op tests: too large for the CPU's, with the oracle on the GPU."""

from itertools import accumulate

import torch
from ops_cases import Arena, make_plan
from ops_checks import FLOAT32_SUM, same_bits, signless, ulp
from structured_cases import make

from scute_sgl import layout, ops, reference

WIDTHS = (1160, 264, 72)
COLUMNS = (0, 1160, 1424, 1496)
OUT_BEGIN = (8, 0, 100)
ROTATIONS = [(32, False), (64, False), (1, False), (32, True), (None, False), (8, False)]


class World:
    """Tenants of one fused layer, of the ``kinds``: lora with rank ``ranks[slot % len]`` or vera, and oft besides.

    Of both lora and vera, even slots have the one and odd slots the other; either has scale and bias too. Some have
    structures besides, if those are among the kinds.
    """

    def __init__(self, dtype, inputs, ranks, tenants, kinds="lora", set_rank=48, seed=0, widths=WIDTHS, out_begin=OUT_BEGIN):
        arena = Arena(dtype, torch.Generator().manual_seed(seed))
        self.dtype, self.inputs, self.rank = dtype, inputs, max(*ranks, set_rank)
        self.columns, self.out_begin = (0, *accumulate(widths)), out_begin
        table = torch.full((tenants, len(widths), layout.FIELDS), -1, dtype=torch.int64)
        set_out = max(map(sum, zip(widths, out_begin)))
        sets = []
        for _ in range(2):
            A = arena.put(layout.pack_a(arena.random(set_rank, inputs + 16, std=inputs**-0.5)))
            B = arena.put(layout.pack_b(arena.random(set_out, set_rank)))
            sets.append([A, B, layout.round_up(set_rank, 8), inputs + 16, set_out])
        slots = []
        for slot in range(tenants):
            shared = "vera" in kinds and ("lora" not in kinds or slot % 2 == 1)
            own = "lora" in kinds and not shared
            rank = ranks[slot % len(ranks)] if own else 0
            live = layout.DELTA * (own or shared) | layout.SHARED * shared | layout.ROTATED * ("oft" in kinds)
            live |= layout.STRUCTURED * ("structured" in kinds)
            slots.append([live, slot // 2 % 2, layout.round_up(set_rank if shared else rank, 8)])
            for i, width in enumerate(widths):
                entry, block, one = table[slot, i], 0, False
                if rank:
                    entry[layout.A] = arena.put(layout.pack_a(arena.random(rank, inputs, std=inputs**-0.5)))
                    entry[layout.B] = arena.put(layout.pack_b(arena.random(width, rank)))
                if live & layout.DELTA and slot % 3 != 1:
                    entry[layout.SCALE] = arena.put(arena.random(width, std=0.1))
                if live & layout.DELTA and slot % 3 != 2:
                    entry[layout.BIAS] = arena.put(arena.random(width))
                if shared and (slot // 2 + i) % 4:
                    entry[layout.D] = arena.put(arena.random(layout.round_up(set_rank, 8)))
                    entry[layout.E] = arena.put(arena.random(width))
                if "oft" in kinds and slot % 5:
                    block, one = ROTATIONS[(slot + i) % len(ROTATIONS)]
                    block = block or inputs
                    blocks = 1 if one else inputs // block
                    entry[layout.ROTATION] = arena.put(arena.random(blocks, block, block, std=0.1))
                if "structured" in kinds and slot % 4:
                    kind = ("kronecker", "split", "sparse", "mix", "pairs", "few", "hadamard", "block_affine")[(slot + i) % 8]
                    made = make(kind, inputs, width, 1 + slot % 7, arena, slot + i)
                    entry[layout.STRUCTURE] = arena.put_structure(made)
                entry[layout.META] = layout.pack_meta(layout.round_up(rank, 8), block, one)
        arena.fill(layout.BLOCK)
        self.arena, self.table, self.sets = torch.cat(arena.pieces).cuda(), table.cuda(), torch.tensor(sets).cuda()
        self.slots = torch.tensor(slots, dtype=torch.int32).cuda()

    def tensor(self, rows, width, seed):
        values = torch.randn(rows, width + 24, generator=torch.Generator().manual_seed(seed))
        return values.to(self.dtype).cuda()[:, 8 : 8 + width]

    def partials(self, rows, slices, split):
        chunks = -(-self.inputs // layout.K_CHUNK) if split else 1
        stride = layout.round_up(self.rank, 8) + 8
        return torch.full((chunks, rows + 3, slices * stride), torch.nan, device="cuda")


def rows_of(popularity, rows, tenants):
    generator = torch.Generator().manual_seed(rows)
    anyone = torch.randint(-1, tenants, (rows,), generator=generator)
    chosen = {
        "distinct": torch.arange(rows) % tenants,
        "uniform": anyone,
        "skewed": torch.where(torch.rand(rows, generator=generator) < 0.8, min(1, tenants - 1), anyone),
    }
    return chosen[popularity].int().cuda()


def check(got, want, terms, dtype):
    got, want, terms = got.double(), want.double(), terms.double()
    blank = want.isnan()
    assert got[blank].isnan().all(), "written where nothing was to be written"
    excess = ((got - want).abs().cpu() / (ulp(want.cpu(), dtype) + 2 * FLOAT32_SUM * terms.cpu()))[~blank.cpu()]
    assert not excess.isnan().any(), f"{int(excess.isnan().sum())} of {excess.numel()} values are NaN"
    wrong = int((excess > 1).sum())
    assert wrong == 0, f"{wrong} of {excess.numel()} values off, the worst {excess.max():.3g} times the error allowed"


def oracle(function, given, dtype):
    """As in ops_checks, on the GPU."""
    return function(**given), function(**signless(given, dtype))


def check_replays(step, change, turns, results, buffers=(), written=()):
    """A graph of ``step`` gives the bits of ``step`` itself after every ``change(turn)``, which puts a batch in place.

    ``buffers`` are NaN before each run; ``written``: results in which every number is written.
    """
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for turn in range(turns):
        change(turn)
        found = []
        for run in (graph.replay, step):
            for buffer in buffers:
                buffer.fill_(torch.nan)
            run()
            found.append([result.clone() for result in results])
        assert all(map(same_bits, *found)), f"replay {turn}"
        assert not any(result.isnan().any() for result in written)


def tiles(world, row_slot, tile_rows):
    plan = make_plan(row_slot, world.slots, tile_rows)
    return {"arena": world.arena, "table": world.table, "plan": plan, "tile_rows": tile_rows, "module": 0}


def expand_arguments(world, row_slot, tile_rows, y, v=None, shared_v=None):
    return tiles(world, row_slot, tile_rows) | {
        "v": v, "shared_v": shared_v, "row_slot": row_slot, "sets": world.sets, "columns": COLUMNS,
        "out_begin": OUT_BEGIN, "y": y,
    }  # fmt: skip


def check_shrink_and_expand(world, row_slot, tile_rows, split, y):
    """Both ops against the reference, the second on the first one's sums."""
    rows, dtype = len(row_slot), world.dtype
    given = tiles(world, row_slot, tile_rows) | {
        "x": world.tensor(rows, world.inputs, 1), "slices": 3, "v": world.partials(rows, 3, split),
    }  # fmt: skip
    want, terms = oracle(reference.shrink, given, dtype)
    ops.shrink(**given)
    check(given["v"], want, terms, torch.float32)
    check_expand(expand_arguments(world, row_slot, tile_rows, y, v=given["v"]), dtype)


def check_project_and_expand(world, row_slot, tile_rows, split, y):
    rows, dtype = len(row_slot), world.dtype
    given = tiles(world, row_slot, tile_rows) | {
        "x": world.tensor(rows, world.inputs, 1), "row_slot": row_slot, "sets": world.sets, "slices": 3, "in_begin": 8,
        "v": world.partials(rows, 1, split),
    }  # fmt: skip
    want, terms = oracle(reference.project, given, dtype)
    ops.project(**given)
    check(given["v"][0], want[0], terms[0], torch.float32)  # the other chunks are scratch
    check_expand(expand_arguments(world, row_slot, tile_rows, y, shared_v=given["v"]), dtype)


def check_expand(given, dtype):
    want, terms = oracle(reference.expand, given, dtype)
    ops.expand(**given)
    check(given["y"], want, terms, dtype)
