from dataclasses import fields, replace
from functools import lru_cache
from itertools import pairwise

import pytest
import structured_cases
import torch
from ops_cases import DEVICES, DTYPES, MODULE, Arena, Case, World, cases
from ops_checks import check_neighbours, check_update, on_cpu, same_bits
from structured_cases import make_world

from scute_sgl import layout, ops, reference
from scute_sgl.reference_reads import Entry, of_weight
from scute_sgl.slots import Hadamard
from scute_sgl.structured import OF_WEIGHT

WIDTHS = (136, 24, 13)  # of the last no block but 1 x 1 is a divisor
COLUMNS = (0, 136, 160, 173)
SHAPES = (
    Case(8, 1, 1, "distinct"),
    Case(24, 3, 7, "distinct"),
    Case(24, 8, 64, "base"),
    Case(1032, 5, 64, "skewed"),
    Case(1544, 33, 133, "uniform"),
    Case(520, 2, 300, "uniform"),  # a CTA takes several rows
    Case(264, 16, 261, "skewed"),
)
TENANTS = [  # what each has in the three slices; "" is nothing, and other structures are another op's
    ("hadamard", "hadamard", "hadamard"), ("low", "", "hadamard"), ("sparse", "kronecker", "sparse"),
    ("", "", ""), ("mix", "low", "few"), ("hadamard", "block_affine", "low"),
    ("block_affine", "block_affine", "block_affine"), ("block_affine", "", "hadamard"),
]  # fmt: skip


@lru_cache(maxsize=2)
def world(dtype: torch.dtype, inputs: int, rank: int, device: str) -> World:
    return make_world(TENANTS, WIDTHS, dtype, inputs, rank, device)


def weights(case: Case, std: float = 0.1) -> torch.Tensor:
    """(more rows than columns, in), the rows further apart than they are long, and NaN in between."""
    rows, random = COLUMNS[-1] + 5, torch.Generator().manual_seed(7)
    wide = torch.full((rows, case.inputs + 16), torch.nan)
    wide[: COLUMNS[-1], 8 : 8 + case.inputs] = std * torch.randn(COLUMNS[-1], case.inputs, generator=random)
    return wide.to(case.dtype).to(case.device)[:, 8 : 8 + case.inputs]


def arguments(case: Case) -> dict:
    """The weight has more rows than y has columns."""
    made = world(case.dtype, case.inputs, case.rank, case.device)
    return structured_cases.arguments(case, made, COLUMNS, favourite=0) | {"weight": weights(case)}


def oracle(given: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """What the reference computes, and its sums of absolute terms."""
    given = on_cpu(given)
    terms = given["y"].double().abs()
    for slot in given["row_slot"].clamp(min=0).unique().tolist():
        rows = (given["row_slot"] == slot).nonzero().flatten()
        for i, (begin, end) in enumerate(pairwise(given["columns"])):
            entry = Entry(given["arena"], given["table"], given["x"].dtype, slot, given["module"] + i)
            if isinstance(s := entry.structure(), OF_WEIGHT):
                s = replace(s, **{f.name: getattr(s, f.name).double().abs() for f in fields(s)})
                S = of_weight(s, given["weight"][begin:end].double().abs())
                terms[rows, begin:end] += given["x"][rows].double().abs() @ S.T
    return reference.reweigh(**given), terms


@pytest.mark.parametrize("case", cases(*SHAPES), ids=str)
def test_is_the_reference(case):
    given = arguments(case)
    before, (want, terms) = given["y"].clone(), oracle(given)
    ops.reweigh(**given)
    check_update(given["y"], before, want, terms)
    assert case.popularity == "base" or not torch.equal(given["y"], before)


@pytest.mark.parametrize("case", cases(Case(520, 3, 64, "distinct"), Case(1032, 8, 300, "uniform")), ids=str)
def test_neighbours_change_no_bit(case):
    """But for a count of rows at which the kernel takes several at a time, of which a row's sum does not depend."""
    given = arguments(case)
    slots = world(case.dtype, case.inputs, case.rank, case.device).slots
    check_neighbours(ops.reweigh, given, slots, range(0, case.rows, 13))


@pytest.mark.parametrize("case", cases(Case(24, 5, 64, "uniform"), Case(264, 16, 300, "uniform")), ids=str)
def test_other_structures_are_not_mistaken_for_it_nor_it_for_them(case):
    """Rows of tenants with both kinds, one op after the other, are the sum of what the two do."""
    given = arguments(case)
    others = {name: value for name, value in given.items() if name != "weight"}
    rows = torch.isin(given["row_slot"], torch.tensor([0, 3, -1], device=case.device, dtype=torch.int32))
    before = given["y"].clone()
    ops.structured(**others)
    assert same_bits(given["y"][rows], before[rows]) and not torch.equal(given["y"], before)
    given["y"].copy_(before)
    ops.reweigh(**given)
    rows = given["row_slot"] == 2
    assert rows.any() and same_bits(given["y"][rows], before[rows])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shift", ["x", "weight", "both"])
def test_rows_that_begin_anywhere(device, dtype, shift):
    case = Case(24, 8, 7, "distinct", dtype=dtype, device=device)
    given = arguments(case)
    for name in ("x", "weight"):
        if shift in (name, "both"):
            held = given[name]
            moved = torch.empty(held.shape[0], held.shape[1] + 3, dtype=dtype, device=device)[:, 1:-2]
            given[name] = moved.copy_(held)
    before, (want, terms) = given["y"].clone(), oracle(given)
    ops.reweigh(**given)
    check_update(given["y"], before, want, terms)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
def test_all_is_rounded_once(device, dtype):
    """y has no room for + 1 / 2, but for the sum of four of them; W o BA is beyond the dtype's range or precision."""
    large, inputs = 2 / torch.finfo(dtype).eps, 8
    arena = Arena(dtype, torch.Generator().manual_seed(0))
    table = torch.full((1, 1, layout.FIELDS), -1, dtype=torch.int64)
    A, B = torch.full((2, inputs), 2.0**8), torch.tensor([[2.0**8, 1.0], [2.0**8, -(2.0**8)]])
    table[0, 0, layout.STRUCTURE] = arena.put_structure(Hadamard(A, B))  # B A: 2^16 + 2^8, and 0
    arena.fill(layout.BLOCK)
    x = torch.tensor([[2.0**-17] * 4 + [0.0] * 4]).to(dtype).to(device)
    weight = torch.ones(2, inputs, dtype=dtype, device=device)
    y = torch.full((1, 2), large, dtype=dtype, device=device)
    row_slot = torch.zeros(1, dtype=torch.int32, device=device)
    arguments = (x, weight, row_slot, torch.cat(arena.pieces).to(device), table.to(device), 0, (0, 2), y)
    ops.reweigh(*arguments)
    assert y.tolist() == [[large + 2, large]]


@pytest.mark.parametrize("device", DEVICES)
def test_empty(device):
    ops.reweigh(**arguments(Case(24, 8, 0, "base", device=device)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "change, message",
    [
        (lambda a: a | {"x": a["x"].double()}, "x is Double; want Float, Half or BFloat16"),
        (lambda a: a | {"y": a["y"].half()}, "y is Half; want Float"),
        (lambda a: a | {"weight": a["weight"].half()}, "weight is Half; want Float"),
        (lambda a: a | {"weight": a["weight"][:, :16]}, r"weight has shape \[178, 16\]; want \[-1, 24\]"),
        (lambda a: a | {"weight": a["weight"][:172]}, "weight has 172 rows; want one for each of the 173 columns"),
        (lambda a: a | {"weight": a["weight"].T.contiguous().T}, "weight has strides .*; want its last dimension"),
        (lambda a: a | {"y": a["y"][:6]}, r"y has shape \[6, 176\]; want \[7, -1\]"),
        (lambda a: a | {"columns": (0, 1, 2, 177)}, "columns is .*; want ascending bounds within y's 176 columns"),
        (lambda a: a | {"row_slot": a["row_slot"][:6]}, r"row_slot has shape \[6\]; want \[7\]"),
        (lambda a: a | {"table": a["table"][..., :8].contiguous()}, r"table has shape .*; want \[-1, -1, 10\]"),
        (lambda a: a | {"module": 4}, "modules 4 to 6 are asked for; want them within table's 6"),
    ],
)
def test_refusals(device, change, message):
    with pytest.raises(RuntimeError, match=message):
        ops.reweigh(**change(arguments(Case(24, 8, 7, "distinct", device=device))))


@pytest.mark.parametrize("slot, word, value, message", [
    (0, 1, 7, "a structured block of 7 outputs; want slice 0's 136"),
    (0, 2, 16, "a structured block of 16 inputs; want x's 24"),
    (0, 3, 12, "a structured block has rank 12; want a multiple of 8"),
    (0, 3, 1 << 24, "table points at arena bytes"),
    (6, 1, 7, "a structured block of 7 outputs; want slice 0's 136"),
    (6, 2, 16, "a structured block has blocks of 16; want a divisor of 136 and 24, up to 1024"),
    (6, 2, 0, "a structured block has blocks of 0; want a divisor of"),
])  # fmt: skip
def test_refuses_what_only_the_cpu_sees(slot, word, value, message):
    given = arguments(Case(24, 8, 7, "distinct"))
    given["arena"] = given["arena"].clone()
    begin = int(given["table"][slot, MODULE, layout.STRUCTURE])
    given["arena"][begin : begin + 32].view(torch.int32)[word] = value
    with pytest.raises(RuntimeError, match=message):
        ops.reweigh(**given)
