"""Times the ops on many rows: python benchmarks/bench_prefill.py [--model llama-3.1-8b] [--only REGEX] [--json FILE].

A pass is a CUDA graph of a few layers' four fused GEMMs, the adapters' ops after each, against the same graph without ops;
every layer has weights of its own. "added" is scaled to the model's number of layers, and "ratio" is the forward
pass's: the measured time of a whole prefill pass of the base (BASE_MS) where there is one, else that of the GEMMs alone.
``ops`` lines say what each launch takes, how many bytes it has to move at least, and that over a large copy's speed.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

import record
import torch
from op_cases import MODELS, fused_layers
from timing import check_options, copy_bandwidth, graph_of, microseconds, regex

from scute_sgl import layout, ops
from scute_sgl.console import positive

TILE = 64
# ms of the base's forward pass of Llama-3.1-8B on one H200 (SGLang 0.5.17), by rows
BASE_MS = {2048: 51.5, 8192: 191.0}


@dataclass(frozen=True)
class Workload:
    rows: int
    kind: str  # lora; dora: with a scale; separate: a scale that torch applies before a plain expand; vera; oft
    size: int = 16  # rank or block
    tenants: int = 16
    request: int = 128  # rows of a request
    target: float | None = None

    def __str__(self) -> str:
        return f"{self.kind}{self.size}x{self.tenants}_{self.rows}"


WORKLOADS = [
    Workload(2048, "lora", target=1.12),
    Workload(4096, "lora"),
    Workload(8192, "lora", target=1.10),
    Workload(128, "lora", tenants=1),
    Workload(512, "lora", tenants=4),
    Workload(8192, "lora", size=64, target=1.15),
    *(Workload(rows, kind) for rows in (1024, 2048, 8192) for kind in ("dora", "separate")),
    *(Workload(rows, "vera", size=256) for rows in (2048, 8192)),
    *(Workload(rows, "oft", size=32) for rows in (2048, 8192)),
]


class Layer:
    """One fused layer, ``sets`` times with weights of its own, on activations that all sets share."""

    def __init__(self, workload: Workload, inputs: int, outputs: tuple[int, ...], sets: int, dtype: torch.dtype):
        self.workload, self.inputs, self.outputs, self.dtype = workload, inputs, outputs, dtype
        self.columns = [sum(outputs[:i]) for i in range(len(outputs) + 1)]
        tenants, size, kind, item = workload.tenants, workload.size, workload.kind, dtype.itemsize
        self.size = 0
        table = torch.full((tenants, sets * len(outputs), layout.FIELDS), -1, dtype=torch.int64)
        shared = torch.full((sets, layout.SET_FIELDS), -1, dtype=torch.int64)
        for n in range(sets):
            if kind == "vera":
                factors = self._take(size * inputs * item), self._take(size * max(outputs) * item)
                shared[n] = torch.tensor([*factors, size, inputs, max(outputs)])
            for tenant in range(tenants):
                for i, width in enumerate(outputs):
                    entry = table[tenant, n * len(outputs) + i]
                    entry[layout.META] = layout.pack_meta(0 if kind == "oft" else size, size if kind == "oft" else 0)
                    if kind == "vera":
                        entry[layout.D], entry[layout.E] = self._take(size * item), self._take(width * item)
                    elif kind == "oft":
                        entry[layout.ROTATION] = self._take(inputs * size * item)
                    else:
                        entry[layout.A], entry[layout.B] = self._take(size * inputs * item), self._take(size * width * item)
                    if kind == "dora":
                        entry[layout.SCALE] = self._take(width * item)
        values = torch.empty(self.size // item, dtype=dtype, device="cuda")
        for part in values.split(1 << 27):
            part.normal_(0, inputs**-0.5)
        self.arena, self.table, self.shared = values.view(torch.uint8), table.cuda(), shared.cuda()
        live = {"vera": layout.SHARED, "oft": layout.ROTATED}.get(kind, layout.DELTA)
        self.slots = torch.tensor([[live, 0, size]] * tenants, dtype=torch.int32).cuda()
        rows = workload.rows
        self.row_slot = (torch.arange(rows) // workload.request % tenants).int().cuda()
        self.plan = torch.zeros(layout.plan_size(rows), dtype=torch.int32, device="cuda")
        ops.plan(self.row_slot, self.slots, TILE, self.plan)
        self.x = torch.randn(rows, inputs, device="cuda", dtype=dtype)
        self.y = torch.randn(rows, sum(outputs), device="cuda", dtype=dtype)
        if kind == "oft":
            self.rotated = torch.empty(len(outputs), rows, inputs, device="cuda", dtype=dtype)
        else:
            self.v = torch.zeros(1, rows, (1 if kind == "vera" else len(outputs)) * size, device="cuda")
        if kind == "separate":
            self.scale = torch.rand(tenants, sum(outputs), device="cuda", dtype=dtype) * 0.01
            self.slot_index = self.row_slot.long()

    def _take(self, size: int) -> int:
        self.size += layout.round_up(size, layout.ALIGN)
        return self.size - layout.round_up(size, layout.ALIGN)

    @property
    def parts(self) -> tuple[str, ...]:
        return {"vera": ("project", "expand"), "oft": ("rotate",)}.get(self.workload.kind, ("shrink", "expand"))

    def least_bytes(self, part: str) -> float:
        """What the op has to read and write of its rows; weights, v and vectors stay in the cache."""
        rows, item = self.workload.rows, self.dtype.itemsize
        x, y = rows * self.inputs * item, 2 * rows * sum(self.outputs) * item
        return {"shrink": x, "project": x, "expand": y, "rotate": x * (1 + len(self.outputs))}[part]

    def run(self, n: int, *parts: str) -> None:
        common = {"arena": self.arena, "table": self.table, "module": n * len(self.outputs)}
        tiles = {"plan": self.plan, "tile_rows": TILE}
        slices, sets = len(self.outputs), self.shared[n : n + 1]
        for part in parts or self.parts:
            if part == "shrink":
                ops.shrink(self.x, slices=slices, v=self.v, **common, **tiles)
            elif part == "expand":
                if self.workload.kind == "separate":
                    self.y.addcmul_(self.y, self.scale[self.slot_index])
                v, shared_v = (None, self.v) if self.workload.kind == "vera" else (self.v, None)
                ops.expand(v, shared_v, self.row_slot, sets=sets, columns=self.columns, out_begin=[0] * slices, y=self.y,
                           **common, **tiles)  # fmt: skip
            elif part == "project":
                ops.project(self.x, self.row_slot, sets=sets, slices=slices, in_begin=0, v=self.v, **common, **tiles)
            else:
                ops.rotate(self.x, self.row_slot, slices=slices, out=self.rotated, **common)


def time_ops(workload: Workload, layers: dict[str, Layer], sets: int, bandwidth: float) -> list[dict]:
    rows = []
    for name, layer in layers.items():
        for part in layer.parts:

            def body(layer=layer, part=part):
                for n in range(sets):
                    layer.run(n, part)

            taken, least = microseconds(graph_of(body), seconds=0.1)[0] / sets, layer.least_bytes(part)
            rows.append({"workload": str(workload), "layer": name, "op": part, "us": taken, "bytes": least,
                         "share": least / taken / bandwidth})  # fmt: skip
            print(f"{workload!s:20} {name:8} {part:7} {taken:8.1f} us  {least / 1e6:7.1f} MB "
                  f"{least / taken / 1e3:6.0f} GB/s {rows[-1]['share']:6.1%}", flush=True)  # fmt: skip
    return rows


def time_pass(workload: Workload, layers: dict[str, Layer], weights: dict, sets: int, model: str) -> dict:
    def step(adapted: bool) -> None:
        for n in range(sets):
            for name, layer in layers.items():
                torch.mm(layer.x, weights[name][n].T, out=layer.y)
                if adapted:
                    layer.run(n)

    scale = MODELS[model][0] / sets / 1e3
    base, adapted = (us * scale for us in microseconds(graph_of(lambda: step(False)), graph_of(lambda: step(True))))
    whole = BASE_MS.get(workload.rows, base) if model == "llama-3.1-8b" else base
    row = {"workload": str(workload), "op": "pass", "gemm_ms": base, "added_ms": adapted - base, "base_ms": whole,
           "ratio": 1 + (adapted - base) / whole, "target": workload.target}  # fmt: skip
    print(f"{workload!s:20} pass: GEMMs {base:.2f} ms, base {whole:.2f} ms, added {row['added_ms']:.3f} ms, "
          f"ratio {row['ratio']:.3f}" + f" (target {workload.target})" * bool(workload.target), flush=True)  # fmt: skip
    return row


def compare_scales(rows: list[dict], model: str) -> list[dict]:
    """s inside the expand, and in a pass of its own, against plain LoRA: whole passes, by rows."""
    added = {row["workload"]: row for row in rows if row["op"] == "pass"}
    found = []
    for name, row in added.items():
        plain = added.get(re.sub("dora|separate", "lora", name))
        if plain is None or plain is row or not name.startswith(("dora", "separate")):
            continue
        over = (row["gemm_ms"] + row["added_ms"]) / (plain["gemm_ms"] + plain["added_ms"])
        found.append({"workload": name, "op": "scale", "ratio": over, "target": 1.02 if "dora" in name else None})
        print(f"{name:20} over plain LoRA, GEMMs and ops: {over:.4f}")
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama-3.1-8b")
    parser.add_argument("--only", type=regex, default="", help="regular expression that a workload's name must match")
    parser.add_argument("--parts", default="ops,pass")
    parser.add_argument("--sets", type=positive, default=6, help="layers of a pass")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    check_options(parser, options.parts, ("ops", "pass"), options.json)
    dtype, sets, rows, bandwidth = getattr(torch, options.dtype), options.sets, [], copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, {options.model}, {options.dtype}, copy {bandwidth / 1e3:.0f} GB/s")
    shapes = fused_layers(options.model)
    weights = {
        name: torch.randn(sets, sum(outputs), inputs, device="cuda", dtype=dtype) * 0.02
        for name, (inputs, outputs) in shapes.items()
    }
    for workload in WORKLOADS:
        if not re.search(options.only, str(workload)):
            continue
        layers = {name: Layer(workload, *shape, sets, dtype) for name, shape in shapes.items()}
        if "ops" in options.parts and workload.kind not in ("dora", "separate"):
            rows += time_ops(workload, layers, sets, bandwidth)
        if "pass" in options.parts:
            rows.append(time_pass(workload, layers, weights, sets, options.model))
        record.save(options.json, rows, model=options.model, dtype=options.dtype, copy_gb_s=bandwidth / 1e3)
        del layers
        torch.cuda.empty_cache()
    rows += compare_scales(rows, options.model)
    record.save(options.json, rows, model=options.model, dtype=options.dtype, copy_gb_s=bandwidth / 1e3)


if __name__ == "__main__":
    main()
