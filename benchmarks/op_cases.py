"""What bench_ops.py times: model shapes, workloads, and the ops of one fused layer on weights of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import isqrt

import torch

from scute_sgl import layout, ops, structured
from scute_sgl.slots import BlockAffine, Hadamard, Kronecker, Mix, Sparse

# name -> layers, {fused layer: (inputs, outputs of its slices)}
MODELS = {
    "llama-3.1-8b": (32, 4096, 14336, (4096, 1024, 1024)),
    "llama-3.2-1b": (16, 2048, 8192, (2048, 512, 512)),
    "qwen3-4b": (36, 2560, 9728, (4096, 1024, 1024)),
    "llama-3.1-70b-tp8": (80, 8192, 3584, (1024, 128, 128)),
}


def fused_layers(model: str) -> dict[str, tuple[int, tuple[int, ...]]]:
    _, hidden, middle, qkv = MODELS[model]
    return {
        "qkv": (hidden, qkv),
        "o": (qkv[0], (hidden,)),
        "gate_up": (hidden, (middle, middle)),
        "down": (middle, (hidden,)),
    }


@dataclass(frozen=True)
class Workload:
    rows: int
    ranks: tuple[int, ...]  # one a tenant
    kind: str = "lora"  # or vera, oft, kronecker, sparse, mix, hadamard, block_affine


WORKLOADS = {
    "lora_r8x16_bs16": Workload(16, (8,) * 16),
    "lora_r16x16_bs16": Workload(16, (16,) * 16),
    "lora_r32x16_bs16": Workload(16, (32,) * 16),
    "lora_r64x16_bs16": Workload(16, (64,) * 16),
    "lora_r16x16_bs64": Workload(64, (16,) * 16),
    "lora_r64x20_bs20": Workload(20, (64,) * 20),
    "lora_r64x20_bs64": Workload(64, (64,) * 20),
    "lora_r16x64_bs64": Workload(64, (16,) * 64),
    "lora_r16x1_bs1": Workload(1, (16,)),
    "lora_r16x1_bs64": Workload(64, (16,)),
    "lora_r8x8_r256x8_bs16": Workload(16, (8, 256) * 8),
    "vera_r256x16_bs16": Workload(16, (256,) * 16, "vera"),
    "oft32x16_bs16": Workload(16, (32,) * 16, "oft"),
    "kronecker_r8x16_bs16": Workload(16, (8,) * 16, "kronecker"),
    "sparse_r32x16_bs16": Workload(16, (32,) * 16, "sparse"),  # as many values as a LoRA of that rank
    "mix_x16_bs16": Workload(16, (8,) * 16, "mix"),
    "hadamard_r32x1_bs16": Workload(16, (32,), "hadamard"),
    "hadamard_r32x16_bs16": Workload(16, (32,) * 16, "hadamard"),
    "block_affine_r64x16_bs16": Workload(16, (64,) * 16, "block_affine"),
    "hadamard_r32x16_2048": Workload(2048, (32,) * 16, "hadamard"),
    "prefill_r16x16_2048": Workload(2048, (16,) * 16),
    "prefill_r16x16_8192": Workload(8192, (16,) * 16),
}
TOKENS = ((1, 16), (16, 16), (16, 256))  # tenants, and the tokens that each has rows of its own for


@cache
def _kronecker(rank: int, inputs: int, outputs: int) -> Kronecker:
    """As PEFT splits both sides: as nearly square as they can be."""
    l, p = (max(d for d in range(1, isqrt(n) + 1) if n % d == 0) for n in (outputs, inputs))
    return Kronecker(torch.randn(l, p), torch.randn(outputs // l, rank), torch.randn(rank, inputs // p))


@cache
def _sparse(rank: int, inputs: int, outputs: int) -> Sparse:
    n = rank * (inputs + outputs)
    places = torch.randint(outputs * inputs, (n,)).sort().values
    return Sparse(places // inputs, places % inputs, torch.randn(n), (outputs, inputs))


@cache
def _mix(rank: int, inputs: int, outputs: int) -> Mix:
    return Mix(torch.randn(outputs // 2) * 0.01, torch.randn(outputs // 2) * 0.01, 64, one_each=True)


@cache
def _hadamard(rank: int, inputs: int, outputs: int) -> Hadamard:
    return Hadamard(torch.randn(rank, inputs), torch.randn(outputs, rank))


@cache
def _block_affine(rank: int, inputs: int, outputs: int) -> BlockAffine:
    return BlockAffine(torch.randn(outputs // rank, rank, rank))


STRUCTURES = {
    "kronecker": _kronecker, "sparse": _sparse, "mix": _mix, "hadamard": _hadamard, "block_affine": _block_affine,
}  # fmt: skip
OF_WEIGHT = "hadamard", "block_affine"


class Bench:
    """One fused layer of one workload, ``sets`` times with weights of its own."""

    def __init__(
        self, workload: Workload, inputs: int, outputs: tuple[int, ...], sets: int, dtype: torch.dtype, room: int = 0
    ):
        self.kind, self.outputs, self.sets = workload.kind, outputs, sets
        self.columns = [sum(outputs[:i]) for i in range(len(outputs) + 1)]
        self.tile_rows, tenants, item = (8 if workload.rows <= 256 else 64), len(workload.ranks), dtype.itemsize
        self.size, self.blocks = 0, []
        table = torch.full((tenants, sets * len(outputs), layout.FIELDS), -1, dtype=torch.int64)
        shared = torch.full((sets, layout.SET_FIELDS), -1, dtype=torch.int64)
        rank, read = max(workload.ranks), 0
        if self.kind == "vera":
            pair = self._take(rank * inputs * item), self._take(rank * max(outputs) * item)
            shared[:] = torch.tensor([*pair, rank, inputs, max(outputs)])
            read = rank * (inputs + sum(outputs)) * item
        elif self.kind in OF_WEIGHT:
            read = inputs * sum(outputs) * item
        common = self.size
        for n in range(sets):
            for tenant, own in enumerate(workload.ranks):
                for i, width in enumerate(outputs):
                    entry = table[tenant, n * len(outputs) + i]
                    entry[layout.META] = layout.pack_meta(own)
                    if self.kind == "lora":
                        entry[layout.A], entry[layout.B] = self._take(own * inputs * item), self._take(own * width * item)
                    elif self.kind == "vera":
                        entry[layout.D], entry[layout.E] = self._take(own * item), self._take(width * item)
                    elif self.kind in STRUCTURES:
                        entry[layout.STRUCTURE] = self._take_structure(own, inputs, width, item)
                    else:
                        entry[layout.ROTATION] = self._take(inputs * own * item)
                        entry[layout.META] = layout.pack_meta(0, own)
        # what one launch, or pair of launches, has to read; of VeRA's pair and of the base's weight, as if nothing of it
        # stayed in the cache
        self.bytes = (self.size - common) / sets + read
        values = torch.empty(self.size // item, dtype=dtype, device="cuda")
        for part in values.split(1 << 27):
            part.normal_(0, inputs**-0.5)
        self._fill_structures(values)
        self.arena, self.table, self.shared = values.view(torch.uint8), table.cuda(), shared.cuda()
        live = {"lora": layout.DELTA, "vera": layout.SHARED, "oft": layout.ROTATED}.get(self.kind, layout.STRUCTURED)
        self.slots = torch.tensor([[live, 0, rank] for rank in workload.ranks], dtype=torch.int32).cuda()
        prefill = workload.rows > 256
        rows = torch.arange(workload.rows)
        self.row_slot = (rows * tenants // workload.rows if prefill else rows % tenants).int().cuda()
        self.plan = torch.zeros(layout.plan_size(workload.rows), dtype=torch.int32, device="cuda")
        chunks = 1 if prefill else -(-inputs // layout.K_CHUNK)
        slices = 1 if self.kind == "vera" else len(outputs)
        self.v = torch.zeros(chunks, workload.rows, slices * max(rank, room), device="cuda")
        self.x = torch.randn(workload.rows, inputs, device="cuda", dtype=dtype)
        self.y = torch.randn(workload.rows, sum(outputs), device="cuda", dtype=dtype)
        self.rotated = torch.empty(len(outputs), *self.x.shape, device="cuda", dtype=dtype)
        self.weights = base_weights(inputs, outputs, sets, dtype) if self.kind in OF_WEIGHT else []
        few = layout.linear_fits(workload.rows, max(rank, room))
        self.fuses = few and item == 2 and ops.linear_runs(torch.device("cuda"))

    def _take(self, size: int) -> int:
        self.size += layout.round_up(size, layout.ALIGN)
        return self.size - layout.round_up(size, layout.ALIGN)

    def _take_structure(self, own: int, inputs: int, width: int, item: int) -> int:
        """Room for a block, which is filled later: numbers would take no notice of its integers."""
        made = STRUCTURES[self.kind](own, inputs, width)
        sizes = [p.numel() * (item if p.is_floating_point() else p.itemsize) for p in structured.parts(made).values()]
        begin = [self._take(size) for size in sizes][0]
        self.blocks.append((begin, made))
        return begin

    def _fill_structures(self, values: torch.Tensor) -> None:
        data, known = values.view(torch.uint8), {}
        for offset, made in self.blocks:
            for part in known.setdefault(id(made), [p.cuda() for p in structured.parts(made).values()]):
                part = part.to(values.dtype) if part.is_floating_point() else part
                data[offset : offset + part.nbytes] = part.contiguous().flatten().view(torch.uint8)
                offset += layout.round_up(part.nbytes, layout.ALIGN)

    def make_plan(self) -> None:
        ops.plan(self.row_slot, self.slots, self.tile_rows, self.plan)

    def run(self, part: str, n: int) -> None:
        """"before": what reads the layer's input; "after": what updates its output; or both."""
        common = {"arena": self.arena, "table": self.table, "module": n * len(self.outputs)}
        tiles = {"plan": self.plan, "tile_rows": self.tile_rows}
        slices, sets = len(self.outputs), self.shared[n : n + 1]
        if self.kind == "oft":
            ops.rotate(self.x, self.row_slot, slices=slices, out=self.rotated, **common)
            return
        if self.kind in STRUCTURES:
            if part != "before":
                ops.structured(self.x, self.row_slot, columns=self.columns, y=self.y, **common)
            if part != "before" and self.kind in OF_WEIGHT:
                ops.reweigh(self.x, self.weights[n], self.row_slot, columns=self.columns, y=self.y, **common)
            return
        outputs = {"columns": self.columns, "out_begin": [0] * slices, "sets": sets}
        if part != "after" and self.kind == "lora":
            ops.shrink(self.x, slices=slices, v=self.v, **common, **tiles)
        elif part != "after":
            ops.project(self.x, self.row_slot, sets=sets, slices=slices, in_begin=0, v=self.v, **common, **tiles)
        if part != "before":
            v, shared_v = self._sums()
            ops.expand(v, shared_v, self.row_slot, y=self.y, **outputs, **common, **tiles)

    def _sums(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return self.v if self.kind == "lora" else None, self.v if self.kind == "vera" else None

    def run_linear(self, n: int, weight: torch.Tensor, parts: Sequence[str] = ("before", "after")) -> None:
        """A layer as few rows have it, with these of run's parts: one op for its GEMM and the expand."""
        if "before" in parts:
            self.run("before", n)
        after, slices = "after" in parts, len(self.outputs)
        x = self.rotated if after and self.kind == "oft" else self.x[None]
        v, shared_v = self._sums() if after else (None, None)
        ops.linear(
            x, weight, None, v, shared_v, self.row_slot, self.arena, self.table, self.slots, self.shared[n : n + 1],
            n * slices, self.columns, [0] * slices, self.y,
        )  # fmt: skip
        if after and self.kind in STRUCTURES:
            self.run("after", n)

    def run_beside(
        self, n: int, weight: torch.Tensor, beside: torch.cuda.Stream, parts: Sequence[str] = ("before", "after")
    ) -> None:
        """The same as more rows have it: what needs only the layer's input runs beside its GEMM, rotations before it."""
        main = torch.cuda.current_stream()
        if "before" in parts and self.kind == "oft":
            self.run("before", n)
        beside.wait_stream(main)
        torch.mm(self.x, weight.T, out=self.y)
        if "before" in parts and self.kind != "oft":
            with torch.cuda.stream(beside):
                self.run("before", n)
            main.wait_stream(beside)
        if "after" in parts and self.kind != "oft":
            self.run("after", n)


def base_weights(inputs: int, outputs: tuple[int, ...], count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.randn(sum(outputs), inputs, device="cuda", dtype=dtype) * 0.02 for _ in range(count)]
