import pytest
import torch
from ops_cases import DEVICES, MODULE, SHAPES, SLICES, Case, activations, cases, row_slots, world_of
from ops_checks import check_neighbours, check_update, oracle

from scute_sgl import ops, reference


def arguments(case: Case) -> dict:
    zoo = world_of(case)
    shape = SLICES, case.rows, case.inputs
    return {
        "x": activations(case, case.inputs, seed=1),
        "row_slot": row_slots(case),
        "arena": zoo.arena,
        "table": zoo.table,
        "module": MODULE,
        "slices": SLICES,
        "out": torch.full(shape, torch.nan, dtype=case.dtype, device=case.device),
    }


@pytest.mark.parametrize("case", cases(*SHAPES), ids=str)
def test_is_the_reference(case):
    given = arguments(case)
    want, terms = oracle(reference.rotate, given, case.dtype)
    ops.rotate(**given)
    check_update(given["out"], given["x"].expand_as(given["out"]), want, terms)


@pytest.mark.parametrize("case", cases(Case(520, 8, 64, "skewed")), ids=str)
def test_neighbours_change_no_bit(case):
    given, slots = arguments(case), world_of(case).slots
    check_neighbours(ops.rotate, given, slots, range(0, case.rows, 7), out="out", axis=1)


@pytest.mark.parametrize("device", DEVICES)
def test_empty(device):
    ops.rotate(**arguments(Case(24, 8, 0, "base", device=device)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "change, message",
    [
        (lambda a: a | {"out": a["out"].half()}, "out is Half; want Float"),
        (lambda a: a | {"out": a["out"][:2]}, r"out has shape \[2, 7, 24\]; want \[3, 7, 24\]"),
        (lambda a: a | {"out": a["out"].mT.contiguous().mT}, "out has strides .*; want it contiguous"),
        (lambda a: a | {"row_slot": a["row_slot"][:6]}, r"row_slot has shape \[6\]; want \[7\]"),
        (lambda a: a | {"module": 5}, "modules 5 to 7 are asked for; want them within table's 6"),
    ],
)
def test_refusals(device, change, message):
    with pytest.raises(RuntimeError, match=message):
        ops.rotate(**change(arguments(Case(24, 8, 7, "distinct", device=device))))


def test_refuses_what_only_the_cpu_sees():
    given = arguments(Case(24, 8, 7, "distinct"))
    with pytest.raises(RuntimeError, match="slot is 7; want it below table's 7"):
        ops.rotate(**given | {"row_slot": torch.full_like(given["row_slot"], 7)})
    with pytest.raises(RuntimeError, match="slot 5 has rotation blocks of 9; want a divisor of x's 24 columns"):
        table = given["table"].clone()
        table[5, MODULE + 1, 7] += 1 << 16
        ops.rotate(**given | {"table": table})
