"""The extension is refused by name where it cannot run."""

import pytest
import torch

from scute_sgl import build, ops

INFO = {"torch_version": "2.11.0", "cuda_version": "13.0", "cuda_archs": "8.0;9.0+PTX", "cxx": "13"}
HERE = ("2.11.0+cu130", "13.0", (9, 0), torch.float16)


@pytest.mark.parametrize(
    ("archs", "runs", "does_not"),
    [
        ("8.0", [(8, 0), (8, 6), (8, 9)], [(7, 5), (9, 0)]),
        ("8.6", [(8, 6), (8, 9)], [(8, 0)]),
        ("8.0+PTX", [(8, 0), (9, 0), (12, 1)], [(7, 5)]),
        ("8.0;9.0", [(8, 6), (9, 0)], [(10, 0)]),
        ("8.0 9.0a", [(9, 0)], [(9, 1), (10, 0)]),
        ("9.0a+PTX", [(9, 0)], [(10, 0)]),
        ("10.0f", [(10, 0), (10, 3)], [(9, 0), (12, 0)]),
        ("", [], [(8, 0)]),
    ],
)
def test_which_gpus_have_code(archs, runs, does_not):
    assert all(build.has_code(archs, capability) for capability in runs)
    assert not any(build.has_code(archs, capability) for capability in does_not)


@pytest.mark.parametrize(
    ("info", "here", "words"),
    [
        ({}, {0: "2.12.0+cu130"}, "built with torch 2.11.0, this is 2.12.0+cu130; rebuild"),
        ({}, {1: "12.8"}, "built with CUDA 13.0, torch with 12.8; rebuild"),
        ({"cuda_archs": "", "cuda_version": None}, {}, "built without CUDA; set CUDA_HOME to a CUDA 13.0 toolkit"),
        ({"cuda_archs": "8.0"}, {}, "code for 8.0, this GPU has compute capability 9.0"),
        ({"cuda_archs": "8.0"}, {}, f"TORCH_CUDA_ARCH_LIST=9.0 {build.REBUILD}"),
        ({}, {3: torch.float8_e4m3fn}, "--dtype float8_e4m3fn is not served"),
    ],
)
def test_what_does_not_suit_is_named(info, here, words):
    changed = [here.get(i, value) for i, value in enumerate(HERE)]
    assert words in build.problem(INFO | info, *changed)


def test_what_suits_is_served():
    assert build.problem(INFO, *HERE) == ""
    cpu_only = INFO | {"cuda_archs": "", "cuda_version": None}
    assert build.problem(cpu_only, "2.11.0+cpu", None, None, torch.float32) == ""
    build.check(ops.build_info(), torch.device("cpu"), torch.bfloat16)
    with pytest.raises(RuntimeError, match="scute refuses to start: its extension was built with torch 2.1.0"):
        build.check(ops.build_info() | {"torch_version": "2.1.0"}, torch.device("cpu"), torch.bfloat16)
