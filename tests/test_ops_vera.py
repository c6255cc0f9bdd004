import pytest
import torch
from ops_cases import (
    COLUMNS, DEVICES, IN_BEGIN, OUT_BEGIN, SHAPES, Case, activations, cases, partials, row_slots, shrink_arguments,
    world_of,
)  # fmt: skip
from ops_checks import check_update, one_row, oracle, same_bits

from scute_sgl import layout, ops, reference


def arguments(case: Case) -> dict:
    given = shrink_arguments(case)
    del given["slices"]
    return given | {
        "row_slot": row_slots(case),
        "sets": world_of(case).sets,
        "columns": COLUMNS,
        "in_begin": IN_BEGIN,
        "out_begin": OUT_BEGIN,
        "v": partials(case, slices=1),
        "y": activations(case, COLUMNS[-1] + 3, seed=2),
    }


@pytest.mark.parametrize("case", cases(*SHAPES), ids=str)
def test_is_the_reference(case):
    given = arguments(case)
    before, (want, terms) = given["y"].clone(), oracle(reference.vera, given, case.dtype)
    ops.vera(**given)
    check_update(given["y"], before, want[1], terms[1])


@pytest.mark.parametrize("case", cases(Case(520, 20, 64, "skewed", tile_rows=64, split=True)), ids=str)
def test_neighbours_change_no_bit(case):
    given, slots = arguments(case), world_of(case).slots
    alone = {row: one_row(given, row, given["row_slot"], slots) for row in range(0, case.rows, 7)}
    ops.vera(**given)
    for row, row_arguments in alone.items():
        ops.vera(**row_arguments)
        assert same_bits(given["y"][row : row + 1], row_arguments["y"])


@pytest.mark.parametrize("device", DEVICES)
def test_a_set_smaller_than_a_layer_that_none_of_its_tenants_adapts(device):
    given = arguments(Case(520, 8, 7, "distinct", device=device))
    table, sets, before = given["table"].clone(), given["sets"].clone(), given["y"].clone()
    table[..., layout.D] = table[..., layout.E] = -1
    sets[:, layout.SET_IN], sets[:, layout.SET_OUT] = 8, 8
    ops.vera(**given | {"table": table, "sets": sets})
    assert same_bits(given["y"], before)


@pytest.mark.parametrize("device", DEVICES)
def test_empty(device):
    ops.vera(**arguments(Case(24, 8, 0, "base", device=device)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "change, message",
    [
        (lambda a: a | {"x": a["x"].long()}, "x is Long; want Float, Half or BFloat16"),
        (lambda a: a | {"y": a["y"].half()}, "y is Half; want Float"),
        (lambda a: a | {"y": a["y"][:6]}, r"y has shape .*; want \[7, -1\]"),
        (lambda a: a | {"row_slot": a["row_slot"].long()}, "row_slot is Long; want Int"),
        (lambda a: a | {"row_slot": a["row_slot"][1:]}, r"row_slot has shape \[6\]; want \[7\]"),
        (lambda a: a | {"sets": a["sets"].int()}, "sets is Int; want Long"),
        (lambda a: a | {"sets": a["sets"][:, :4]}, r"sets has shape \[2, 4\]; want \[-1, 5\]"),
        (lambda a: a | {"in_begin": 4}, "in_begin is 4; want a multiple of 8"),
        (lambda a: a | {"out_begin": (0, 0)}, "out_begin has 2 entries; want 3, one a slice"),
        (lambda a: a | {"out_begin": (0, -1, 0)}, "out_begin is .*; want no negative entry"),
    ],
)
def test_refusals(device, change, message):
    with pytest.raises(RuntimeError, match=message):
        ops.vera(**change(arguments(Case(24, 8, 7, "distinct", device=device))))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda a: a | {"in_begin": 32}, "x has the set's inputs 32 to 56; want them within the 48 of shared set 0"),
        (lambda a: a | {"out_begin": (0, 0, 140)}, "slice 2 has the set's outputs 140 to 153; want .* 144"),
        (lambda a: a | {"v": a["v"][..., :4].contiguous()}, "shared set 0 has rank 8; .* within v's 4 columns"),
        (lambda a: a | {"sets": a["sets"][:1]}, "the plan names shared set 1; want it below sets' 1"),
    ],
)
def test_refuses_what_only_the_cpu_sees(change, message):
    with pytest.raises(RuntimeError, match=message):
        ops.vera(**change(arguments(Case(24, 8, 7, "distinct"))))
