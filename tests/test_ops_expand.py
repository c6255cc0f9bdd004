import pytest
import torch
from ops_cases import (
    COLUMNS, DEVICES, DTYPES, IN_BEGIN, OUT_BEGIN, SHAPES, Arena, Case, activations, cases, make_plan, partials,
    row_slots, shrink_arguments, world_of,
)  # fmt: skip
from ops_checks import check_neighbours, check_update, on_cpu, oracle

from scute_sgl import layout, ops, reference


def arguments(case: Case) -> dict:
    """Reads the reference's partial sums; y is wider than its slices."""
    given, sets, row_slot = shrink_arguments(case), world_of(case).sets, row_slots(case)
    shared = given | {"row_slot": row_slot, "sets": sets, "in_begin": IN_BEGIN, "v": partials(case, slices=1)}
    v, shared_v = reference.shrink(**on_cpu(given)), reference.project(**on_cpu(shared))
    del given["x"], given["slices"]
    return given | {
        "v": v.float().to(case.device),
        "shared_v": shared_v.float().to(case.device),
        "row_slot": row_slot,
        "sets": sets,
        "columns": COLUMNS,
        "out_begin": OUT_BEGIN,
        "y": activations(case, COLUMNS[-1] + 3, seed=2),
    }


@pytest.mark.parametrize("case", cases(*SHAPES), ids=str)
def test_is_the_reference(case):
    given = arguments(case)
    before, (want, terms) = given["y"].clone(), oracle(reference.expand, given, case.dtype)
    ops.expand(**given)
    check_update(given["y"], before, want, terms)


@pytest.mark.parametrize("absent", [("v",), ("shared_v",), ("v", "shared_v")], ids=" ".join)
@pytest.mark.parametrize("case", cases(Case(24, 8, 7, "distinct"), Case(520, 20, 133, "skewed", tile_rows=64)), ids=str)
def test_sums_that_are_absent_leave_their_tenants_alone(case, absent):
    given = arguments(case) | dict.fromkeys(absent)
    before, (want, terms) = given["y"].clone(), oracle(reference.expand, given, case.dtype)
    changed = (want != before.cpu().double()).any(1)
    live = world_of(case).slots[:, layout.LIVE].cpu()[given["row_slot"].cpu().long()] * (given["row_slot"].cpu() >= 0)
    shared, own = live & layout.SHARED > 0, live & (layout.SHARED | layout.DELTA) == layout.DELTA
    assert torch.equal(changed, own & ("v" not in absent) | shared & ("shared_v" not in absent))
    ops.expand(**given)
    check_update(given["y"], before, want, terms)


@pytest.mark.parametrize("case", cases(Case(2056, 20, 64, "skewed", tile_rows=64, split=True)), ids=str)
def test_neighbours_change_no_bit(case):
    given, slots = arguments(case), world_of(case).slots
    check_neighbours(ops.expand, given, slots, range(0, case.rows, 7))


@pytest.mark.parametrize("tile_rows", [8, 64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
def test_all_is_rounded_once(device, dtype, tile_rows):
    """y has no room for + 1 / 2, nor for + 1, but for their sum. Tenant 0 has its own factors, tenant 1 shared ones."""
    outputs, arena = 72, Arena(dtype, torch.Generator())
    half, one = layout.pack_b(torch.full((outputs, 1), 0.5)), torch.ones(outputs)
    table = torch.full((2, 1, layout.FIELDS), -1)
    table[0, 0, layout.B], table[0, 0, layout.META] = arena.put(half), layout.pack_meta(8)
    table[1, 0, layout.D], table[1, 0, layout.E] = arena.put(torch.ones(8)), arena.put(one)
    table[:, 0, layout.BIAS] = arena.put(one)
    sets = torch.tensor([[-1, arena.put(half), 8, 8, outputs]], device=device)
    arena.fill(layout.BLOCK)
    slots = torch.tensor([[layout.DELTA, -1, 8], [layout.SHARED, 0, 8]], dtype=torch.int32, device=device)
    row_slot = torch.tensor([0, 1, -1], dtype=torch.int32, device=device)
    large, v = 2 / torch.finfo(dtype).eps, torch.ones(1, 3, 8, device=device)
    y = torch.full((3, outputs), large, dtype=dtype, device=device)
    plan, arena = make_plan(row_slot, slots, tile_rows), torch.cat(arena.pieces).to(device)
    ops.expand(v, v, row_slot, arena, table.to(device), sets, plan, tile_rows, 0, [0, outputs], [0], y)
    want = torch.tensor([large + 2, large + 2, large])
    assert torch.equal(y.cpu().float(), want[:, None].expand_as(y))


@pytest.mark.parametrize("tile_rows", [8, 64])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_beside_a_tenant_of_the_set_that_leaves_the_layer_alone(device, dtype, tile_rows):
    """Slots 2 and 6 share tiles; nothing was summed for 6, whose scale and bias are still applied."""
    case = Case(24, 20, 64, "uniform", tile_rows=tile_rows, dtype=dtype, device=device)
    given, before = arguments(case), activations(case, COLUMNS[-1] + 3, seed=2)
    assert {2, 6} <= set(given["row_slot"].tolist())
    given["table"] = given["table"].clone()
    given["table"][6, :, layout.D] = given["table"][6, :, layout.E] = -1
    given["shared_v"][:, : case.rows][:, given["row_slot"] == 6] = torch.nan
    want, terms = oracle(reference.expand, given, case.dtype)
    ops.expand(**given)
    check_update(given["y"], before, want, terms)
    assert not want.isnan().any()


@pytest.mark.parametrize("tile_rows", [8, 64])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_a_set_smaller_than_a_layer_that_none_of_its_tenants_adapts(device, dtype, tile_rows):
    """What such a tenant has besides, scale and bias, is still applied."""
    case = Case(520, 8, 7, "distinct", tile_rows=tile_rows, dtype=dtype, device=device)
    given, before = arguments(case), activations(case, COLUMNS[-1] + 3, seed=2)
    given["table"], given["sets"] = given["table"].clone(), given["sets"].clone()
    given["table"][..., layout.D] = given["table"][..., layout.E] = -1
    want, terms = oracle(reference.expand, given, case.dtype)
    given["sets"][:, layout.SET_IN], given["sets"][:, layout.SET_OUT] = 8, 8
    given["shared_v"].fill_(torch.nan)
    ops.expand(**given)
    check_update(given["y"], before, want, terms)
    assert (want != before.cpu().double()).any(1).tolist() == [True, True, True, False, False, True, True]


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
        (lambda a: a | {"v": a["v"][:, :, 1:].contiguous()}, "v has 47 columns; want a multiple of 4 for each of the 3 slices"),
        (lambda a: a | {"shared_v": a["shared_v"].double()}, "v is Double; want Float"),
        (lambda a: a | {"shared_v": a["shared_v"][:, :6].contiguous()}, "v has 6 rows; want at least 7"),
        (lambda a: a | {"y": a["y"][:5]}, r"row_slot has shape \[7\]; want \[5\]"),
        (lambda a: a | {"row_slot": a["row_slot"].long()}, "row_slot is Long; want Int"),
        (lambda a: a | {"plan": a["plan"][1:]}, "plan has shape .*; want .*2134"),
        (lambda a: a | {"sets": a["sets"].int()}, "sets is Int; want Long"),
        (lambda a: a | {"sets": a["sets"][:, :4]}, r"sets has shape \[2, 4\]; want \[-1, 5\]"),
        (lambda a: a | {"module": 4}, "modules 4 to 6 are asked for; want them within table's 6"),
        (lambda a: a | {"out_begin": (0, 0)}, "out_begin has 2 entries; want 3, one a slice"),
        (lambda a: a | {"out_begin": (0, -1, 0)}, "out_begin is .*; want no negative entry"),
    ],
)
def test_refusals(device, change, message):
    with pytest.raises(RuntimeError, match=message):
        ops.expand(**change(arguments(Case(24, 8, 7, "distinct", device=device))))


ONLY_THE_CPU_SEES = [
    (lambda a: a | {"out_begin": (0, 0, 140)}, "slice 2 has the set's outputs 140 to 153; want .* 144"),
    (lambda a: a | {"v": a["v"][..., :12].contiguous()}, "v has 4 columns a slice; want .* rank 8 of slot \\d"),
    (lambda a: a | {"shared_v": a["shared_v"][..., :4].contiguous()}, "set \\d has rank 8; .* within v's 4 columns"),
    (lambda a: a | {"sets": a["sets"][:1]}, "the plan names shared set 1; want it below sets' 1"),
]


@pytest.mark.parametrize("change, message", ONLY_THE_CPU_SEES)
def test_refuses_what_only_the_cpu_sees(change, message):
    with pytest.raises(RuntimeError, match=message):
        ops.expand(**change(arguments(Case(24, 8, 7, "distinct"))))
