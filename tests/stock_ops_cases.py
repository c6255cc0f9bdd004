"""benchmarks/stock_ops.py on the CPU, SGLang's kernels in Triton's interpreter; test_stock_ops.py starts it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.overrides import TorchFunctionMode

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import stock_ops
from sglang.kernels.ops.gemm import lora_tuning_config

SHAPES = {"qkv": (64, (96, 32, 32)), "o": (96, (64,)), "gate_up": (64, (80, 80)), "down": (80, (64,))}
CASES = {
    "one": (1, (16,)),
    "one tenant": (20, (16,)),
    "tenants": (6, (16,) * 3),
    "idle tenants": (2, (8,) * 3),
    "ranks": (5, (8, 32)),
}


class OnTheCpu(TorchFunctionMode):
    """SGLang's code for the GPU, without one: tensors on the CPU, and none pinned."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return args[0] if function is torch.Tensor.pin_memory else function(*args, **kwargs)


def bench_of(rows: int, tenants: int, inputs: int, outputs: tuple[int, ...], dtype: torch.dtype) -> SimpleNamespace:
    """What stock_ops reads of op_cases.Bench."""
    return SimpleNamespace(
        x=torch.randn(rows, inputs).to(dtype),
        y=torch.randn(rows, sum(outputs)).to(dtype),
        outputs=outputs,
        columns=[sum(outputs[:i]) for i in range(len(outputs) + 1)],
        row_slot=(torch.arange(rows) % tenants).int(),
        sets=2,
    )


def main() -> None:
    torch.manual_seed(0)
    lora_tuning_config.get_device_name = lambda: "CPU"  # SGLang asks CUDA, to find tuned block sizes
    for name, (rows, ranks) in CASES.items():
        workload = SimpleNamespace(rows=rows, ranks=ranks, kind="lora")
        for dtype in (torch.float16, torch.float32):
            benches = {layer: bench_of(rows, len(ranks), *shape, dtype) for layer, shape in SHAPES.items()}
            built = stock_ops.build(workload, benches, dtype)
            sizes = {backend: {layer: len(sets) for layer, sets in fused.items()} for backend, fused in built.items()}
            print(json.dumps([name, str(dtype), sizes]))
    # each of these takes the right batch's place in turn, and its results have to be found wrong
    right = stock_ops._prepared

    def other_scalings(backend, workload, scalings, bench):
        return right(backend, workload, [2 * scaling for scaling in scalings], bench)

    def other_rows(backend, workload, scalings, bench):
        moved = SimpleNamespace(x=bench.x, row_slot=bench.row_slot.roll(1))
        return right(backend, workload, scalings, moved)

    def other_ranks(backend, workload, scalings, bench):
        less = SimpleNamespace(rows=workload.rows, ranks=tuple(rank // 2 for rank in workload.ranks))
        return right(backend, less, scalings, bench)

    workload = SimpleNamespace(rows=6, ranks=(16,) * 3, kind="lora")
    benches = {layer: bench_of(6, 3, *shape, torch.float16) for layer, shape in SHAPES.items()}
    for spoiled in (other_scalings, other_rows, other_ranks):
        stock_ops._prepared = spoiled
        print(json.dumps([spoiled.__name__, "torch.float16", stock_ops.build(workload, benches, torch.float16)]))


if __name__ == "__main__":
    with OnTheCpu():
        main()
