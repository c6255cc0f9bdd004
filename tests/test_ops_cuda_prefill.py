"""The kernels for many rows: clusters that share a tile's inputs, groups of ranks, columns not at multiples of 16 bytes.

Oracle and tenants are those of ``cuda_cases``; requests follow one another, as in a prefill pass.
"""

import pytest
import torch
from cuda_cases import COLUMNS, OUT_BEGIN, World, check, oracle, rows_of, tiles
from ops_cases import DEVICES
from ops_checks import same_bits

from scute_sgl import ops, reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("cuda" not in DEVICES, reason="needs a GPU and an extension built for it"),
]
DTYPES = [torch.float16, torch.bfloat16]
TILE = 64
SHAPES = [  # inputs, ranks, tenants, rows, split
    (4096, (16,), 16, 2048, False),  # clusters of eight
    (14336, (16, 8), 3, 300, False),  # 28 chunks: the last round of a cluster is not full
    (4104, (8, 24, 64, 256, 0), 9, 500, False),  # groups of ranks that begin inside a slice; inputs end inside a chunk
    (1544, (16, 512), 4, 70, True),  # one sum a chunk
    (520, (16, 0), 40, 3000, False),  # two chunks, many tenants: tiles that are not full
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
    common = tiles(world, requests(rows, tenants).cuda(), TILE)
    given = common | {"x": world.tensor(rows, inputs, 1), "slices": 3, "v": world.partials(rows, 3, split)}
    want, terms = oracle(reference.shrink, given, dtype)
    ops.shrink(**given)
    check(given["v"], want, terms, torch.float32)
    given = common | {"v": given["v"], "columns": COLUMNS, "y": outputs(world, rows, aligned)}
    want, terms = oracle(reference.expand, given, dtype)
    ops.expand(**given)
    check(given["y"], want, terms, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("aligned", [True, False])
def test_vera(aligned, dtype):
    world = World(dtype, 1544, (8,), 9, "vera", set_rank=200)
    row_slot = requests(150, 9, length=40).cuda()
    given = tiles(world, row_slot, TILE) | {
        "x": world.tensor(150, 1544, 1), "row_slot": row_slot, "sets": world.sets, "columns": COLUMNS, "in_begin": 8,
        "out_begin": OUT_BEGIN, "v": world.partials(150, 1, False), "y": outputs(world, 150, aligned),
    }  # fmt: skip
    want, terms = oracle(reference.vera, given, dtype)
    ops.vera(**given)
    check(given["y"], want[1], terms[1], dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1e-4, 3e3])
def test_expand_keeps_partial_sums_of_any_size(dtype, scale):
    world = World(dtype, 512, (64, 16), 4)
    common = tiles(world, rows_of("distinct", 70, 4), TILE)
    given = common | {"v": world.partials(70, 3, False), "columns": COLUMNS, "y": outputs(world, 70, True) * 0}
    given["v"].normal_().mul_(scale)
    if dtype == torch.float16:  # results within its range
        given["arena"] = (world.arena.view(dtype) * min(1, 100 / scale)).view(torch.uint8)
    want, terms = oracle(reference.expand, given, dtype)
    ops.expand(**given)
    check(given["y"], want, terms, dtype)


def run(world, x, y, row_slot):
    """Everything a prefill pass does to its rows: (v, y, rotated x)."""
    rows, common = len(x), {"arena": world.arena, "table": world.table, "module": 0}
    listed = tiles(world, row_slot, TILE)
    v, shared_v, y = world.partials(rows, 3, False), world.partials(rows, 1, False), y.clone()
    rotated = torch.empty(3, rows, world.inputs, dtype=world.dtype, device="cuda")
    ops.rotate(x, row_slot, slices=3, out=rotated, **common)
    ops.shrink(x, slices=3, v=v, **listed)
    ops.expand(v, columns=COLUMNS, y=y, **listed)
    ops.vera(x, row_slot, sets=world.sets, columns=COLUMNS, in_begin=8, out_begin=OUT_BEGIN, v=shared_v, y=y, **listed)
    return v[0], y, rotated


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
