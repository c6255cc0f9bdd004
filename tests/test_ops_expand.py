import pytest
import torch
from ops_cases import COLUMNS, DEVICES, SHAPES, Case, activations, cases, row_slots, shrink_arguments, world_of
from ops_checks import check_update, on_cpu, one_row, oracle, same_bits

from scute_sgl import ops, reference


def arguments(case: Case) -> dict:
    """Reads the reference's partial sums; y is wider than its slices."""
    given = shrink_arguments(case)
    v = reference.shrink(**on_cpu(given)).float().to(case.device)
    del given["x"], given["slices"]
    return given | {"v": v, "columns": COLUMNS, "y": activations(case, COLUMNS[-1] + 3, seed=2)}


@pytest.mark.parametrize("case", cases(*SHAPES), ids=str)
def test_is_the_reference(case):
    given = arguments(case)
    before, (want, terms) = given["y"].clone(), oracle(reference.expand, given, case.dtype)
    ops.expand(**given)
    check_update(given["y"], before, want, terms)


@pytest.mark.parametrize("case", cases(Case(520, 20, 64, "skewed", tile_rows=64, split=True)), ids=str)
def test_neighbours_change_no_bit(case):
    given, row_slot, slots = arguments(case), row_slots(case), world_of(case).slots
    alone = {row: one_row(given, row, row_slot, slots) for row in range(0, case.rows, 7)}
    ops.expand(**given)
    for row, row_arguments in alone.items():
        ops.expand(**row_arguments)
        assert same_bits(given["y"][row : row + 1], row_arguments["y"])


@pytest.mark.parametrize("device", DEVICES)
def test_empty(device):
    ops.expand(**arguments(Case(24, 8, 0, "base", device=device)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "change, message",
    [
        (lambda a: a | {"y": a["y"].double()}, "y is Double; want Float, Half or BFloat16"),
        (lambda a: a | {"y": a["y"].T.contiguous().T}, "y has strides .*; want its last dimension contiguous"),
        (lambda a: a | {"columns": (0,)}, "columns has 1 bounds; want one more than slices"),
        (lambda a: a | {"columns": (0, 9, 8, 9)}, r"columns is \[0, 9, 8, 9\]; want ascending bounds within y's 176"),
        (lambda a: a | {"columns": (0, 1, 2, 177)}, "columns is .*; want ascending bounds within y's 176 columns"),
        (lambda a: a | {"columns": (-1, 1, 2, 3)}, "columns is .*; want ascending bounds"),
        (lambda a: a | {"v": a["v"].double()}, "v is Double; want Float"),
        (lambda a: a | {"v": a["v"][:0]}, "v has 0 chunks; want 1"),
        (lambda a: a | {"y": a["y"][:5]}, r"plan has shape \[86\]; want \[66\]"),
        (lambda a: a | {"module": 4}, "modules 4 to 6 are asked for; want them within table's 6"),
    ],
)
def test_refusals(device, change, message):
    with pytest.raises(RuntimeError, match=message):
        ops.expand(**change(arguments(Case(24, 8, 7, "distinct", device=device))))
