"""Times the ops on one GPU: python benchmarks/bench_ops.py [--model llama-3.1-8b] [--only REGEX] [--json FILE].

For each workload and fused layer one CUDA graph runs the op over many distinct sets of weights, more bytes than the
L2 cache holds, as in a model whose layers follow one another; inputs stay in the cache, as in life. VeRA's A and B
are one pair for all sets, as PEFT shares them over a model's layers. A line says what one launch (or pair) takes, and
in brackets how much of the speed of a large copy it reached, by the adapter bytes that it had to read.
``step`` lines add up a decoding step: a graph of all layers' base GEMMs with the adapters' ops against one without.

``--stock`` times SGLang's own triton and csgmv layers too (it needs SGLang): the same step with each in our place, one
stream, its graph replayed in turns with ours and the base's; with ``--parts ops,step`` also every fused layer's pair of
launches alone. stock_ops.py says how they are called, and checks each result before its time is taken. The last line
names each row where ours is slower than SGLang's best. Rows carry their ``backend``: scute, triton or csgmv.
"""

from __future__ import annotations

import argparse
import re
import statistics
from dataclasses import dataclass
from functools import cache
from math import isqrt
from pathlib import Path
from types import ModuleType

import record
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
            v, shared_v = (self.v, None) if self.kind == "lora" else (None, self.v)
            ops.expand(v, shared_v, self.row_slot, y=self.y, **outputs, **common, **tiles)


def base_weights(inputs: int, outputs: tuple[int, ...], count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.randn(sum(outputs), inputs, device="cuda", dtype=dtype) * 0.02 for _ in range(count)]


def graph_of(body) -> torch.cuda.CUDAGraph:
    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph


def microseconds(*graphs: torch.cuda.CUDAGraph, seconds: float = 0.25) -> list[float]:
    """Median time of a replay of each, taken in turns."""

    def once(graph, times: int) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(times):
            graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / times

    each = once(graphs[0], 3)
    times = max(1, min(10, int(seconds * 1e6 / 20 / each)))
    samples = [[once(graph, times) for graph in graphs] for _ in range(20)]
    return [statistics.median(column) for column in zip(*samples)]


def copy_bandwidth() -> float:
    """Bytes read and written a microsecond by a large copy."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / microseconds(graph_of(lambda: target.copy_(source)))[0]


def time_ops(
    name: str, workload: Workload, model: str, bandwidth: float, dtype: torch.dtype, room: int, stock: ModuleType | None
) -> list[dict]:
    rows = []
    for layer, (inputs, outputs) in fused_layers(model).items():
        once = Bench(workload, inputs, outputs, 1, dtype).bytes
        bench = Bench(workload, inputs, outputs, int(min(256, max(16, 6e8 // once))), dtype, room)
        bench.make_plan()
        line = f"{name:24} {layer:8}"
        parts = {"oft": ["before"]} | dict.fromkeys(STRUCTURES, ["after"])
        for part in parts.get(bench.kind, ["before", "after"]):

            def body(bench=bench, part=part):
                for n in range(bench.sets):
                    bench.run(part, n)

            taken = microseconds(graph_of(body))[0] / bench.sets
            share = {"before": inputs * (len(outputs) if bench.kind == "lora" else 1), "after": sum(outputs)}
            read = bench.bytes * (1 if bench.kind in parts else share[part] / sum(share.values()))
            row = {"workload": name, "layer": layer, "op": part, "us": taken, "bytes": read,
                   "gb_s": read / taken / 1e3, "share": read / taken / bandwidth}  # fmt: skip
            line += f" {part} {taken:6.2f} us [{row['share']:4.0%}]"
            rows.append(row)
        print(line, flush=True)
        if stock:
            rows += time_pairs(name, layer, bench, stock.build(workload, {layer: bench}, dtype))
        del bench
        torch.cuda.empty_cache()
    return rows


def time_tokens(tenants: int, count: int, model: str, bandwidth: float, dtype: torch.dtype) -> list[dict]:
    """The ops for own rows of the vocabulary: ``tenants`` rows, each of a tenant with ``count`` tokens of its own."""
    hidden, vocabulary, item = MODELS[model][1], 128 * 1024, dtype.itemsize
    ids = torch.arange(count) * (vocabulary // count)
    block = len(layout.pack_rows(ids, torch.empty(count, hidden, dtype=dtype)))
    sets = int(min(256, max(4, 6e8 // (block * tenants))))
    values = torch.empty(sets * tenants, block // item, dtype=dtype, device="cuda").normal_(0, hidden**-0.5)
    arena, head = values.view(torch.uint8), 4 * (layout.ROWS_HEADER + layout.round_up(count, 4))
    arena[:, :head] = layout.pack_rows(ids, torch.empty(count, 0, dtype=dtype)).cuda()
    table = torch.full((tenants, sets, layout.FIELDS), -1, dtype=torch.int64)
    table[..., layout.TOKENS] = torch.arange(sets * tenants).view(tenants, sets) * block
    row_slot = torch.arange(tenants, dtype=torch.int32).cuda()
    common = {"row_slot": row_slot, "arena": arena.flatten(), "table": table.cuda()}
    x = torch.randn(tenants, hidden, device="cuda", dtype=dtype)
    y = torch.randn(tenants, vocabulary, device="cuda", dtype=dtype)
    chosen = ids[torch.arange(tenants) % count].cuda()
    bodies = {
        "token_rows": (lambda n: ops.token_rows(chosen, module=n, y=x, **common), 2 * tenants * hidden * item),
        "token_logits": (lambda n: ops.token_logits(x, module=n, y=y, **common), tenants * count * hidden * item),
    }
    rows, name = [], f"tokens_n{count}x{tenants}_bs{tenants}"
    for op, (run, read) in bodies.items():
        taken = microseconds(graph_of(lambda run=run: [run(n) for n in range(sets)]))[0] / sets
        row = {"workload": name, "op": op, "us": taken, "bytes": read, "gb_s": read / taken / 1e3,
               "share": read / taken / bandwidth}  # fmt: skip
        print(f"{name:24} {op:12} {taken:6.2f} us [{row['share']:4.0%}]", flush=True)
        rows.append(row)
    return rows


def time_pairs(name: str, layer: str, bench: Bench, built: dict[str, dict[str, list]]) -> list[dict]:
    """One fused layer's two launches, one after the other: ours and SGLang's, graphs replayed in turns."""

    def ours() -> None:
        for n in range(bench.sets):
            bench.run("both", n)

    def theirs(sets: list) -> None:
        for one in sets:
            one.apply_lora(bench.y, bench.x)

    graphs = [graph_of(ours), *(graph_of(lambda: theirs(built[backend][layer])) for backend in built)]
    taken = dict(zip(("scute", *built), (us / bench.sets for us in microseconds(*graphs))))
    print(f"{name:24} {layer:8} pair " + ", ".join(f"{what} {us:.2f} us" for what, us in taken.items()), flush=True)
    return [{"workload": name, "layer": layer, "op": "pair", "backend": what, "us": us} for what, us in taken.items()]


def time_step(
    name: str, workload: Workload, model: str, dtype: torch.dtype, room: int, stock: ModuleType | None
) -> list[dict]:
    """What the adapters' ops add to one step, in milliseconds, with the base's GEMMs between them."""
    layers = MODELS[model][0]
    fused = {layer: Bench(workload, *shape, layers, dtype, room) for layer, shape in fused_layers(model).items()}
    benches = list(fused.values())
    weights = [
        bench.weights or base_weights(*shape, layers, dtype) for bench, shape in zip(benches, fused_layers(model).values())
    ]
    for bench in benches:
        bench.make_plan()
    beside = torch.cuda.Stream()

    def step(*parts: str) -> None:
        """As layers.py does: what needs only the layer's input runs beside its GEMM, rotations before it."""
        main = torch.cuda.current_stream()
        for n in range(layers):
            for bench, weight in zip(benches, weights):
                if "before" in parts and bench.kind == "oft":
                    bench.run("before", n)
                beside.wait_stream(main)
                torch.mm(bench.x, weight[n].T, out=bench.y)
                if "before" in parts and bench.kind != "oft":
                    with torch.cuda.stream(beside):
                        bench.run("before", n)
                    main.wait_stream(beside)
                if "after" in parts and bench.kind != "oft":
                    bench.run("after", n)

    def stock_step(built: dict[str, list]) -> None:
        """As SGLang's layers do: both launches after the GEMM, on its stream."""
        for n in range(layers):
            for layer, bench, weight in zip(fused, benches, weights):
                torch.mm(bench.x, weight[n].T, out=bench.y)
                built[layer][n].apply_lora(bench.y, bench.x)

    variants = ((), ("before", "after"), ("before",), ("after",))
    built = stock.build(workload, fused, dtype) if stock else {}
    graphs = [graph_of(lambda: step(*variant)) for variant in variants]
    graphs += [graph_of(lambda: stock_step(built[backend])) for backend in built]
    base, *others = (us / 1e3 for us in microseconds(*graphs))
    read = sum(bench.bytes for bench in benches) * layers
    row = {"workload": name, "op": "step", "base_ms": base, "bytes": read} | ({"backend": "scute"} if stock else {})
    row |= {what: ms - base for what, ms in zip(("added_ms", "sums_alone_ms", "expand_alone_ms"), others)}
    print(f"{name:24} step: base {base:.3f} ms, added {row['added_ms']:.3f} ms (sums alone {row['sums_alone_ms']:.3f}, "
          f"expand alone {row['expand_alone_ms']:.3f}), {read / 1e6:.0f} MB", flush=True)  # fmt: skip
    rows = [row]
    for backend, ms in zip(built, others[3:]):
        rows.append({"workload": name, "op": "step", "backend": backend, "base_ms": base, "added_ms": ms - base})
    if stock:
        added = ", ".join(f"{row['backend']} {row['added_ms']:.3f} ms" for row in rows)
        print(f"{name:24} step: added by {added}", flush=True)
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama-3.1-8b")
    parser.add_argument("--only", help="regular expression for workloads' names; default: all, with --stock five")
    parser.add_argument("--parts", help="ops, step or both; default: ops,step, with --stock step")
    parser.add_argument("--stock", action="store_true", help="time SGLang's own LoRA backends too")
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), default="float16")
    parser.add_argument("--room", type=int, default=0, help="ranks that partial sums have room for: graph_rank in serving")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if options.stock:
        import stock_ops  # it imports SGLang, which nothing else here needs
    only = options.only if options.only is not None else stock_ops.DEFAULT if options.stock else ""
    parts = options.parts or ("step" if options.stock else "ops,step")
    dtype, rows, bandwidth = getattr(torch, options.dtype), [], copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, {options.model}, {options.dtype}, copy {bandwidth / 1e3:.0f} GB/s")
    for tenants, count in TOKENS:
        if "ops" in parts and re.search(only, "tokens"):
            rows += time_tokens(tenants, count, options.model, bandwidth, dtype)
    for name, workload in WORKLOADS.items():
        if not re.search(only, name):
            continue
        stock = stock_ops if options.stock and stock_ops.can_run(workload) else None
        if "ops" in parts:
            rows += time_ops(name, workload, options.model, bandwidth, dtype, options.room, stock)
        if "step" in parts:
            rows += time_step(name, workload, options.model, dtype, options.room, stock)
            torch.cuda.empty_cache()
        record.save(options.json, rows, model=options.model, dtype=options.dtype, room=options.room, copy_gb_s=bandwidth / 1e3)
    if options.stock:
        print(f"{options.model}: {stock_ops.verdict(rows)}")


if __name__ == "__main__":
    main()
