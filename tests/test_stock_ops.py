"""benchmarks/stock_ops.py: SGLang's layers compute LoRA before they are timed, and a slower row of ours is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def built() -> dict[tuple[str, str], dict]:
    """(case, dtype) -> what stock_ops.build returned: backend -> fused layer -> number of sets."""
    command = [sys.executable, str(ROOT / "tests/stock_ops_cases.py")]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    return {(case, dtype): result for case, dtype, result in lines}


@pytest.mark.parametrize("dtype", ["torch.float16", "torch.float32"])
@pytest.mark.parametrize("case", ["one", "one tenant", "tenants", "idle tenants", "ranks"])
def test_both_backends_compute_lora(built, case, dtype):
    sets = {"qkv": 2, "o": 2, "gate_up": 2, "down": 2}
    assert built[case, dtype] == {"triton": sets, "csgmv": sets}


@pytest.mark.parametrize("case", ["other_scalings", "other_rows", "other_ranks"])
def test_wrong_results_are_not_timed(built, case):
    assert built[case, "torch.float16"] == {}


def test_the_verdict_names_every_slower_row_and_what_is_missing(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import stock_ops

    def step(workload: str, backend: str, added: float) -> dict:
        return {"workload": workload, "op": "step", "backend": backend, "added_ms": added}

    faster = [step("a", "scute", 1.0), step("a", "triton", 1.5), step("a", "csgmv", 1.25)]
    assert stock_ops.verdict(faster) == "slower than SGLang's best in 0 of 1 rows"
    pairs = [
        {"workload": "a", "layer": "qkv", "op": "pair", "backend": backend, "us": us}
        for backend, us in (("scute", 3.0), ("triton", 2.5), ("csgmv", 2.0))
    ]
    others = [{"workload": "c", "op": "step", "added_ms": 9}, {"workload": "a", "layer": "qkv", "op": "before", "us": 9}]
    rows = [*faster, *pairs, *others, step("b", "scute", 1.0), step("b", "triton", 0.5)]
    assert stock_ops.verdict(rows) == (
        "slower than SGLang's best in 2 of 3 rows: a qkv (3.0 us, csgmv 2.0); b step (1000.0 us, triton 500.0). "
        "Not compared: b step csgmv"
    )
