"""What the workloads' decode steps must cost, by scute_sgl/byte_model.py.

    python benchmarks/byte_model.py             # the table of NOTES.md

No constant is fitted to an engine: they are those that ``scute plan --gpu H200`` takes, from microbenchmarks.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch
from workloads import LLAMA_8B, WORKLOADS, Kind, Shape, Workload

from scute_sgl import byte_model
from scute_sgl.byte_model import GPUS, Cost, Gpu
from scute_sgl.image import pack
from scute_sgl.slots import Folded, SharedTerm, Target

H200 = GPUS["H200"]


def cost(kind: Kind, shape: Shape = LLAMA_8B) -> Cost:
    """Of one tenant, from tensors without memory in 16 bit."""
    modules = {}
    widest = [max(sizes) for sizes in zip(*shape.linears.values())]
    A, B = _empty(kind.size, widest[0]), _empty(widest[1], kind.size)
    for layer in range(shape.layers):
        for name, (inputs, outputs) in shape.linears.items():
            path, module = f"layers.{layer}.{name}", len(modules)
            t = Target(path, module, "column", inputs, outputs, (0, inputs), (0, outputs), _none, _none)
            modules[module] = t, _folded(kind, name, inputs, outputs, A, B)
    return replace(byte_model.cost(modules, pack(modules, torch.float16)), key=str(kind))


def _folded(kind: Kind, name: str, inputs: int, outputs: int, A: torch.Tensor, B: torch.Tensor) -> Folded:
    if kind.method == "ia3":  # down_proj's vector is folded into up_proj's outputs
        return Folded(scale=_empty(outputs) if name in ("k_proj", "v_proj", "up_proj") else None)
    if kind.method == "vera":
        return Folded(shared=SharedTerm(A, B, d=_empty(kind.size), e=_empty(outputs)))
    if kind.method == "oft":
        return Folded(rotation=_empty(inputs // kind.size, kind.size, kind.size))
    scale = _empty(outputs) if kind.method == "dora" else None
    return Folded(A=_empty(kind.size, inputs), B=_empty(outputs, kind.size), scale=scale)


def _empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def _none() -> None:
    return None


def bytes_of_tenant(kind: Kind, shape: Shape = LLAMA_8B) -> int:
    """Bytes that the kernels read of one tenant in a step, in the serving dtype; shared matrices not included."""
    return cost(kind, shape).own


def tenants_of(workload: Workload, shape: Shape = LLAMA_8B) -> list[Cost]:
    """Those that a step of the workload reads."""
    tenants = []
    for kind, count in workload.tenants:
        tenants += [cost(kind, shape)] * min(count, workload.bs)
    return tenants


def bytes_of_workload(workload: Workload, shape: Shape = LLAMA_8B) -> int:
    """Bytes that a step reads beyond the base model's."""
    return byte_model.bytes_of_step(tenants_of(workload, shape), workload.bs)


def launches_of_workload(workload: Workload, shape: Shape = LLAMA_8B, gpu: Gpu = H200) -> int:
    layers = [*map(len, shape.groups)] * shape.layers
    return byte_model.launches_of_step(tenants_of(workload, shape), layers, workload.bs, gpu)


def added_ms(workload: Workload, shape: Shape = LLAMA_8B, gpu: Gpu = H200) -> float:
    """Predicted milliseconds that the adapters add to a step of the base."""
    return byte_model.added_ms(bytes_of_workload(workload, shape), launches_of_workload(workload, shape, gpu), gpu)


def main(argv: list[str] | None = None) -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(argv)
    print("| workload | MB a step | bytes alone, ms | launches | predicted added, ms | target |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, workload in WORKLOADS.items():
        size = bytes_of_workload(workload)
        print(
            f"| {name} | {size / 1e6:.1f} | {size / H200.read * 1e3:.3f} | {launches_of_workload(workload)} "
            f"| {added_ms(workload):.3f} | {workload.target or ''} |"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
