"""The op linear on a GPU: sizes of real layers, the same bits in every batch, captured graphs.

Oracle and tenants are those of ``cuda_cases``.
"""

import pytest
import torch
from cuda_cases import COLUMNS, World, check, check_replays, oracle, rows_of
from ops_checks import same_bits
from test_ops_linear import HERE

from scute_sgl import layout, ops, reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("cuda" not in HERE, reason="needs a GPU that runs op linear"),
]
DTYPES = [torch.float16, torch.bfloat16]
SLICES = len(COLUMNS) - 1
MIXED = (8, 16, 64, 256, 0)
SHAPES = [  # inputs, ranks, tenants, kinds, set's rank, rows, popularity
    (4096, (16,), 16, "lora", 8, 16, "distinct"),
    (4096, (64,), 24, "lora", 8, 24, "distinct"),
    (4096, (16,), 1, "lora", 8, 20, "distinct"),  # all rows of one tenant
    (4096, (256,), 2, "vera", 256, 9, "distinct"),
    (4104, MIXED, 17, "lora vera", 48, 24, "uniform"),
    (1032, MIXED, 9, "lora vera", 256, 20, "skewed"),
    (520, (8,), 1, "vera", 48, 24, "distinct"),
    (136, (256, 8), 3, "lora", 8, 8, "skewed"),
    (40, MIXED, 12, "lora vera", 16, 7, "distinct"),
    (14336, (8,), 4, "lora", 8, 1, "distinct"),
    (14336, MIXED, 24, "lora vera", 48, 24, "distinct"),
]
IDS = [f"{s[0]}in-r{max(s[1])}-{s[2]}tenants-{s[3].replace(' ', '-')}-{s[5]}rows-{s[6]}" for s in SHAPES]


def arguments(world: World, row_slot: torch.Tensor, own: bool = False, bias: bool = True) -> dict:
    """v and shared_v are what shrink and project make of one input, and NaN wherever those write nothing."""
    rows, slices = len(row_slot), len(world.columns) - 1
    inputs = slices if own else 1
    x = world.tensor(inputs * rows, world.inputs, 1).unflatten(0, (inputs, rows))
    plan = torch.zeros(layout.plan_size(rows), dtype=torch.int32, device="cuda")
    ops.plan(row_slot, world.slots, 8, plan)
    v, shared_v = world.partials(rows, slices, True), world.partials(rows, 1, True)
    tenants = world.arena, world.table
    ops.shrink(x[0], *tenants, plan, 8, 0, slices, v)
    ops.project(x[0], row_slot, *tenants, world.sets, plan, 8, 0, slices, 8, shared_v)
    return {
        "x": x,
        "weight": world.tensor(world.columns[-1], world.inputs, 3).mul_(world.inputs**-0.5),
        "bias": world.tensor(1, world.columns[-1], 4)[0] if bias else None,
        "v": v,
        "shared_v": shared_v,
        "row_slot": row_slot,
        "arena": world.arena,
        "table": world.table,
        "slots": world.slots,
        "sets": world.sets,
        "module": 0,
        "columns": world.columns,
        "out_begin": world.out_begin,
        "y": world.tensor(rows, world.columns[-1], 2).fill_(torch.nan),
    }


def of_rows(given: dict, rows: torch.Tensor) -> dict:
    """The same for a batch of these rows."""
    chosen = {name: given[name][:, rows].contiguous() for name in ("x", "v", "shared_v")}
    y = torch.full((len(rows), given["columns"][-1]), torch.nan, dtype=given["y"].dtype, device="cuda")
    return given | chosen | {"row_slot": given["row_slot"][rows], "y": y}


@pytest.mark.parametrize("own, bias", [(False, False), (True, True)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_is_the_reference(shape, dtype, own, bias):
    inputs, ranks, tenants, kinds, set_rank, rows, popularity = shape
    world = World(dtype, inputs, ranks, tenants, kinds, set_rank)
    given = arguments(world, rows_of(popularity, rows, tenants), own, bias)
    y, around, (want, terms) = given["y"], given["y"]._base.clone(), oracle(reference.linear, given, dtype)
    ops.linear(**given)
    check(y, want, terms, dtype)
    around[:, 8 : 8 + COLUMNS[-1]] = y
    assert not want.isnan().any() and same_bits(around, y._base)


# With 132 multiprocessors these have tiles of 32, 48, 64, 96, 128, 160 and 224 columns, and the last two turns of them.
WIDTHS = [(4096,), (4096, 1024, 1024), (8192,), (12288,), (16384,), (10240, 10232), (14336, 14336), (40000,)]


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_tiles_of_all_widths(widths, dtype, own):
    """Rows of few and of many columns; fewer rows have the same bits, in tiles of another height."""
    world = World(dtype, 1160, (8, 64, 16, 0, 200), 13, "lora vera", widths=widths, out_begin=[0] * len(widths))
    given = arguments(world, rows_of("uniform", layout.LINEAR_ROWS, 13), own)
    want, terms = oracle(reference.linear, given, dtype)
    ops.linear(**given)
    check(given["y"], want, terms, dtype)
    for count in (3, 9, 16):
        rows = torch.arange(count).cuda() * 24 // count
        batch = of_rows(given, rows)
        ops.linear(**batch)
        assert same_bits(batch["y"], given["y"][rows]), f"{count} rows"


@pytest.mark.parametrize("columns", [(0, 1496), (0, 1483, 1496), (0, 8, 16, 1496), (0, 1160, 1160, 1488, 1496)], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 7, 8, 9, 16, 20, 24])
def test_of_the_base_alone(rows, columns):
    """No tenant has anything for these modules, so slices may be cut anywhere."""
    world = World(torch.bfloat16, 1032, MIXED, 9, "lora vera")
    given = arguments(world, rows_of("uniform", rows, 9))
    table = torch.full_like(world.table, -1).repeat(1, 2, 1)
    table[..., layout.META] = 0
    given |= {"columns": columns, "out_begin": [0] * (len(columns) - 1), "table": table}
    given |= {name: torch.full((1, rows, 96), torch.nan, device="cuda") for name in ("v", "shared_v")}
    want, terms = oracle(reference.linear, given, torch.bfloat16)
    ops.linear(**given)
    check(given["y"], want, terms, torch.bfloat16)


@pytest.mark.parametrize("absent", [("v",), ("shared_v",), ("v", "shared_v")], ids=" ".join)
def test_sums_that_are_absent_leave_their_tenants_the_base(absent):
    world = World(torch.bfloat16, 1344, MIXED, 12, "lora vera")
    given = arguments(world, rows_of("uniform", 24, 12)) | dict.fromkeys(absent)
    want, terms = oracle(reference.linear, given, torch.bfloat16)
    ops.linear(**given)
    check(given["y"], want, terms, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_is_rounded_once(dtype):
    """y has no room for + 3 / 4, which the base adds to a large number, nor for the tenant's, but for their sum."""
    world, large = World(dtype, 8, (8,), 1), 2 / torch.finfo(dtype).eps
    given = arguments(world, torch.tensor([0, -1], dtype=torch.int32, device="cuda"))
    arena, entry = world.arena.view(dtype), world.table[0, 0].tolist()
    for field, value in (layout.B, 0.03125), (layout.BIAS, 0.5):
        begin = entry[field] // dtype.itemsize
        arena[begin : begin + COLUMNS[1] * (8 if field == layout.B else 1)] = value
    world.table[0, 0, layout.SCALE] = -1
    given["x"].fill_(1.0)
    given["weight"].copy_(torch.tensor([large, 0.5, 0, 0, 0, 0, 0, 0]))
    given["bias"].fill_(0.25)
    given["v"].fill_(1.0)
    ops.linear(**given)
    assert given["y"][:, : COLUMNS[1]].float().unique(dim=1).tolist() == [[large + 2], [large]]


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("inputs", [40, 1344, 4096])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_in_every_batch(dtype, inputs, own):
    """Of 1 to 24 rows, at any place and beside any others."""
    world, generator = World(dtype, inputs, MIXED, 12, "lora vera"), torch.Generator().manual_seed(0)
    given = arguments(world, rows_of("uniform", layout.LINEAR_ROWS, 12), own)
    ops.linear(**given)
    for count in range(1, layout.LINEAR_ROWS + 1):
        for _ in range(3):
            rows = torch.randperm(layout.LINEAR_ROWS, generator=generator)[:count].cuda()
            batch = of_rows(given, rows)
            ops.linear(**batch)
            assert same_bits(batch["y"], given["y"][rows]), f"{count} rows"


def test_a_slot_past_the_table_is_nobodys():
    world = World(torch.float16, 520, (16,), 3)
    results = []
    for slot in (-1, 3, 2**31 - 1):
        given = arguments(world, torch.tensor([0, -1, 2], dtype=torch.int32, device="cuda"))
        given["row_slot"][1] = slot
        ops.linear(**given)
        results.append(given["y"])
    assert same_bits(results[0], results[1]) and same_bits(results[0], results[2])


class Step:
    """A decoding step of one layer on fixed buffers, its input made of its output, several times."""

    def __init__(self, world: World, rows: int):
        self.world, self.row_slot = world, torch.full((rows,), -1, dtype=torch.int32, device="cuda")
        self.given = arguments(world, self.row_slot) | {"bias": None}
        self.plan = torch.zeros(layout.plan_size(rows), dtype=torch.int32, device="cuda")
        self.x0 = self.given["x"][0].clone()
        self.x = self.x0.clone()
        self.rotated = torch.empty(SLICES, rows, world.inputs, dtype=world.dtype, device="cuda")

    def run(self):
        w, y = self.world, self.given["y"]
        ops.plan(self.row_slot, w.slots, 8, self.plan)
        self.x.copy_(self.x0)
        for turn in range(4):
            ops.rotate(self.x, self.row_slot, w.arena, w.table, 0, SLICES, self.rotated)
            ops.shrink(self.x, w.arena, w.table, self.plan, 8, 0, SLICES, self.given["v"])
            ops.project(
                self.x, self.row_slot, w.arena, w.table, w.sets, self.plan, 8, 0, SLICES, 8, self.given["shared_v"]
            )  # fmt: skip
            ops.linear(**self.given | {"x": self.rotated if turn % 2 else self.x[None]})
            self.x.add_(y[:, : w.inputs], alpha=0.01)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [8, 24])
def test_graph_replays_are_the_eager_run(rows, dtype):
    step, generator = Step(World(dtype, 1344, MIXED, 12, "lora vera oft"), rows), torch.Generator().manual_seed(0)

    def change(turn: int) -> None:
        step.row_slot.copy_(torch.randint(-1, 12 if turn % 3 else 2, (rows,), generator=generator).int())

    y = step.given["y"]
    buffers = (step.given["v"], step.given["shared_v"], step.rotated, y)
    check_replays(step.run, change, 100, (y, step.x), buffers, written=(y,))


@pytest.mark.parametrize(
    "rows, dtype, change, message",
    [
        (25, torch.float16, lambda a: a, "x has 25 rows; want at most 24 on CUDA"),
        (7, torch.float32, lambda a: a, "x is Float; want Half or BFloat16 on CUDA"),
        (
            7,
            torch.float16,
            lambda a: a | {"x": torch.empty(3, 9, 520, dtype=torch.float16, device="cuda")[:, :7]},
            "x has strides .*; want one slice's rows right behind another's",
        ),
        (7, torch.float16, lambda a: a | {"weight": a["weight"].cpu()}, "weight is on cpu; want cuda:0"),
        (7, torch.float16, lambda a: a | {"y": a["y"].cpu()}, "y is on cpu; want cuda:0"),
        (7, torch.float16, lambda a: a | {"slots": a["slots"].cpu()}, "slots is on cpu; want cuda:0"),
    ],
)
def test_refusals(rows, dtype, change, message):
    given = change(arguments(World(dtype, 520, (16,), 3), rows_of("distinct", rows, 3)))
    with pytest.raises(RuntimeError, match=message):
        ops.linear(**given)


@pytest.mark.parametrize("name", ["x", "weight"])
def test_refuses_rows_that_begin_anywhere(name):
    given = arguments(World(torch.float16, 520, (16,), 3), rows_of("distinct", 7, 3))
    moved = torch.empty(*given[name].shape[:-1], 520 + 3, dtype=torch.float16, device="cuda")[..., 1:-2]
    with pytest.raises(RuntimeError, match=f"{name}'s rows begin anywhere; want them at multiples of 16 bytes"):
        ops.linear(**given | {name: moved.copy_(given[name])})
