"""What holds for all ops: their registration, and that the package loads lazily."""

import subprocess
import sys
from dataclasses import replace

import pytest
import test_ops_expand
import test_ops_linear
import test_ops_lookup
import test_ops_project
import test_ops_reweigh
import test_ops_rotate
import test_ops_structured
import test_ops_tokens
import torch
from ops_cases import DEVICES, Case, row_slots, shrink_arguments, world_of
from torch import library

import scute_sgl
from scute_sgl import layout, ops


def plan_arguments(case: Case) -> dict:
    plan = torch.zeros(layout.plan_size(case.rows), dtype=torch.int32, device=case.device)
    return {"row_slot": row_slots(case), "slots": world_of(case).slots, "tile_rows": 8, "plan": plan}


ARGUMENTS = {
    "plan": plan_arguments,
    "shrink": shrink_arguments,
    "lookup": lambda case: test_ops_lookup.arguments(case.dtype, case.device),
    "project": test_ops_project.arguments,
    "expand": test_ops_expand.arguments,
    "linear": lambda case: test_ops_linear.arguments(replace(case, dtype=torch.float16)),
    "rotate": test_ops_rotate.arguments,
    "structured": test_ops_structured.arguments,
    "token_rows": lambda case: test_ops_tokens.row_arguments(case.dtype, case.device),
    "token_logits": lambda case: test_ops_tokens.logit_arguments(case.dtype, case.device),
    "reweigh": test_ops_reweigh.arguments,
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_schema_and_fake_hold(name, device):
    if name == "linear" and device not in test_ops_linear.HERE:
        pytest.skip("needs compute capability 9.0")
    given = ARGUMENTS[name](Case(24, 8, 7, "distinct", device=device))
    # What is never written is NaN, and opcheck compares with ==.
    given |= {out: given[out].nan_to_num(0.0) for out in ("v", "shared_v", "out", "weight", "y") if out in given}
    library.opcheck(getattr(torch.ops.scute, name).default, (), given)


def test_build_info():
    info = ops.build_info()
    assert set(info) == {"cuda_archs", "cuda_version", "torch_version", "cxx"}
    assert info["torch_version"] == torch.__version__.split("+")[0]


def test_importing_the_package_loads_nothing_heavy():
    check = "import sys, scute_sgl; assert not {'torch', 'sglang', 'scute_sgl._C'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)


def test_public_names():
    assert scute_sgl.__version__ == "0.1.0"
    assert scute_sgl.AdapterError.__name__ == "AdapterError"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        scute_sgl.nothing
