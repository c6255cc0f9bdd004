"""What adapters must add to a decode step: the bytes that it reads over the bandwidth, and launches times their cost.

    seconds = bytes / read + launches * launch

A step reads every tenant of its batch once, and every shared set once. Sizes are those of the packed image (image.py).

Launches are those beside the base's own (layers.py), of which the op linear takes one's place: up to LINEAR_ROWS rows of
16 bit, on GPUs that have it, a layer has before it one launch for sums of private factors, two for those of shared ones
(parts, and their sum), and in batches with rotations one that rotates. With more rows, or on other GPUs, the sums run on a
second stream beside the base's GEMM. Their launches are hidden behind it, their bytes are not: a GEMM of few rows is itself
a read of memory, so what is read beside it comes on top. Counted are then one launch that expands after each GEMM and, with
rotations, one that rotates before it and one that puts the rotated projections of a fused layer side by side.

Both constants come from microbenchmarks (:func:`measure`), none from an engine: ``read`` from one large streaming read,
``launch`` from an expand that has one row and hardly a byte to read, behind each of many GEMMs: its way from the plan to
the tenant's table entry, its weights and its output takes longer than an empty kernel. Nothing stands for more. Activations
are not counted: at decode they are in the cache. Nor are the launches of the two vocabulary layers and of the plan, a
few in hundreds, nor that large batches have a GEMM for each rotated projection.
``scute plan`` and the benchmarks predict with this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from scute_sgl.graphs import variant_of
from scute_sgl.image import Image
from scute_sgl.layout import DELTA, LINEAR_ROWS, RANK_STEP, ROTATED, SHARED, STRUCTURED, round_up
from scute_sgl.slots import Folded, Target
from scute_sgl.structured import OF_WEIGHT

FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}


@dataclass(frozen=True)
class Gpu:
    """``read`` and ``host``: bytes/s from its own memory and, over PCIe, from the host's. ``launch``: seconds that the
    least work of an op behind a GEMM adds to a replayed CUDA graph. ``memory``: bytes. ``source``: of read and launch.
    ``linear_rows``: up to how many rows the op linear is used there; 0: never, as below compute capability 9.0."""

    read: float
    launch: float
    memory: float
    host: float
    source: str
    linear_rows: int = 0


MEASURED, DATASHEET, GIVEN = "measured", "datasheet", "given"
LAUNCH = 3.3e-6  # H200, by measure(): benchmarks/results/gpu_constants_h200.json. Vendors publish none
PCIE5, PCIE4 = 64e9, 32e9  # x16, one direction: half of what the datasheets add up


def _published(read: float, memory: float, host: float, linear_rows: int = 0) -> Gpu:
    """Bytes by the datasheet; what a launch costs is assumed."""
    return Gpu(read, LAUNCH, memory, host, DATASHEET, linear_rows)


GPUS = {
    "H200": Gpu(4.48e12, LAUNCH, 141e9, PCIE5, MEASURED, LINEAR_ROWS),  # the datasheet has 4.8e12
    "H100": _published(3.35e12, 80e9, PCIE5, LINEAR_ROWS),  # SXM
    "H100-PCIe": _published(2.0e12, 80e9, PCIE5, LINEAR_ROWS),
    "A100-80GB": _published(2.039e12, 80e9, PCIE4),  # SXM; as a PCIe card 1.935e12
    "A100-40GB": _published(1.555e12, 40e9, PCIE4),  # SXM and PCIe
    "L40S": _published(0.864e12, 48e9, PCIE4),
    "L4": _published(0.3e12, 24e9, PCIE4),
    "A10": _published(0.6e12, 24e9, PCIE4),
    "B200": _published(8e12, 180e9, PCIE5, LINEAR_ROWS),  # an eighth of DGX B200's 64 TB/s and 1,440 GB; its host has PCIe 5.0
    "RTX-4090": _published(1.008e12, 24e9, PCIE4),  # NVIDIA's Ada whitepaper: 384 bits at 21 Gbit/s
}


@dataclass(frozen=True)
class Cost:
    """What a step reads of one tenant: ``own`` bytes once, ``row`` bytes for each of its rows (an embedding's A and own
    rows are looked up), and ``shared`` bytes of its shared set ``key``, once for all tenants that have it. Base weights
    that are read again (HiRA, MiSS's bat) are such a set. ``live``: bits of layout.py."""

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
        if t.kind == "embedding" and folded.tokens is not None and not _reads_rows(modules):
            row += folded.tokens.rows.shape[1] * item
            looked_up += folded.tokens.rows.numel() * item
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


def _reads_rows(modules: Mapping[int, tuple[Target, Folded]]) -> bool:
    """Whether the output head has rows too: it reads all of them, and a tied embedding has the same copy."""
    return any(t.kind == "head" and folded.tokens is not None for t, folded in modules.values())


def fused_layer(path: str) -> str:
    """The name of SGLang's layer that a projection is part of: layers have one input and one launch of each op."""
    parent, _, leaf = path.rpartition(".")
    return f"{parent}.{FUSED.get(leaf, leaf)}"


def fused_layers(targets: Iterable[Target]) -> list[int]:
    """How many projections each layer has that launches ops, but for the vocabulary's."""
    return [*Counter(fused_layer(t.path) for t in targets if t.kind not in ("head", "embedding")).values()]


def bytes_of_step(tenants: Collection[Cost], rows: int) -> int:
    """Bytes that a step reads beyond the base model's, whose ``rows`` the tenants have in turn."""
    if not tenants:
        return 0
    each, more = divmod(rows, len(tenants))
    looked_up = sum(tenant.row * (each + (i < more)) for i, tenant in enumerate(tenants))
    sets = {tenant.key: tenant.shared for tenant in tenants if tenant.shared}
    return sum(tenant.own for tenant in tenants) + looked_up + sum(sets.values())


def launches_of_step(tenants: Iterable[Cost], layers: Iterable[int], rows: int, gpu: Gpu) -> int:
    """Launches of the batch's graph variant beside the base's, two of them for structures; ``layers`` as
    :func:`fused_layers` gives them."""
    live = 0
    for tenant in tenants:
        live |= tenant.live
    variant = variant_of(live)
    delta, shared, rotated, structured = (bool(variant & bit) for bit in (DELTA, SHARED, ROTATED, STRUCTURED))
    in_linear = rows <= gpu.linear_rows
    single = (delta + 2 * shared if in_linear else delta or shared) + rotated + 2 * structured
    return sum(single + (rotated and projections > 1 and not in_linear) for projections in layers)


def added_ms(nbytes: int, launches: int, gpu: Gpu) -> float:
    """Predicted milliseconds that the adapters add to a step of the base."""
    return (nbytes / gpu.read + launches * gpu.launch) * 1e3


def measure() -> Gpu:
    """The current CUDA device: one large streaming read, the smallest expand behind each GEMM of 16 rows in a graph, and
    a copy from pinned memory. RuntimeError without one, or if it is too busy or too full to tell."""
    import torch

    from scute_sgl import layout, ops

    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no CUDA GPU to measure")
    width, free = 4096, torch.cuda.mem_get_info()[0]
    count = min(2 << 30, free // 4) // (2 * width * width)
    if not count:
        raise RuntimeError(f"only {free >> 20} MiB of the GPU's memory are free")
    weights = torch.zeros(count, width, width, dtype=torch.float16, device="cuda")
    x, y = weights.new_zeros(16, width), weights.new_zeros(16, width)
    words = weights.view(torch.float32)
    # One tenant of rank 8 in the first of 16 rows; every layer has a table entry of its own, as in a model.
    arena = torch.zeros(layout.RANK_STEP * width * 2, dtype=torch.uint8, device="cuda")
    table = torch.full((1, count, layout.FIELDS), -1)
    table[:, :, layout.B], table[:, :, layout.META] = 0, layout.pack_meta(layout.RANK_STEP)
    row_slot = torch.tensor([0, *[-1] * 15], dtype=torch.int32)
    slots, sets = torch.tensor([[DELTA, -1, layout.RANK_STEP]], dtype=torch.int32), torch.full((1, layout.SET_FIELDS), -1)
    row_slot, slots, table, sets = (tensor.cuda() for tensor in (row_slot, slots, table, sets))
    plan = torch.zeros(layout.plan_size(16), dtype=torch.int32, device="cuda")
    ops.plan(row_slot, slots, 8, plan)
    v = torch.zeros(1, 16, layout.RANK_STEP, device="cuda")
    landing = weights.view(torch.uint8).flatten()[: 256 << 20]
    pinned = torch.zeros(landing.shape, dtype=torch.uint8, pin_memory=True)

    def layers(launch: bool) -> None:
        for module, weight in enumerate(weights):
            torch.mm(x, weight.T, out=y)
            if launch:
                ops.expand(v, None, row_slot, arena, table, sets, plan, 8, module, [0, width], [0], y)

    alone, followed = (_seconds(_captured(layers, launch).replay) for launch in (False, True))
    if followed <= alone:
        raise RuntimeError("the GPU is too busy to be measured")
    return Gpu(
        read=weights.nbytes / _seconds(words.sum),
        launch=(followed - alone) / count,
        memory=torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory,
        host=pinned.nbytes / _seconds(lambda: landing.copy_(pinned, non_blocking=True)),
        source=MEASURED,
        linear_rows=LINEAR_ROWS if torch.cuda.get_device_capability() >= (9, 0) else 0,
    )


def _captured(work, *arguments):
    """A CUDA graph of it."""
    import torch

    work(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work(*arguments)
    return graph


def _seconds(work, repeats: int = 10) -> float:
    """The best of several runs, each queued behind another one: the device does not wait for the host."""
    import torch

    best = float("inf")
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        work()
        begin.record()
        work()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1e3)
    return best
