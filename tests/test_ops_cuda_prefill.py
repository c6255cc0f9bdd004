"""The kernels for many rows: clusters sharing a tile's inputs, groups of ranks, columns not at multiples of 16 bytes.

Oracle and tenants are those of ``cuda_cases``; requests follow one another, as in a prefill pass.
"""

import pytest
import torch
from cuda_cases import (
    COLUMNS, OUT_BEGIN, World, check_expand, check_project_and_expand, check_shrink_and_expand, expand_arguments,
    rows_of, tiles,
)  # fmt: skip
from ops_cases import DEVICES
from ops_checks import same_bits

from scute_sgl import ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("cuda" not in DEVICES, reason="needs a GPU and an extension built for it"),
]
DTYPES = [torch.float16, torch.bfloat16]
TILE = 64
SHAPES = [  # inputs, ranks, tenants, rows, split
    (4096, (16,), 16, 2048, False),  # clusters of eight
    (14336, (16, 8), 3, 300, False),  # 14 chunks: the last round of a cluster is not full
    (4104, (8, 24, 64, 256, 0), 9, 500, False),  # groups of ranks that begin inside a slice; inputs end inside a chunk
    (1544, (16, 512), 4, 70, True),  # one sum a chunk
    (1032, (16, 0), 40, 3000, False),  # two chunks, many tenants: tiles that are not full
    (8, (1,), 2, 65, False),
]
IDS = [f"{s[0]}in-r{max(s[1])}-{s[3]}rows{'-split' * s[4]}" for s in SHAPES]


def requests(rows, tenants, length=100):
    """Row -> slot of requests of ``length`` rows; every fifth is the base's."""
    request = torch.arange(rows) // length
    return torch.where(request % 5 == 4, -1, request % tenants).int()


def outputs(world, rows, aligned):
    """y, its rows at multiples of 16 bytes or not."""
    return world.tensor(rows, COLUMNS[-1] + (0 if aligned else 3), 2)


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_shrink_and_expand(shape, dtype, aligned):
    inputs, ranks, tenants, rows, split = shape
    world = World(dtype, inputs, ranks, tenants)
    check_shrink_and_expand(world, requests(rows, tenants).cuda(), TILE, split, outputs(world, rows, aligned))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("split", [False, True])
def test_project_and_expand(split, aligned, dtype):
    world = World(dtype, 1544, (8,), 9, "vera", set_rank=200)
    check_project_and_expand(world, requests(150, 9, length=40).cuda(), TILE, split, outputs(world, 150, aligned))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("aligned", [True, False])
def test_one_expand_of_both_kinds(aligned, dtype):
    world = World(dtype, 1544, (16, 64, 0, 256), 12, "lora vera", set_rank=200)
    v, shared_v = (world.partials(500, slices, split=False).normal_() for slices in (3, 1))
    y = outputs(world, 500, aligned)
    check_expand(expand_arguments(world, requests(500, 12, length=40).cuda(), TILE, y, v, shared_v), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1e-4, 3e3])
def test_expand_keeps_partial_sums_of_any_size(dtype, scale):
    world = World(dtype, 512, (64, 16), 4)
    y, v = outputs(world, 70, True) * 0, world.partials(70, 3, False)
    given = expand_arguments(world, rows_of("distinct", 70, 4), TILE, y, v=v)
    given["v"].normal_().mul_(scale)
    if dtype == torch.float16:  # results within its range
        given["arena"] = (world.arena.view(dtype) * min(1, 100 / scale)).view(torch.uint8)
    check_expand(given, dtype)


def run(world, x, y, row_slot):
    """Everything a prefill pass does to its rows: (v and shared v side by side, y, rotated x)."""
    rows, common = len(x), {"arena": world.arena, "table": world.table, "module": 0}
    listed = tiles(world, row_slot, TILE)
    v, shared_v, y = world.partials(rows, 3, False), world.partials(rows, 1, False), y.clone()
    rotated = torch.empty(3, rows, world.inputs, dtype=world.dtype, device="cuda")
    ops.rotate(x, row_slot, slices=3, out=rotated, **common)
    ops.shrink(x, slices=3, v=v, **listed)
    ops.project(x, row_slot, sets=world.sets, slices=3, in_begin=8, v=shared_v, **listed)
    ops.expand(v, shared_v, row_slot, sets=world.sets, columns=COLUMNS, out_begin=OUT_BEGIN, y=y, **listed)
    return torch.cat([v[0], shared_v[0]], dim=1), y, rotated


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("many", [200, 3000])
def test_the_size_of_a_batch_changes_no_bit(many, dtype):
    """Clusters, groups of rotated rows and places in tiles differ; a row's results do not."""
    world = World(dtype, 1344, (16, 8, 64, 0, 256), 12, "lora vera oft")
    x, y = world.tensor(many, 1344, 1), world.tensor(many, COLUMNS[-1], 2)
    row_slot = requests(many, 12, length=37).cuda()
    v, everything, rotated = run(world, x, y, row_slot)
    for rows in (slice(0, 1), slice(40, 41), slice(30, 131)):
        v_alone, alone, rotated_alone = run(world, x[rows], y[rows], row_slot[rows])
        written = ~v_alone[: len(alone)].isnan()
        assert same_bits(v[rows][written], v_alone[: len(alone)][written])
        assert same_bits(everything[rows], alone)
        assert same_bits(rotated[:, rows], rotated_alone)
