import pytest
import torch
from ops_cases import (
    DEVICES, DTYPES, IN_BEGIN, SHAPES, Case, cases, partials, row_slots, shrink_arguments, world_of,
)  # fmt: skip
from ops_checks import check_close, one_row, oracle, same_bits

from scute_sgl import layout, ops, reference


def arguments(case: Case) -> dict:
    return shrink_arguments(case) | {
        "row_slot": row_slots(case),
        "sets": world_of(case).sets,
        "in_begin": IN_BEGIN,
        "v": partials(case, slices=1),
    }


def check_sums(v: torch.Tensor, want: torch.Tensor, terms: torch.Tensor) -> None:
    """Chunks after the first are scratch."""
    check_close(v[0], want[0], terms[0], torch.float32)


@pytest.mark.parametrize("case", cases(*SHAPES), ids=str)
def test_is_the_reference(case):
    given = arguments(case)
    want, terms = oracle(reference.project, given, case.dtype)
    ops.project(**given)
    check_sums(given["v"], want, terms)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_neighbours_change_no_bit(device, dtype, split):
    case = Case(2056, 20, 64, "skewed", tile_rows=64, split=split, dtype=dtype, device=device)
    given, slots = arguments(case), world_of(case).slots
    alone = {row: one_row(given, row, given["row_slot"], slots) for row in range(0, case.rows, 7)}
    ops.project(**given)
    for row, row_arguments in alone.items():
        ops.project(**row_arguments)
        assert same_bits(given["v"][0, row : row + 1], row_arguments["v"][0])


@pytest.mark.parametrize("tile_rows", [8, 64])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_a_set_smaller_than_a_layer_that_none_of_its_tenants_adapts(device, dtype, tile_rows):
    given = arguments(Case(520, 8, 7, "distinct", tile_rows=tile_rows, dtype=dtype, device=device))
    table, sets = given["table"].clone(), given["sets"].clone()
    table[..., layout.D] = table[..., layout.E] = -1
    sets[:, layout.SET_IN], sets[:, layout.SET_OUT] = 8, 8
    ops.project(**given | {"table": table, "sets": sets})
    assert given["v"].isnan().all()


@pytest.mark.parametrize("device", DEVICES)
def test_empty(device):
    ops.project(**arguments(Case(24, 8, 0, "base", device=device)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "change, message",
    [
        (lambda a: a | {"x": a["x"].long()}, "x is Long; want Float, Half or BFloat16"),
        (lambda a: a | {"x": a["x"][:6]}, r"row_slot has shape \[7\]; want \[6\]"),
        (lambda a: a | {"row_slot": a["row_slot"].long()}, "row_slot is Long; want Int"),
        (lambda a: a | {"row_slot": a["row_slot"][1:]}, r"row_slot has shape \[6\]; want \[7\]"),
        (lambda a: a | {"sets": a["sets"].int()}, "sets is Int; want Long"),
        (lambda a: a | {"sets": a["sets"][:, :4]}, r"sets has shape \[2, 4\]; want \[-1, 5\]"),
        (lambda a: a | {"slices": 5}, "slices is 5; want 1 to 4"),
        (lambda a: a | {"in_begin": 4}, "in_begin is 4; want a multiple of 8"),
        (lambda a: a | {"v": a["v"].half()}, "v is Half; want Float"),
        (lambda a: a | {"v": a["v"].repeat(2, 1, 1)}, "v has 2 chunks; want 1, or one for every 1024 inputs"),
        (lambda a: a | {"v": a["v"][:, :6].contiguous()}, "v has 6 rows; want at least 7"),
    ],
)
def test_refusals(device, change, message):
    with pytest.raises(RuntimeError, match=message):
        ops.project(**change(arguments(Case(24, 8, 7, "distinct", device=device))))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda a: a | {"in_begin": 32}, "x has the set's inputs 32 to 56; want them within the 48 of shared set \\d"),
        (lambda a: a | {"v": a["v"][..., :4].contiguous()}, "shared set \\d has rank 8; .* within v's 4 columns"),
        (lambda a: a | {"sets": a["sets"][:1]}, "the plan names shared set 1; want it below sets' 1"),
    ],
)
def test_refuses_what_only_the_cpu_sees(change, message):
    with pytest.raises(RuntimeError, match=message):
        ops.project(**change(arguments(Case(24, 8, 7, "distinct"))))
