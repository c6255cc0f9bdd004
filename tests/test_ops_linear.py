from dataclasses import replace

import pytest
import test_ops_expand
import torch
from ops_cases import COLUMNS, DEVICES, DTYPES, SLICES, Case, activations, cases, make_plan, world_of
from ops_checks import FLOAT32_SUM, check_close, on_cpu, oracle, same_bits, ulp
from test_ops_expand import ONLY_THE_CPU_SEES
from test_ops_reweigh import weights

from scute_sgl import layout, ops, reference

HERE = [device for device in DEVICES if device == "cpu" or ops.linear_runs(torch.device(device))]
SHAPES = (
    Case(8, 1, 1, "distinct"),
    Case(40, 3, 7, "distinct"),
    Case(136, 8, 8, "uniform"),
    Case(24, 8, 9, "base"),
    Case(1032, 16, 16, "skewed", split=True),
    Case(520, 20, 20, "distinct"),
    Case(1544, 64, 24, "uniform", split=True),
    Case(4096, 256, 24, "distinct", split=True),
    Case(2056, 16, 24, "one", split=True),
    Case(24, 8, 133, "skewed"),
)


def linear_cases(*shapes: Case) -> list[Case]:
    """CUDA has the op for 16 bits and few rows."""
    on_gpu = "cuda" in HERE
    return [
        case
        for case in cases(*shapes)
        if case.device == "cpu" or on_gpu and case.dtype != torch.float32 and case.rows <= layout.LINEAR_ROWS
    ]


def arguments(case: Case, own: bool = False, bias: bool = True) -> dict:
    """Those of expand but its plan, and a base; ``own``: each slice has an input of its own. y is NaN, and wider."""
    given = test_ops_expand.arguments(case)
    del given["plan"], given["tile_rows"]
    inputs = SLICES if own else 1
    x = activations(replace(case, rows=inputs * case.rows), case.inputs, seed=3)
    b = torch.randn(COLUMNS[-1], generator=torch.Generator().manual_seed(4)).to(case.dtype).to(case.device)
    y = torch.full((case.rows, COLUMNS[-1] + 19), torch.nan, dtype=case.dtype, device=case.device)
    return given | {
        "x": x.unflatten(0, (inputs, case.rows)),
        "weight": weights(case)[: COLUMNS[-1]],
        "bias": b if bias else None,
        "slots": world_of(case).slots,
        "y": y[:, 8 : 8 + COLUMNS[-1]],
    }


def check_linear(given: dict) -> None:
    y, dtype = given["y"], given["y"].dtype
    want, terms = oracle(reference.linear, given, dtype)
    if y.device.type == "cpu":  # rounds z first, which a tenant's scale then multiplies
        z = reference.linear(**given | {"v": None, "shared_v": None})
        terms = terms + 4 * ulp(z, dtype) / FLOAT32_SUM
    ops.linear(**given)
    check_close(y, want, terms, dtype)
    assert not want.isnan().any() and y._base[:, :8].isnan().all() and y._base[:, 8 + y.shape[1] :].isnan().all()


@pytest.mark.parametrize("own, bias", [(False, True), (False, False), (True, True)])
@pytest.mark.parametrize("case", linear_cases(*SHAPES), ids=str)
def test_is_the_reference(case, own, bias):
    check_linear(arguments(case, own, bias))


@pytest.mark.parametrize("absent", [("v",), ("shared_v",), ("v", "shared_v")], ids=" ".join)
@pytest.mark.parametrize("case", linear_cases(Case(24, 8, 7, "distinct"), Case(520, 20, 24, "skewed")), ids=str)
def test_sums_that_are_absent_leave_their_tenants_the_base(case, absent):
    given = arguments(case) | dict.fromkeys(absent)
    check_linear(given)
    base = given | {"row_slot": torch.full_like(given["row_slot"], -1), "y": torch.empty_like(given["y"])}
    ops.linear(**base)
    kept = (given["y"] == base["y"]).all(1).cpu()
    slot = given["row_slot"].cpu()
    live = world_of(case).slots[:, layout.LIVE].cpu()[slot.long()] * (slot >= 0)
    shared, private = live & layout.SHARED > 0, live & (layout.SHARED | layout.DELTA) == layout.DELTA
    assert torch.equal(~kept, private & ("v" not in absent) | shared & ("shared_v" not in absent))


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("case", linear_cases(Case(520, 20, 20, "distinct"), Case(1032, 64, 133, "skewed")), ids=str)
def test_neighbours_change_no_bit(case, own):
    """Every other row becomes one of nobody's."""
    given = arguments(case, own)
    ops.linear(**given)
    for row in range(0, case.rows, 7):
        row_slot = torch.full_like(given["row_slot"], -1)
        row_slot[row] = given["row_slot"][row]
        alone = given | {"row_slot": row_slot, "y": torch.empty_like(given["y"])}
        ops.linear(**alone)
        assert same_bits(given["y"][row], alone["y"][row])


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[4], SHAPES[9]], ids=str)
def test_on_the_cpu_it_is_torchs_and_expand(shape, dtype, own):
    given = arguments(replace(shape, dtype=dtype), own)
    x, weight, bias, slots, y = (given[name] for name in ("x", "weight", "bias", "slots", "y"))
    listed = {"plan": make_plan(given["row_slot"], slots, 8), "tile_rows": 8}
    z = torch.nn.functional.linear(x[0], weight, bias)
    if own:
        for i, (begin, end) in enumerate(zip(COLUMNS, COLUMNS[1:])):
            z[:, begin:end] = torch.nn.functional.linear(x[i], weight[begin:end], bias[begin:end])
    expanding = {name: value for name, value in given.items() if name not in ("x", "weight", "bias", "slots")}
    ops.expand(**expanding | listed | {"y": z})
    ops.linear(**given)
    assert same_bits(y, z)


@pytest.mark.parametrize("case", linear_cases(Case(24, 20, 24, "uniform"), Case(520, 20, 24, "distinct")), ids=str)
def test_beside_a_tenant_of_the_set_that_leaves_the_layer_alone(case):
    """Slots 2 and 6 have one set; nothing was summed for 6, whose scale and bias are still applied."""
    given = arguments(case)
    assert {2, 6} <= set(given["row_slot"].tolist())
    given["table"] = given["table"].clone()
    given["table"][6, :, layout.D] = given["table"][6, :, layout.E] = -1
    given["shared_v"][:, : case.rows][:, given["row_slot"] == 6] = torch.nan
    check_linear(given)


@pytest.mark.parametrize("case", linear_cases(Case(40, 8, 7, "distinct")), ids=str)
def test_a_set_smaller_than_a_layer_that_none_of_its_tenants_adapts(case):
    given = arguments(case)
    given["table"], given["sets"] = given["table"].clone(), given["sets"].clone()
    given["table"][..., layout.D] = given["table"][..., layout.E] = -1
    given["shared_v"].fill_(torch.nan)
    want, terms = oracle(reference.linear, given, case.dtype)
    z = reference.linear(**on_cpu(given) | {"v": None, "shared_v": None})
    given["sets"][:, layout.SET_IN], given["sets"][:, layout.SET_OUT] = 8, 8
    ops.linear(**given)
    check_close(given["y"], want, terms + 4 * ulp(z, case.dtype) / FLOAT32_SUM, case.dtype)


@pytest.mark.parametrize("case", linear_cases(Case(40, 8, 7, "distinct")), ids=str)
def test_a_weight_that_is_a_parameter(case):
    given = arguments(case)
    given |= {name: torch.nn.Parameter(given[name]) for name in ("weight", "bias")}
    ops.linear(**given)
    assert not given["y"].requires_grad


@pytest.mark.parametrize("device", HERE)
def test_empty(device):
    case = Case(24, 8, 0, "base", dtype=torch.float16, device=device)
    for own in (False, True):
        ops.linear(**arguments(case, own))


@pytest.mark.parametrize("device", HERE)
@pytest.mark.parametrize(
    "change, message",
    [
        (lambda a: a | {"x": a["x"].double()}, "x is Double; want Float, Half or BFloat16"),
        (lambda a: a | {"x": a["x"][0]}, r"x has shape \[7, 24\]; want \[-1, -1, -1\]"),
        (lambda a: a | {"x": a["x"].mT.contiguous().mT}, "x has strides .*; want its last dimension contiguous"),
        (lambda a: a | {"x": a["x"][..., :20]}, "x has 20 columns; want a positive multiple of 8"),
        (lambda a: a | {"x": a["x"].repeat(2, 1, 1)}, "x has 2 inputs; want 1, or one for each of the 3 slices"),
        (lambda a: a | {"x": a["x"][:, :6]}, r"y has shape \[7, 173\]; want \[6, 173\]"),
        (lambda a: a | {"y": a["y"].float()}, "y is Float; want Half"),
        (lambda a: a | {"y": a["y"].T.contiguous().T}, "y has strides .*; want its last dimension contiguous"),
        (lambda a: a | {"columns": (0, 136, 160, 170)}, r"y has shape \[7, 173\]; want \[7, 170\]"),
        (lambda a: a | {"columns": (0,)}, "columns has 1 bounds; want one more than slices"),
        (lambda a: a | {"columns": (0, 9, 8, 173)}, r"columns is \[0, 9, 8, 173\]; want ascending bounds"),
        (lambda a: a | {"columns": (8, 136, 160, 173)}, "columns begins at 8; want 0"),
        (lambda a: a | {"columns": (0, 1, 2, 3, 4, 173)}, "slices is 5; want 1 to 4"),
        (lambda a: a | {"weight": a["weight"].float()}, "weight is Float; want Half"),
        (lambda a: a | {"weight": a["weight"][:172]}, r"weight has shape \[172, 24\]; want \[173, 24\]"),
        (lambda a: a | {"weight": a["weight"].T.contiguous().T}, "weight has strides .*; want its last dimension"),
        (lambda a: a | {"bias": a["bias"].float()}, "bias is Float; want Half"),
        (lambda a: a | {"bias": a["bias"][:172]}, r"bias has shape \[172\]; want \[173\]"),
        (lambda a: a | {"bias": a["bias"].repeat_interleave(2)[::2]}, "bias has strides .*; want it contiguous"),
        (lambda a: a | {"row_slot": a["row_slot"].long()}, "row_slot is Long; want Int"),
        (lambda a: a | {"row_slot": a["row_slot"][:6]}, r"row_slot has shape \[6\]; want \[7\]"),
        (lambda a: a | {"table": a["table"].int()}, "table is Int; want Long"),
        (lambda a: a | {"slots": a["slots"].long()}, "slots is Long; want Int"),
        (lambda a: a | {"slots": a["slots"][:, :2]}, r"slots has shape \[7, 2\]; want \[-1, 3\]"),
        (lambda a: a | {"slots": a["slots"].T.contiguous().T}, "slots has strides .*; want it contiguous"),
        (lambda a: a | {"sets": a["sets"].int()}, "sets is Int; want Long"),
        (lambda a: a | {"module": 4}, "modules 4 to 6 are asked for; want them within table's 6"),
        (lambda a: a | {"v": a["v"].double()}, "v is Double; want Float"),
        (lambda a: a | {"v": a["v"][:, :, 1:].contiguous()}, "v has 47 columns; want a multiple of 4 for each of"),
        (lambda a: a | {"shared_v": a["shared_v"][:, :6].contiguous()}, "v has 6 rows; want at least 7"),
        (lambda a: a | {"out_begin": (0, 0)}, "out_begin has 2 entries; want 3, one a slice"),
        (lambda a: a | {"out_begin": (0, -1, 0)}, "out_begin is .*; want no negative entry"),
    ],
)
def test_refusals(device, change, message):
    given = arguments(Case(24, 8, 7, "distinct", dtype=torch.float16, device=device))
    with pytest.raises(RuntimeError, match=message):
        ops.linear(**change(given))


PAST_THE_SLOTS = (lambda a: a | {"slots": a["slots"][:6]}, r"row_slot\[6\] is 6; want it below the 6 slots")


@pytest.mark.parametrize("change, message", [PAST_THE_SLOTS, *ONLY_THE_CPU_SEES])
def test_refuses_what_only_the_cpu_sees(change, message):
    with pytest.raises(RuntimeError, match=message):
        ops.linear(**change(arguments(Case(24, 8, 7, "distinct"))))
