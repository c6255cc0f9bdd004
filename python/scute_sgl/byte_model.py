"""What adapters must add to a decode step: the bytes that it reads over the bandwidth, and launches times their cost.

    seconds = bytes / read + launches * launch

A step reads every tenant of its batch once, and every shared set once. Sizes are those of the packed image (image.py);
nothing is fitted to an engine. ``scute plan`` and the benchmarks predict with this. Activations are not counted: at
decode they are in the cache. Nor are the launches of the two vocabulary layers, which hardly show.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from scute_sgl.graphs import variant_of
from scute_sgl.image import Image
from scute_sgl.layout import DELTA, RANK_STEP, ROTATED, SHARED, STRUCTURED, round_up
from scute_sgl.slots import Folded, Target
from scute_sgl.structured import OF_WEIGHT

FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}


@dataclass(frozen=True)
class Gpu:
    """``read`` and ``host``: bytes/s from its own memory and, over PCIe, from the host's. ``launch``: seconds of a
    dependent launch in a replayed CUDA graph. ``memory``: bytes."""

    read: float
    launch: float
    memory: float
    host: float


LAUNCH = 0.70e-6  # measured on one H200, with programmatic dependent launch; vendors do not publish it
PCIE5, PCIE4 = 64e9, 32e9  # x16, one direction: half of what the datasheets add up
GPUS = {
    "H200": Gpu(4.8e12, LAUNCH, 141e9, PCIE5),  # NVIDIA H200 Tensor Core GPU Datasheet, H200 SXM
    "H100": Gpu(3.35e12, LAUNCH, 80e9, PCIE5),  # NVIDIA H100 Tensor Core GPU Datasheet, H100 SXM
    "A100-80GB": Gpu(2.039e12, LAUNCH, 80e9, PCIE4),  # NVIDIA A100 Tensor Core GPU Datasheet, A100 80GB SXM
    "L40S": Gpu(0.864e12, LAUNCH, 48e9, PCIE4),  # NVIDIA L40S GPU Datasheet
    "B200": Gpu(8e12, LAUNCH, 180e9, PCIE5),  # NVIDIA DGX B200 Datasheet: 64 TB/s and 1,440 GB in eight
}


@dataclass(frozen=True)
class Cost:
    """What a step reads of one tenant: ``own`` bytes once, ``row`` bytes for each of its rows (an embedding's A is
    looked up), and ``shared`` bytes of its shared set ``key``, once for all tenants that have it. Base weights that are
    read again (HiRA, MiSS's bat) are such a set. ``live``: bits of layout.py."""

    own: int
    live: int
    row: int = 0
    shared: int = 0
    key: str = ""


def cost(modules: Mapping[int, tuple[Target, Folded]], packed: Image) -> Cost:
    """Of an image and what it was packed from; both may be on the meta device."""
    item, row, looked_up = packed.dtype.itemsize, 0, 0
    for t, folded in modules.values():
        if t.kind == "embedding" and folded.A is not None:
            column = round_up(folded.A.shape[0], RANK_STEP) * item
            row += column
            looked_up += column * (t.inputs[1] - t.inputs[0])
    if again := {module: t for module, (t, f) in modules.items() if isinstance(f.structure, OF_WEIGHT)}:
        weights = sum((t.inputs[1] - t.inputs[0]) * (t.outputs[1] - t.outputs[0]) for t in again.values())
        return Cost(packed.nbytes - looked_up, packed.live, row, weights * item, f"weights of {sorted(again)}")
    shared = [t for t, folded in modules.values() if folded.shared is not None]
    if not shared:
        return Cost(packed.nbytes - looked_up, packed.live, row)
    # A once for each fused layer, B's leading rows for each projection
    inputs = {fused_layer(t.path): t.inputs[1] - t.inputs[0] for t in shared}
    width = sum(inputs.values()) + sum(t.outputs[1] - t.outputs[0] for t in shared)
    return Cost(packed.nbytes - looked_up, packed.live, row, width * packed.shared.rank8 * item, packed.shared.key)


def fused_layer(path: str) -> str:
    """The name of SGLang's layer that a projection is part of: layers have one input and one launch of each op."""
    parent, _, leaf = path.rpartition(".")
    return f"{parent}.{FUSED.get(leaf, leaf)}"


def fused_layers(targets: Iterable[Target]) -> int:
    """How many layers of a model launch ops, but for the vocabulary's."""
    return len({fused_layer(t.path) for t in targets if t.kind not in ("head", "embedding")})


def bytes_of_step(tenants: Collection[Cost], rows: int) -> int:
    """Bytes that a step reads beyond the base model's, whose ``rows`` the tenants have in turn."""
    if not tenants:
        return 0
    each, more = divmod(rows, len(tenants))
    looked_up = sum(tenant.row * (each + (i < more)) for i, tenant in enumerate(tenants))
    sets = {tenant.key: tenant.shared for tenant in tenants if tenant.shared}
    return sum(tenant.own for tenant in tenants) + looked_up + sum(sets.values())


def launches_of_step(tenants: Iterable[Cost], layers: int) -> int:
    """Launches of the batch's graph variant beyond the base's: shrink and expand, 2 for shared sets, 1 to rotate, 2 for
    structures."""
    live = 0
    for tenant in tenants:
        live |= tenant.live
    variant = variant_of(live)
    twice = sum(bool(variant & bit) for bit in (DELTA, SHARED, STRUCTURED))
    return layers * (2 * twice + bool(variant & ROTATED))


def added_ms(nbytes: int, launches: int, gpu: Gpu) -> float:
    """Predicted milliseconds that the adapters add to a step of the base."""
    return (nbytes / gpu.read + launches * gpu.launch) * 1e3


def measure() -> Gpu:
    """The current CUDA device: one large streaming read, dependent launches of an almost empty kernel in a graph, and a
    copy from pinned memory. RuntimeError without one."""
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no CUDA GPU to measure")
    memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    large = torch.zeros(min(2 << 30, memory // 8) // 4, device="cuda")
    pinned, landing = torch.zeros(256 << 20, dtype=torch.uint8).pin_memory(), large.view(torch.uint8)[: 256 << 20]
    word, graph, launches = torch.zeros(1, device="cuda"), torch.cuda.CUDAGraph(), 1000
    word.add_(1)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            word.add_(1)
    return Gpu(
        read=large.nbytes / _seconds(lambda: large.sum()),
        launch=_seconds(graph.replay) / launches,
        memory=memory,
        host=pinned.nbytes / _seconds(lambda: landing.copy_(pinned, non_blocking=True)),
    )


def _seconds(work, repeats: int = 10) -> float:
    """The best of several runs, the first of which is not timed."""
    import torch

    best = float("inf")
    for repeat in range(repeats + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1e3) if repeat else best
    return best
