"""What only a GPU can show: sizes that need many units of work, tensor-core ranks, captured graphs.

The other op tests run on the GPU too; these add shapes that are too large for the CPU ops' tests. The oracle is
``reference.py`` in float64, computed on the GPU.
"""

import pytest
import test_ops_reweigh
import test_ops_structured
import test_ops_tokens
import torch
from cuda_cases import (
    COLUMNS, OUT_BEGIN, World, check, check_expand, check_project_and_expand, check_replays, check_shrink_and_expand,
    expand_arguments, oracle, rows_of, tiles,
)  # fmt: skip
from ops_cases import DEVICES
from ops_checks import same_bits

from scute_sgl import layout, ops, reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("cuda" not in DEVICES, reason="needs a GPU and an extension built for it"),
]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
SHAPES = [  # inputs, ranks, tenants, rows, popularity, tile_rows, split
    (4096, (16,), 16, 16, "distinct", 8, True),
    (4096, (64,), 20, 20, "distinct", 8, True),
    (4104, (8, 16, 24, 32, 40, 96, 256, 0), 17, 64, "uniform", 8, True),
    (1544, (512, 8), 4, 7, "distinct", 8, True),
    (1032, (1, 16, 0, 64), 600, 600, "distinct", 8, True),  # more tiles than an expand has workers
    (14336, (16,), 1, 64, "distinct", 8, True),
    (1024, (256, 8, 8, 8), 8, 32, "distinct", 8, True),  # large ranks have most of the workers
    (1032, (4100, 24), 3, 11, "distinct", 8, True),  # a rank of several windows
    (512, (16, 64), 5, 1000, "skewed", 64, False),
    (2056, (16, 33, 128), 7, 4096, "uniform", 64, False),
    (4096, (16,), 16, 1, "distinct", 8, True),
]
IDS = [f"{s[0]}in-r{max(s[1])}-{s[2]}tenants-{s[3]}rows-{s[4]}-tile{s[5]}" for s in SHAPES]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_shrink_and_expand(shape, dtype):
    inputs, ranks, tenants, rows, popularity, tile_rows, split = shape
    world = World(dtype, inputs, ranks, tenants)
    y = world.tensor(rows, COLUMNS[-1] + 3, 2)
    check_shrink_and_expand(world, rows_of(popularity, rows, tenants), tile_rows, split, y)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1e-4, 3e3])
def test_expand_keeps_partial_sums_of_any_size(dtype, scale):
    world = World(dtype, 512, (64, 16), 4)
    y, v = world.tensor(9, COLUMNS[-1], 2) * 0, world.partials(9, 3, False)
    given = expand_arguments(world, rows_of("distinct", 9, 4), 8, y, v=v)
    given["v"].normal_().mul_(scale)
    if dtype == torch.float16:  # results within its range
        given["arena"] = (world.arena.view(dtype) * min(1, 100 / scale)).view(torch.uint8)
    check_expand(given, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rank, rows, tile_rows", [(256, 16, 8), (20, 200, 64), (256, 130, 64), (8, 5, 8)])
def test_project_and_expand(rank, rows, tile_rows, dtype):
    world = World(dtype, 1544, (8,), 9, "vera", set_rank=rank)
    y = world.tensor(rows, COLUMNS[-1] + 3, 2)
    check_project_and_expand(world, rows_of("uniform", rows, 9), tile_rows, tile_rows == 8, y)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows, tile_rows", [(40, 8), (300, 64)])
def test_one_expand_of_both_kinds(rows, tile_rows, dtype):
    world, row_slot = World(dtype, 1544, (16, 64, 0, 256), 12, "lora vera", set_rank=200), rows_of("uniform", rows, 12)
    v, shared_v = (world.partials(rows, slices, split=True).normal_() for slices in (3, 1))
    y = world.tensor(rows, COLUMNS[-1] + 3, 2)
    check_expand(expand_arguments(world, row_slot, tile_rows, y.clone(), v, shared_v), dtype)
    check_expand(expand_arguments(world, row_slot, tile_rows, y.clone(), v), dtype)
    check_expand(expand_arguments(world, row_slot, tile_rows, y.clone(), None, shared_v), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 64, 700])
def test_rotate(rows, dtype):
    world = World(dtype, 1344, (8,), 31, "oft")
    given = {"x": world.tensor(rows, 1344, 1), "row_slot": rows_of("uniform", rows, 31), "arena": world.arena,
             "table": world.table, "module": 0, "slices": 3}  # fmt: skip
    given["out"] = torch.full((3, rows, 1344), torch.nan, dtype=dtype, device="cuda")
    want, terms = oracle(reference.rotate, given, dtype)
    ops.rotate(**given)
    check(given["out"], want, terms, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inputs, rows", [(4096, 1), (1344, 64), (1544, 700)])
def test_structured(inputs, rows, dtype):
    world = World(dtype, inputs, (8,), 13, "structured")
    given = {"x": world.tensor(rows, inputs, 1), "row_slot": rows_of("uniform" if rows > 1 else "skewed", rows, 13),
             "arena": world.arena, "table": world.table, "module": 0, "columns": COLUMNS,
             "y": world.tensor(rows, COLUMNS[-1] + 3, 2)}  # fmt: skip
    before, (want, terms) = given["y"].clone(), test_ops_structured.oracle(given)
    ops.structured(**given)
    check(given["y"].cpu(), want, terms, dtype)
    assert torch.equal(given["y"][:, COLUMNS[-1] :], before[:, COLUMNS[-1] :])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inputs, rows", [(4096, 1), (1344, 64), (1544, 700)])
def test_reweigh(inputs, rows, dtype):
    world = World(dtype, inputs, (8,), 13, "structured")
    given = {"x": world.tensor(rows, inputs, 1), "weight": world.tensor(COLUMNS[-1] + 8, inputs, 3) * inputs**-0.5,
             "row_slot": rows_of("uniform", rows, 13).fill_(6) if rows == 1 else rows_of("uniform", rows, 13),
             "arena": world.arena, "table": world.table, "module": 0, "columns": COLUMNS,
             "y": world.tensor(rows, COLUMNS[-1] + 3, 2)}  # fmt: skip
    before, (want, terms) = given["y"].clone(), test_ops_reweigh.oracle(given)
    ops.reweigh(**given)
    check(given["y"].cpu(), want, terms, dtype)
    assert torch.equal(given["y"][:, COLUMNS[-1] :], before[:, COLUMNS[-1] :])
    assert not torch.equal(given["y"], before)


@pytest.mark.parametrize("tile_rows", [8, 64])
@pytest.mark.parametrize("tenants", [1, 40, 3000])
def test_plan_of_many_rows(tile_rows, tenants):
    lives = [0, layout.DELTA, layout.DELTA | layout.SHARED, layout.SHARED]
    slots = torch.tensor([[lives[slot % 4], slot // 7, 8 * (slot % 9)] for slot in range(tenants)], dtype=torch.int32)
    row_slot = rows_of("skewed", 16384, tenants)
    blank = torch.zeros(layout.plan_size(16384), dtype=torch.int32)
    want, got = reference.plan(row_slot.cpu(), slots, tile_rows, blank), blank.cuda()
    ops.plan(row_slot, slots.cuda(), tile_rows, got)
    assert torch.equal(got.cpu(), want)


def test_misaligned_input():
    world = World(torch.float16, 520, (16,), 3)
    wide = torch.randn(5, 527, device="cuda", dtype=torch.float16)
    given = tiles(world, rows_of("distinct", 5, 3), 8)
    given |= {"x": wide[:, 3:523], "slices": 3, "v": world.partials(5, 3, True)}
    want, terms = oracle(reference.shrink, given, torch.float16)
    ops.shrink(**given)
    check(given["v"], want, terms, torch.float32)


class Layer:
    """All ops of one layer on fixed buffers, as a decoding step runs them."""

    def __init__(self, world, rows, tile_rows=8):
        self.world, self.rows, self.tile_rows = world, rows, tile_rows
        self.row_slot = torch.full((rows,), -1, dtype=torch.int32, device="cuda")
        self.plan = torch.zeros(layout.plan_size(rows), dtype=torch.int32, device="cuda")
        self.x0, self.y0 = world.tensor(rows, world.inputs, 1), world.tensor(rows, COLUMNS[-1], 2)
        self.weight = world.tensor(COLUMNS[-1], world.inputs, 3) * world.inputs**-0.5
        self.rotated = torch.empty(3, rows, world.inputs, dtype=world.dtype, device="cuda")
        self.v, self.shared_v = world.partials(rows, 3, True), world.partials(rows, 1, True)
        self.x, self.y = self.x0.clone(), self.y0.clone()

    def step(self):
        w = self.world
        common = {"arena": w.arena, "table": w.table, "module": 0}
        listed = {"plan": self.plan, "tile_rows": self.tile_rows}
        ops.plan(self.row_slot, w.slots, self.tile_rows, self.plan)
        self.x.copy_(self.x0)
        self.y.copy_(self.y0)
        for _ in range(4):
            ops.rotate(self.x, self.row_slot, slices=3, out=self.rotated, **common)
            ops.shrink(self.x, slices=3, v=self.v, **common, **listed)
            ops.project(self.x, self.row_slot, sets=w.sets, slices=3, in_begin=8, v=self.shared_v, **common, **listed)
            ops.expand(self.v, self.shared_v, self.row_slot, sets=w.sets, columns=COLUMNS, out_begin=OUT_BEGIN,
                       y=self.y, **common, **listed)  # fmt: skip
            ops.structured(self.x, self.row_slot, columns=COLUMNS, y=self.y, **common)
            ops.reweigh(self.x, self.weight, self.row_slot, columns=COLUMNS, y=self.y, **common)
            self.x.add_(self.rotated[0], alpha=0.01)
            self.y.mul_(0.5)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_graph_replays_are_the_eager_run(dtype):
    world = World(dtype, 1344, (16, 8, 64, 0, 256), 12, "lora vera oft structured")
    layer, generator = Layer(world, 24), torch.Generator().manual_seed(0)

    def change(turn: int) -> None:
        batch = torch.randint(-1, 12 if turn % 3 else 2, (24,), generator=generator).int()
        layer.row_slot.copy_(batch if turn % 7 else batch.fill_(-1))

    buffers = (layer.v, layer.shared_v, layer.rotated, layer.y)
    check_replays(layer.step, change, 300, (layer.y, layer.x), buffers)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tile_rows", [8, 64])
def test_neighbours_change_no_bit(dtype, tile_rows):
    world = World(dtype, 1344, (16, 8, 64, 0, 256), 12, "lora vera oft structured")
    crowd, alone = Layer(world, 150, tile_rows), Layer(world, 150, tile_rows)
    batch = rows_of("skewed", 150, 12)
    crowd.row_slot.copy_(batch)
    crowd.step()
    for row in range(0, 150, 13):
        alone.row_slot.fill_(-1)
        alone.row_slot[row] = batch[row]
        alone.step()
        assert same_bits(crowd.y[row], alone.y[row]) and same_bits(crowd.x[row], alone.x[row]), f"row {row}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_graph_replays_of_token_ops_follow_the_rows(dtype):
    rows, logits = test_ops_tokens.row_arguments(dtype, "cuda", 24), test_ops_tokens.logit_arguments(dtype, "cuda", 24)
    given, before = [rows, logits], [rows["y"].clone(), logits["y"].clone()]

    def step():
        for arguments, y in zip(given, before):
            arguments["y"].copy_(y)
        ops.token_rows(**rows)
        ops.token_logits(**logits)

    generator = torch.Generator().manual_seed(0)

    def change(turn: int) -> None:
        for arguments in given:
            arguments["row_slot"].copy_(torch.randint(-1, 6, (24,), generator=generator))

    check_replays(step, change, 100, [arguments["y"] for arguments in given])
