import pytest
import torch
from ops_cases import DEVICES, NO_PLAN, Case, make_plan, row_slots, world

from scute_sgl import layout, ops, reference

pytestmark = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture
def slots(device):
    return world(torch.float32, 24, 8, device).slots


def used(plan: torch.Tensor) -> list:
    """The words of a plan that mean something."""
    plan = plan.cpu()
    lists = [[(key, rows.tolist()) for key, rows in reference.tenants(plan, shared)] for shared in (False, True)]
    return [plan[:3].tolist(), *lists]


@pytest.mark.parametrize("popularity", ["base", "distinct", "uniform", "skewed"])
@pytest.mark.parametrize("rows", [0, 1, 7, 64, 133, 2100])
@pytest.mark.parametrize("tile_rows", [8, 64])
def test_is_the_reference(device, slots, popularity, rows, tile_rows):
    row_slot = row_slots(Case(24, 8, rows, popularity, device=device))
    blank = torch.full((layout.plan_size(rows),), NO_PLAN, dtype=torch.int32)
    want = reference.plan(row_slot.cpu(), slots.cpu(), tile_rows, blank)
    assert used(make_plan(row_slot, slots, tile_rows)) == used(want)


def test_spelled_out(device, slots):
    # In the zoo, slot 0 has private slots, 3 is in set 1, 5 has both and is in set 1, 4 has nothing.
    row_slot = torch.tensor([5, 0, -1, 4, 0, 3, 5, 0], dtype=torch.int32, device=device)
    header, private, shared = used(make_plan(row_slot, slots, 8))
    assert private == [(0, [1, 4, 7]), (5, [0, 6])]
    assert shared == [(1, [0, 5, 6])]
    assert header == [2, 1, layout.DELTA | layout.SHARED | layout.ROTATED]


def test_slot_past_the_table(device, slots):
    row_slot = torch.tensor([0, len(slots)], dtype=torch.int32, device=device)
    if device == "cpu":
        with pytest.raises(RuntimeError, match=r"row_slot\[1\] is 7; want it below the 7 slots"):
            make_plan(row_slot, slots, 8)
    else:  # the host cannot know; the row is nobody's
        assert used(make_plan(row_slot, slots, 8))[1] == [(0, [0])]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda a: a | {"row_slot": a["row_slot"].long()}, "row_slot is Long; want Int"),
        (lambda a: a | {"slots": a["slots"].float()}, "slots is Float; want Int"),
        (lambda a: a | {"slots": a["slots"][:, :1]}, r"slots has shape \[7, 1\]; want \[-1, 2\]"),
        (lambda a: a | {"slots": a["slots"].T.contiguous().T}, r"slots has strides \[1, 7\]; want it contiguous"),
        (lambda a: a | {"plan": a["plan"][1:]}, r"plan has shape \[45\]; want \[46\]"),
        (lambda a: a | {"tile_rows": 0}, "tile_rows is 0; want at least 1"),
    ],
)
def test_refusals(device, slots, change, message):
    row_slot = row_slots(Case(24, 8, 3, "distinct", device=device))
    plan = torch.zeros(layout.plan_size(3), dtype=torch.int32, device=device)
    with pytest.raises(RuntimeError, match=message):
        ops.plan(**change({"row_slot": row_slot, "slots": slots, "tile_rows": 8, "plan": plan}))
