from dataclasses import fields, replace
from functools import lru_cache
from unittest import mock

import pytest
import structured_cases
import torch
from ops_cases import DEVICES, DTYPES, Arena, Case, World, cases
from ops_checks import check_neighbours, check_update, on_cpu
from structured_cases import make_world

from scute_sgl import layout, ops, reference, structured
from scute_sgl.slots import Kronecker, Mix, Sparse
from scute_sgl.structured import sparse

WIDTHS = (136, 24, 14)
COLUMNS = (0, 136, 160, 174)
SHAPES = (
    Case(8, 1, 1, "distinct"),
    Case(24, 3, 7, "distinct"),
    Case(24, 8, 64, "base"),
    Case(1032, 5, 64, "skewed"),
    Case(1544, 16, 133, "uniform"),
    Case(520, 2, 300, "uniform"),  # a CTA takes several rows
)
TENANTS = [  # what each has in the three slices; "" is nothing
    ("kronecker", "kronecker", "kronecker"), ("split", "split", "split"), ("sparse", "", "sparse"),
    ("mix", "mix", "mix"), ("", "", ""), ("pairs", "sparse", "split"), ("few", "pairs", "kronecker"), ("split", "kronecker", "pairs"),
]  # fmt: skip


@lru_cache(maxsize=2)
def world(dtype: torch.dtype, inputs: int, rank: int, device: str) -> World:
    return make_world(TENANTS, WIDTHS, dtype, inputs, rank, device)


def arguments(case: Case) -> dict:
    return structured_cases.arguments(case, world(case.dtype, case.inputs, case.rank, case.device), COLUMNS, favourite=1)


def oracle(given: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """What the reference computes, and its sums of absolute terms. A block holds integers too, whose bits must stay."""
    given, matrices = on_cpu(given), reference.matrices

    def of_absolutes(structure, *sizes):
        numbers = {f.name: v.abs() for f in fields(structure) if isinstance(v := getattr(structure, f.name), torch.Tensor)}
        return tuple(M.abs() for M in matrices(replace(structure, **numbers), *sizes))

    with mock.patch.object(reference, "matrices", of_absolutes):
        terms = reference.structured(**given | {"x": given["x"].abs(), "y": given["y"].abs()})
    return reference.structured(**given), terms


@pytest.mark.parametrize("case", cases(*SHAPES), ids=str)
def test_is_the_reference(case):
    given = arguments(case)
    before, (want, terms) = given["y"].clone(), oracle(given)
    ops.structured(**given)
    check_update(given["y"], before, want, terms)
    assert case.popularity == "base" or not torch.equal(given["y"], before)


@pytest.mark.parametrize("case", cases(Case(520, 3, 64, "distinct"), Case(1032, 8, 300, "uniform")), ids=str)
def test_neighbours_change_no_bit(case):
    given = arguments(case)
    slots = world(case.dtype, case.inputs, case.rank, case.device).slots
    check_neighbours(ops.structured, given, slots, range(0, case.rows, 13))


def one_structure(structure, dtype, device, rows=1, seed=0, inputs=None, outputs=None) -> dict:
    """Arguments for rows of a tenant that has just this."""
    arena, generator = Arena(dtype, torch.Generator()), torch.Generator().manual_seed(seed)
    table = torch.full((1, 1, layout.FIELDS), -1, dtype=torch.int64)
    table[0, 0, layout.STRUCTURE] = arena.put_structure(structure)
    arena.fill(layout.BLOCK)
    x, y = (torch.randn(rows, width, generator=generator).to(dtype).to(device) for width in (inputs, outputs))
    row_slot = torch.zeros(rows, dtype=torch.int32, device=device)
    return {"x": x, "row_slot": row_slot, "arena": torch.cat(arena.pieces).to(device), "table": table.to(device),
            "module": 0, "columns": (0, outputs), "y": y}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("inputs", [65536, 65544])
def test_columns_of_two_and_of_four_bytes(device, dtype, inputs):
    columns = torch.tensor([0, inputs - 1, 40000, 32768])
    S = Sparse(torch.tensor([0, 0, 1, 4]), columns, torch.tensor([1.0, 2.0, 3.0, 4.0]), (5, inputs))
    given = one_structure(S, dtype, device, rows=3, inputs=inputs, outputs=5)
    before, (want, terms) = given["y"].clone(), oracle(given)
    ops.structured(**given)
    check_update(given["y"], before, want, terms)
    x, y = given["x"].cpu().double(), before.cpu().double()
    plain = y.index_add(1, S.rows, x[:, columns] * S.values)
    torch.testing.assert_close(want, plain)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("w1, w2, rank", [
    ((64, 64), (64, 64), 8),  # a square layer of 4,096
    ((3, 512), (1, 8), 8),  # as many rows of x, and inner sums, as there is room for
    ((1, 512), (300, 2), 0),  # more outputs of the second matrix than there is room for at a time
    ((1000, 1), (1, 8), 0),
    ((40, 2), (3, 3000), 0),  # sums over more than there is room for at a time, and no multiple of eight
    ((2, 1), (70, 2504), 2500),
    ((2, 1), (5000, 16), 4),
    ((6, 50), (10, 40), 12),  # no whole tile of the tensor cores
    ((3, 8), (7, 9), 5),
])  # fmt: skip
def test_kronecker_products_of_extreme_shapes(device, dtype, w1, w2, rank):
    arena = Arena(dtype, torch.Generator().manual_seed(1))
    (l, p), (o, q) = w1, w2
    second = (arena.random(o, rank), arena.random(rank, q, std=q**-0.5)) if rank else (arena.random(o, q, std=q**-0.5),)
    S = Kronecker(arena.random(l, p, std=p**-0.5), *second)
    given = one_structure(S, dtype, device, rows=2, inputs=p * q, outputs=l * o)
    before, (want, terms) = given["y"].clone(), oracle(given)
    ops.structured(**given)
    check_update(given["y"], before, want, terms)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [0, 3])  # x begins, or does not, at a multiple of 16 bytes
@pytest.mark.parametrize("longest, inputs", [(0, 8), (9, 64), (300, 304), (3000, 3008), (40, 32768)])
def test_sparse_outputs_of_any_length(device, dtype, offset, longest, inputs):
    """One has ``longest`` values, the others few or none; the last one's end where the arena does."""
    rows = torch.tensor([4] * longest + [9] * min(longest, 2))
    columns = torch.cat([torch.arange(inputs - longest, inputs), torch.arange(len(rows) - longest)])
    S = sparse(rows, columns, torch.randn(len(rows), generator=torch.Generator().manual_seed(2)), (12, inputs))
    given = one_structure(S, dtype, device, rows=3, inputs=inputs, outputs=12)
    begin = int(given["table"][0, 0, layout.STRUCTURE])
    size = sum(layout.round_up(p.numel() * (p.itemsize if not p.is_floating_point() else dtype.itemsize), layout.ALIGN)
               for p in structured.parts(S).values())  # fmt: skip
    given["arena"] = given["arena"][: begin + size].clone()
    wide = torch.full((3, inputs + 16), torch.nan, dtype=dtype, device=device)
    wide[:, offset : offset + inputs] = given["x"]
    given["x"] = wide[:, offset : offset + inputs]
    before, (want, terms) = given["y"].clone(), oracle(given)
    ops.structured(**given)
    check_update(given["y"], before, want, terms)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
def test_all_is_rounded_once(device, dtype):
    """y has no room for + 1 / 2, nor for + 1 less 1 / 2 twice, but for their sum."""
    large = 2 / torch.finfo(dtype).eps
    S = Sparse(torch.tensor([0, 0, 0, 0]), torch.arange(4), torch.full((4,), 0.5), (2, 8))
    given = one_structure(S, dtype, device, inputs=8, outputs=2)
    given["x"].fill_(1), given["y"].fill_(large)
    ops.structured(**given)
    assert given["y"].tolist() == [[large + 2, large]]


@pytest.mark.parametrize("device", DEVICES)
def test_a_mix_near_the_identity_is_not_lost(device):
    """f1 - 1 is stored: a sum with 2^-12 of itself shows in float32, whose arithmetic this is."""
    mix = Mix(torch.full((2,), 2.0**-20), torch.full((2,), 2.0**-21), 4, one_each=True)
    given = one_structure(mix, torch.float32, device, inputs=8, outputs=4)
    given["y"].copy_(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
    ops.structured(**given)
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    want = torch.cat([a + (a * 2**-20 - b * 2**-21), b + (b * 2**-20 + a * 2**-21)])
    assert torch.equal(given["y"].cpu()[0], want)


@pytest.mark.parametrize("device", DEVICES)
def test_empty(device):
    ops.structured(**arguments(Case(24, 8, 0, "base", device=device)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "change, message",
    [
        (lambda a: a | {"x": a["x"].double()}, "x is Double; want Float, Half or BFloat16"),
        (lambda a: a | {"y": a["y"].half()}, "y is Half; want Float"),
        (lambda a: a | {"y": a["y"][:6]}, r"y has shape \[6, 177\]; want \[7, -1\]"),
        (lambda a: a | {"y": a["y"].T.contiguous().T}, "y has strides .*; want its last dimension contiguous"),
        (lambda a: a | {"columns": (0,)}, "columns has 1 bounds; want one more than slices"),
        (lambda a: a | {"columns": (0, 1, 2, 178)}, "columns is .*; want ascending bounds within y's 177 columns"),
        (lambda a: a | {"row_slot": a["row_slot"][:6]}, r"row_slot has shape \[6\]; want \[7\]"),
        (lambda a: a | {"table": a["table"][..., :8].contiguous()}, r"table has shape .*; want \[-1, -1, 10\]"),
        (lambda a: a | {"module": 4}, "modules 4 to 6 are asked for; want them within table's 6"),
    ],
)
def test_refusals(device, change, message):
    with pytest.raises(RuntimeError, match=message):
        ops.structured(**change(arguments(Case(24, 8, 7, "distinct", device=device))))


@pytest.mark.parametrize("structure, place, value, message", [
    ("kronecker", 0, 9, "a structured block of kind 9; want 1 to 5"),
    ("kronecker", 1, 7, "a structured block of 28 outputs; want slice 0's 8"),
    ("kronecker", 2, 3, "a structured block of 12 inputs; want x's 8"),
    ("sparse", 3, 1, "whose rows do not follow one another"),
    ("sparse", 16, 9, "names input 9; want it below x's 8"),
    ("mix", 2, 3, "mixes groups of 3 outputs; want an even divisor of 8"),
])  # fmt: skip
def test_refuses_what_only_the_cpu_sees(structure, place, value, message):
    """``place``: of the block's int32 words; the sparse one's columns begin after 4 words more than its 9 bounds."""
    arena = Arena(torch.float32, torch.Generator().manual_seed(0))
    made = {
        "kronecker": Kronecker(arena.random(2, 2), arena.random(4, 4)),
        "sparse": Sparse(torch.tensor([0, 3]), torch.tensor([1, 2]), torch.ones(2), (8, 8)),
        "mix": Mix(torch.ones(8), torch.ones(8), 4),
    }[structure]
    given = one_structure(made, torch.float32, "cpu", inputs=8, outputs=8)
    ops.structured(**given)
    begin = int(given["table"][0, 0, layout.STRUCTURE])
    words = given["arena"][begin:].view(torch.int32)
    words[layout.STRUCTURE_HEADER + 12 if place == 16 else place] = value
    with pytest.raises(RuntimeError, match=message):
        ops.structured(**given)
