"""What a decode step must cost: the adapters' bytes over the bandwidth, and launches times their cost.

    python benchmarks/byte_model.py             # the table of NOTES.md

No constant is fitted to an engine: the bandwidth is that of one large streaming read, the launch cost that of an
almost empty kernel in a replayed CUDA graph, both measured once on the card that the results come from.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from workloads import LLAMA_8B, WORKLOADS, Kind, Shape, Workload

ITEM = 2  # bytes of a 16-bit number


@dataclass(frozen=True)
class Card:
    """Measured on one H200, 2026-11-30: ``read`` bytes/s; ``launch`` seconds of a dependent launch in a graph."""

    read: float = 4.48e12
    launch: float = 0.70e-6


def bytes_of_tenant(kind: Kind, shape: Shape = LLAMA_8B) -> int:
    """Bytes that the kernels read of one tenant in a step, in the serving dtype; shared matrices not included."""
    linears = shape.linears.values()
    rank = -(-kind.size // 8) * 8
    low_rank = sum((inputs + outputs) * rank for inputs, outputs in linears)
    vectors = sum(outputs for _, outputs in linears)
    per_layer = {
        "lora": low_rank,
        "dora": low_rank + vectors,
        # down_proj's vector is folded into up_proj's outputs
        "ia3": sum(shape.linears[name][1] for name in ("k_proj", "v_proj", "up_proj")),
        "vera": vectors + rank * len(linears),
        "oft": sum(inputs * kind.size for inputs, _ in linears),
    }
    return per_layer[kind.method] * shape.layers * ITEM


def bytes_of_shared_set(kind: Kind, shape: Shape = LLAMA_8B) -> int:
    """Reads of VeRA's A and B in a step: A once for each fused layer, B's leading rows for each projection."""
    inputs = sum(shape.linears[group[0]][0] for group in shape.groups)
    outputs = sum(outputs for _, outputs in shape.linears.values())
    return (inputs + outputs) * kind.size * shape.layers * ITEM


def bytes_of_workload(workload: Workload, shape: Shape = LLAMA_8B) -> int:
    """Bytes that a step reads beyond the base model's: each tenant's once, each shared set's once."""
    total = 0
    for kind, count in workload.tenants:
        total += min(count, workload.bs) * bytes_of_tenant(kind, shape)
        total += bytes_of_shared_set(kind, shape) if kind.method == "vera" else 0
    return total


def launches_of_workload(workload: Workload, shape: Shape = LLAMA_8B) -> int:
    """Launches of its graph variant beyond the base's: per fused layer shrink and expand, 2 for VeRA, 1 to rotate."""
    methods = {kind.method for kind, _ in workload.tenants}
    per_group = (2 if methods else 0) + (2 if methods & {"vera", "oft"} else 0) + (1 if "oft" in methods else 0)
    return per_group * len(shape.groups) * shape.layers


def added_ms(workload: Workload, shape: Shape = LLAMA_8B, card: Card = Card()) -> float:
    """Predicted milliseconds that the adapters add to a step of the base."""
    seconds = bytes_of_workload(workload, shape) / card.read + launches_of_workload(workload, shape) * card.launch
    return seconds * 1e3


def main(argv: list[str] | None = None) -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(argv)
    print("| workload | MB a step | bytes alone, ms | launches | predicted added, ms | target |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, workload in WORKLOADS.items():
        size = bytes_of_workload(workload)
        print(
            f"| {name} | {size / 1e6:.1f} | {size / Card().read * 1e3:.3f} | {launches_of_workload(workload)} "
            f"| {added_ms(workload):.3f} | {workload.target or ''} |"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
