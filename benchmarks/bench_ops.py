"""Times the ops on one GPU: python benchmarks/bench_ops.py [--model llama-3.1-8b] [--only REGEX] [--json FILE].

For each workload and fused layer one CUDA graph runs the op over many distinct sets of weights, more bytes than the
L2 cache holds, as in a model whose layers follow one another; inputs stay in the cache, as in life. VeRA's A and B
are one pair for all sets, as PEFT shares them over a model's layers. A line says what one launch (or pair) takes, and
in brackets how much of the speed of a large copy it reached, by the adapter bytes that it had to read; ``linear``, which
few rows have instead of a GEMM and ``after``, reads the base's weight too.

``step`` lines add up a decoding step: a graph of all layers' base GEMMs with the adapters' ops against one of the GEMMs
alone. The ops are those of layers.py. Up to LINEAR_ROWS rows (16 bit, compute capability 9.0) that is linear in the GEMM's
place; "without sums" is linear on what v held before, "gemm alone" linear without v. Else sums run beside the GEMM and an
expand after it, which are then timed without each other too. Between two layers a model runs other kernels, so here every
GEMM of every graph has a small one before it: back to back, linears would overlap by programmatic launch.

``--stock`` times SGLang's own triton and csgmv layers too (it needs SGLang): the same step with each in our place, one
stream, its graph replayed in turns with ours and the base's; with ``--parts ops,step`` also every fused layer's pair of
launches alone. stock_ops.py says how they are called, and checks each result before its time is taken. The last line
names each row where ours is slower than SGLang's best. Rows carry their ``backend``: scute, triton or csgmv.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import record
import torch
from op_cases import MODELS, STRUCTURES, TOKENS, WORKLOADS, Bench, Workload, base_weights, fused_layers
from timing import check_options, copy_bandwidth, graph_of, microseconds, regex

from scute_sgl import layout, ops
from scute_sgl.console import positive


def time_ops(
    name: str, workload: Workload, model: str, bandwidth: float, dtype: torch.dtype, room: int, stock: ModuleType | None
) -> list[dict]:
    rows = []
    for layer, (inputs, outputs) in fused_layers(model).items():
        once = Bench(workload, inputs, outputs, 1, dtype).bytes
        bench = Bench(workload, inputs, outputs, int(min(256, max(16, 6e8 // once))), dtype, room)
        bench.make_plan()
        line = f"{name:24} {layer:8}"
        single = {"oft": ["before"]} | dict.fromkeys(STRUCTURES, ["after"])
        parts = single.get(bench.kind, ["before", "after", *(["linear"] if bench.fuses else [])])
        size = inputs * sum(outputs) * dtype.itemsize
        weights = base_weights(inputs, outputs, int(6e8 // size) + 2, dtype) if "linear" in parts else []
        for part in parts:

            def body(bench=bench, part=part, weights=weights):
                for n in range(bench.sets):
                    if part == "linear":
                        bench.run_linear(n, weights[n % len(weights)], ["after"])
                    else:
                        bench.run(part, n)

            taken = microseconds(graph_of(body))[0] / bench.sets
            share = {"before": inputs * (len(outputs) if bench.kind == "lora" else 1), "after": sum(outputs)}
            share["linear"] = share["after"]
            read = bench.bytes * (1 if bench.kind in single else share[part] / (share["before"] + share["after"]))
            read += size if part == "linear" else 0
            row = {"workload": name, "layer": layer, "op": part, "us": taken, "bytes": read,
                   "gb_s": read / taken / 1e3, "share": read / taken / bandwidth}  # fmt: skip
            line += f" {part} {taken:6.2f} us [{row['share']:4.0%}]"
            rows.append(row)
        print(line, flush=True)
        if stock:
            rows += time_pairs(name, layer, bench, stock.build(workload, {layer: bench}, dtype))
        del bench, weights, body
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
    beside, few = torch.cuda.Stream(), benches[0].fuses

    def step(run: Callable[[str, int, torch.Tensor], None]) -> torch.cuda.CUDAGraph:
        def body() -> None:
            for n in range(layers):
                for (layer, bench), weight in zip(fused.items(), weights):
                    bench.x.mul_(1.0)
                    run(layer, n, weight[n])

        return graph_of(body)

    def base(layer: str, n: int, weight: torch.Tensor) -> None:
        torch.mm(fused[layer].x, weight.T, out=fused[layer].y)

    def ours(parts: Sequence[str]) -> torch.cuda.CUDAGraph:
        if few:
            return step(lambda layer, n, weight: fused[layer].run_linear(n, weight, parts))
        return step(lambda layer, n, weight: fused[layer].run_beside(n, weight, beside, parts))

    def theirs(built: dict[str, list]) -> torch.cuda.CUDAGraph:
        """As SGLang's layers do: both launches after the GEMM, on its stream."""

        def run(layer: str, n: int, weight: torch.Tensor) -> None:
            base(layer, n, weight)
            built[layer][n].apply_lora(fused[layer].y, fused[layer].x)

        return step(run)

    variants = {"added": ["before", "after"]}  # first: it fills what the others find in v
    variants |= {"without_sums": ["after"], "gemm_alone": []} if few else {"sums_alone": ["before"], "expand_alone": ["after"]}
    built = stock.build(workload, fused, dtype) if stock else {}
    graphs = [step(base), *map(ours, variants.values()), *map(theirs, built.values())]
    base_ms, *others = (us / 1e3 for us in microseconds(*graphs))
    read = sum(bench.bytes for bench in benches) * layers
    row = {"workload": name, "op": "step", "base_ms": base_ms, "bytes": read} | ({"backend": "scute"} if stock else {})
    row |= {f"{what}_ms": ms - base_ms for what, ms in zip(variants, others)}
    told = ", ".join(f"{what.replace('_', ' ')} {row[f'{what}_ms']:.3f}" for what in variants)
    print(f"{name:24} step: base {base_ms:.3f} ms, {told}, {read / 1e6:.0f} MB", flush=True)
    rows = [row]
    for backend, ms in zip(built, others[len(variants) :]):
        rows.append({"workload": name, "op": "step", "backend": backend, "base_ms": base_ms, "added_ms": ms - base_ms})
    if stock:
        added = ", ".join(f"{row['backend']} {row['added_ms']:.3f} ms" for row in rows)
        print(f"{name:24} step: added by {added}", flush=True)
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama-3.1-8b")
    parser.add_argument("--only", type=regex, help="regular expression for workloads' names; default: all, with --stock five")
    parser.add_argument("--parts", help="ops, step or both; default: ops,step, with --stock step")
    parser.add_argument("--stock", action="store_true", help="time SGLang's own LoRA backends too")
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), default="float16")
    parser.add_argument("--room", type=positive, default=0, help="ranks that partial sums have room for: graph_rank in serving")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    parts = options.parts or ("step" if options.stock else "ops,step")
    check_options(parser, parts, ("ops", "step"), options.json)
    if options.stock:
        import stock_ops  # it imports SGLang, which nothing else here needs
    only = options.only if options.only is not None else stock_ops.DEFAULT if options.stock else ""
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
