"""``scute plan``: what adapters must add to a decode step on a GPU, and how many of them it holds."""

from __future__ import annotations

import argparse
import functools
import json
import sys
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from scute_sgl.console import above_0, label, picture, say
from scute_sgl.errors import printable
from scute_sgl.inspect_cli import columns, read_model
from scute_sgl.options import DEFAULT_SLOTS, Options

if TYPE_CHECKING:
    from scute_sgl.byte_model import Cost, Gpu

DEFAULT_GPU = "H200"
PLOTTED = 32  # tenants in a plotted batch, unless --batch says more


@dataclass(frozen=True)
class Tenant:
    """An adapter as the byte model sees it, and as plain LoRA of rank 64. ``nbytes`` and ``set_bytes``: its block of
    the arena and its shared set's."""

    name: str
    method: str
    cost: Cost
    as_lora: Cost
    nbytes: int
    set_bytes: int
    rank: int


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "plan",
        help="predict what adapters add to a decode step, and how many a GPU holds",
        description="The byte model: bytes that a decode step reads over the GPU's bandwidth, and launches times their "
        "cost. Needs no GPU and no base weights.",
    )
    parser.add_argument("--model", required=True, metavar="DIR", help="the base model; its config.json is enough")
    parser.add_argument("--adapters", required=True, nargs="+", metavar="ADAPTER", help="as for scute inspect")
    parser.add_argument("--batch", type=int, metavar="N", help="rows of the batch; default: one for each adapter")
    parser.add_argument("--dtype", help="that the base is served in; default: what SGLang takes for the model")
    parser.add_argument("--gpu", metavar="NAME", help=f"a known GPU; default: {DEFAULT_GPU}")
    parser.add_argument("--bandwidth", type=above_0, metavar="GB/s", help="of another GPU's memory")
    parser.add_argument("--launch", type=above_0, metavar="US", help="of a kernel behind a GEMM in a CUDA graph")
    parser.add_argument("--memory", type=above_0, metavar="GB", help="of that GPU")
    parser.add_argument("--measure", action="store_true", help="measure the GPU of this machine instead")
    parser.add_argument("--plot", type=picture, metavar="FILE", help="draw added ms against tenants: .png or .svg")
    parser.add_argument("--json", action="store_true", help="print a JSON list and nothing else")
    parser.set_defaults(run=functools.partial(run, parser))


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Print a row for every served adapter and the total. Exit code 2 for bad usage, or if none is served."""
    if args.batch is not None and args.batch < 1:
        parser.error(f"--batch {args.batch}: want at least 1")
    if args.plot:
        _check_plot(parser)
    from scute_sgl import inspection

    try:
        paths, gpu, (base, dtype) = inspection.folders(args.adapters), gpu_of(args), read_model(args.model, args.dtype)
    except (ValueError, RuntimeError) as error:
        parser.error(printable(str(error)))
    if dtype.itemsize != 2:
        gpu = replace(gpu, linear_rows=0)
    tenants = []
    for path in paths:
        found = inspection.look(path, base, dtype)
        if found.refusal is not None:
            say(f"left out: {found.refusal.named(found.name)}")
        else:
            tenants.append(_tenant(found, base, dtype))
    if not tenants:
        print("scute plan: no adapter to plan for is served", file=sys.stderr)
        return 2
    from scute_sgl.byte_model import fused_layers

    layers = fused_layers(base.targets[0].values())
    rows = plan(tenants, args.batch or len(tenants), layers, gpu)
    print(json.dumps(rows, indent=1) if args.json else table(rows))
    beside = sys.stderr if args.json else sys.stdout
    print(constants(gpu), file=beside)
    for row in rows[:-1]:
        if row["bytes_step"] > row["bytes_step_lora64"]:
            print(
                f"note: {printable(row['name'])} ({row['method']}), served exactly, reads {row['bytes_step']:,} bytes "
                f"a step; its conversion to LoRA of rank 64 would read {row['bytes_step_lora64']:,}",
                file=beside,
            )
    for tenant in tenants:
        if tenant.rank > Options.graph_rank:
            print(
                f"note: {printable(tenant.name)} ({tenant.method}) has rank {tenant.rank:,}: its batches decode without CUDA "
                f"graphs (--scute-graph-rank, {Options.graph_rank} by default), which takes longer than predicted",
                file=beside,
            )
    if args.plot:
        draw(args.plot, tenants, min(max(args.batch or 0, PLOTTED), DEFAULT_SLOTS), layers, gpu)
    return 0


def gpu_of(args: argparse.Namespace) -> Gpu:
    """The GPU that the flags mean. ValueError for flags that do not go together or no such GPU, RuntimeError for
    --measure without one."""
    from scute_sgl.byte_model import GIVEN, GPUS, PCIE4, Gpu, measure

    numbers = {"--bandwidth": args.bandwidth, "--launch": args.launch, "--memory": args.memory}
    given = [flag for flag, value in numbers.items() if value is not None]
    if sum((bool(given), args.gpu is not None, args.measure)) > 1:
        raise ValueError("want one of --gpu, --measure, and --bandwidth with --launch and --memory")
    if args.measure:
        try:
            return measure()
        except RuntimeError as error:
            raise RuntimeError(f"--measure: {error}; give --gpu, or --bandwidth, --launch and --memory") from error
    if not given:
        by_name = {name.lower(): gpu for name, gpu in GPUS.items()}
        name = DEFAULT_GPU if args.gpu is None else args.gpu
        if name.lower() not in by_name:
            raise ValueError(f"--gpu {name!r}: want one of {', '.join(GPUS)}, or --bandwidth, --launch and --memory")
        return by_name[name.lower()]
    if len(given) < len(numbers):
        raise ValueError(f"found {' and '.join(given)}, want {', '.join(numbers)} together")
    return Gpu(args.bandwidth * 1e9, args.launch * 1e-6, args.memory * 1e9, PCIE4, GIVEN)


def plan(tenants: list[Tenant], rows: int, layers: list[int], gpu: Gpu) -> list[dict]:
    """A dict for every tenant, alone in a batch, and one for ``rows`` of all, or of those that read most."""
    from scute_sgl.byte_model import added_ms, bytes_of_step, launches_of_step
    from scute_sgl.options import gpu_arena_bytes

    arena = gpu_arena_bytes(gpu.memory)

    def step(costs: list[Cost], costs64: list[Cost], rows: int) -> dict:
        read, read64 = bytes_of_step(costs, rows), bytes_of_step(costs64, rows)
        return {
            "bytes_step": read,
            "ms_step": added_ms(read, launches_of_step(costs, layers, rows, gpu), gpu),
            "bytes_step_lora64": read64,
            "ms_step_lora64": added_ms(read64, launches_of_step(costs64, layers, rows, gpu), gpu),
        }

    each = max(1, rows // len(tenants))
    result = []
    for t in tenants:
        alike = min(DEFAULT_SLOTS, max(0, arena - t.set_bytes) // max(1, t.nbytes))
        swap = (t.nbytes + t.set_bytes) / gpu.host * 1e3
        row = {"name": t.name, "method": t.method} | step([t.cost], [t.as_lora], each)
        result.append(row | {"resident": alike, "swap_in_ms": swap})
    most = sorted(tenants, key=lambda t: bytes_of_step([t.cost], each), reverse=True)[:rows]
    total = {"name": "total", "method": None} | step([t.cost for t in most], [t.as_lora for t in most], rows)
    sets = {t.cost.key: t.set_bytes for t in tenants}
    moved = sum(t.nbytes for t in tenants) + sum(sets.values())
    total |= {"resident": _resident(tenants, arena, DEFAULT_SLOTS), "swap_in_ms": moved / gpu.host * 1e3}
    return [*result, total]


def table(rows: list[dict]) -> str:
    head = ["adapter", "method", "MB a step", "ms", "as LoRA r64: MB", "ms", "fit at once", "swap-in ms"]
    cells = [head]
    for row in rows:
        numbers = [row["bytes_step"] / 1e6, row["ms_step"], row["bytes_step_lora64"] / 1e6, row["ms_step_lora64"]]
        cells.append([row["name"], row["method"] or "", *(f"{n:,.3f}" for n in numbers), f"{row['resident']:,}"])
        cells[-1].append(f"{row['swap_in_ms']:,.3f}")
    return "\n".join(columns(cells, left=2))


def constants(gpu: Gpu) -> str:
    """What the milliseconds were computed with, and where it comes from."""
    from scute_sgl.byte_model import DATASHEET, GIVEN, MEASURED

    launch = f"{gpu.launch * 1e6:.2f} us a launch"
    return f"with {gpu.read / 1e9:,.0f} GB/s" + {
        MEASURED: f" and {launch}, both measured",
        DATASHEET: f" by the datasheet and {launch}, assumed, as measured on an H200",
        GIVEN: f" and {launch}, as given",
    }[gpu.source]


def draw(file: Path, tenants: list[Tenant], most: int, layers: list[int], gpu: Gpu) -> None:
    """Added ms of batches with 1 to ``most`` tenants of one method, as large as its largest here; dashed: converted."""
    from matplotlib.figure import Figure

    from scute_sgl.byte_model import added_ms, bytes_of_step, launches_of_step

    def added(cost: Cost, count: int) -> float:
        return added_ms(bytes_of_step([cost] * count, count), launches_of_step([cost], layers, count, gpu), gpu)

    largest: dict[str, Tenant] = {}
    for t in sorted(tenants, key=lambda t: bytes_of_step([t.cost], 1)):
        largest[t.method] = t
    counts = range(1, most + 1)
    axes = Figure(figsize=(7, 4.5), layout="constrained").subplots()
    for method, t in sorted(largest.items()):
        (line,) = axes.plot(counts, [added(t.cost, n) for n in counts], label=label(f"{method} ({t.name})"))
        axes.plot(counts, [added(t.as_lora, n) for n in counts], linestyle="--", linewidth=0.8, color=line.get_color())
    axes.set(xlabel="tenants in the batch", ylabel="predicted ms added to a decode step", xlim=(1, most))
    axes.set_ylim(bottom=0)
    axes.legend(title="dashed: as LoRA of rank 64", fontsize="small")
    axes.figure.savefig(file)


def _tenant(found, base, dtype) -> Tenant:
    from scute_sgl.byte_model import cost
    from scute_sgl.image import pack
    from scute_sgl.inspection import changed, lora_modules

    modules, packed = lora_modules(changed(found.adapter, base.targets[0]), base.targets[0]), found.packed
    shared = packed.shared.nbytes if packed.shared else 0
    as_lora = cost(modules, pack(modules, dtype))
    return Tenant(found.name, found.method, cost(found.modules, packed), as_lora, packed.nbytes, shared, packed.rank_max)


def _resident(tenants: list[Tenant], arena: int, slots: int) -> int:
    """How many of these the arena holds at once, in the order given."""
    count, sets = 0, set()
    for t in tenants:
        need = t.nbytes + (0 if t.cost.key in sets else t.set_bytes)
        if count < slots and need <= arena:
            count, arena = count + 1, arena - need
            sets.add(t.cost.key)
    return count


def _check_plot(parser: argparse.ArgumentParser) -> None:
    if find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib, which is not installed: pip install matplotlib")
