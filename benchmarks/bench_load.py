"""``scute bench load`` against one server after the other: ours, and SGLang's own LoRA backends.

64 tenants on a Llama-3.1-8B shape (dummy weights, float16). Ours serves them as they are: LoRA and DoRA of rank 16,
(IA)3, VeRA of rank 256 and OFT with blocks of 32, in turns. SGLang's own backends know plain LoRA only and get, in
their place, 64 LoRAs of rank 64 on all seven projections, which is what such tenants are converted to; the numbers in
them are random, as they cost the same. ``scute_lora64`` is ours with those, too.

Servers have equal flags but for the backend and what it needs to hold all 64 on the GPU, so that nothing is swapped
under load: SGLang's a slot for each and one for the base (each padded to rank 64: 65 x 336 MB = 21.8 GB), ours an arena
of that size. All get the same requests. triton_experimental is triton with SGLANG_EXPERIMENTAL_LORA_OPTI=1.

    python benchmarks/bench_load.py --out benchmarks/results/load_h200.json --patch-stock-loader
    python benchmarks/bench_load.py --out benchmarks/results/load_h200.json --redraw    # only the pictures beside it
    python benchmarks/bench_load.py --tiny --servers scute

A server takes about 200 s. Rows are merged into --out as they come; a server that fails becomes a row with the reason.
With --gpus N, N servers run at a time, each on a GPU of its own, with a client process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import math
import multiprocessing
import os
import queue as queues
import re
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import engines
import record
import tables
from adapters import write_adapter
from serving import TINY_CONFIG, TINY_SHAPE, say, smaller, stage, write_model
from workloads import DORA16, IA3, LLAMA_8B, LLAMA_8B_CONFIG, LORA16, LORA64, OFT32, VERA256, Kind, Workload

from scute_sgl import cli, load
from scute_sgl.console import above_0, positive
from scute_sgl.demo import Server

MIX = (LORA16, DORA16, IA3, VERA256, OFT32)
SERVERS = {"scute": MIX, "scute_lora64": (LORA64,)} | dict.fromkeys(engines.STOCK, (LORA64,))
DEFAULT = ("scute", *engines.STOCK)
RATES = {"decode": (8.0, 16.0, 24.0), "prefill": (4.0, 8.0, 12.0)}
# A start takes about 60 s and, with SGLang's backends, 64 loads of 336 MB; the first on a machine compiles kernels too.
START_SECONDS, PROFILE_SECONDS, REQUEST_SECONDS = 300, 120, 60
EQUAL = {name: value for name, value in engines.PLAIN.items() if name not in ("skip_tokenizer_init", "log_level")}
EQUAL |= {"dtype": "float16", "mem_fraction_static": 0.8, "max_total_tokens": 262_144, "max_running_requests": 64}
EQUAL |= {"cuda_graph_bs_decode": (8, 16, 32, 48, 64)}
DUMMY = {"load_format": "dummy", "random_seed": 0}
TINY = {"device": "cpu", "dtype": "float32", "grammar_backend": "none"} | DUMMY


@dataclass(frozen=True)
class Job:
    """A server and the runs that it is measured by."""

    server: str
    backend: str  # its name in SGLang
    model: Path
    flags: list[str]
    environment: dict[str, str]
    runs: dict[str, list[str]]  # profile -> arguments of ``scute bench load``, without the server's address
    log: Path


def tenants(kinds: tuple[Kind, ...], count: int) -> dict[str, Kind]:
    """Name -> kind, the kinds in turns; by popularity, for the most popular comes first."""
    each, more = divmod(count, len(kinds))
    counts = [(kind, each + (number < more)) for number, kind in enumerate(kinds)]
    of_name = {name: kind for kind, n in counts for name in kind.names(n)}
    return {name: of_name[name] for name in Workload(count, tuple(counts)).names()}


def job_of(server: str, model: Path, paths: dict[Kind, Path], args) -> Job:
    kinds, backend = SERVERS[server], engines.STOCK.get(server, "scute")
    names = tenants(tuple(map(smaller, kinds)) if args.tiny else kinds, args.tenants)
    arguments = TINY if args.tiny else EQUAL | DUMMY
    arguments = arguments | {"lora_paths": [f"{name}={paths[kind]}" for name, kind in names.items()]}
    if backend == "scute":
        arguments |= {} if args.tiny else {"scute_arena_mb": engines.arena_mb(names)}
    else:
        arguments |= {"max_loras_per_batch": len(names) + 1, "max_lora_rank": max(kind.size for kind in names.values())}
    client = ["--seconds", args.seconds, "--popularity", args.popularity, "--seed", args.seed, "--tenants", *names]
    client += ["--timeout", REQUEST_SECONDS, "--slo-first", args.slo_first, "--slo-token", args.slo_token]
    runs = {}
    for profile, rates in (("decode", args.decode_rates), ("prefill", args.prefill_rates)):
        lengths = ["--input", 16, "--output", 6] if args.tiny else []
        runs[profile] = [*map(str, ["--profile", profile, "--rates", *rates, *lengths, *client])]
    environment = {engines.EXPERIMENTAL: str(int(server == "triton_experimental"))}
    return Job(server, backend, model, flags_of(arguments), environment, runs, model.parent / f"{server}.log")


def flags_of(arguments: dict) -> list[str]:
    """SGLang's arguments as its command line takes them."""
    flags = []
    for name, value in arguments.items():
        values = () if value is True else value if isinstance(value, (list, tuple)) else (value,)
        flags += ["--" + name.replace("_", "-"), *map(str, values)]
    return flags


def measure(job: Job, gpus: queues.Queue, rows: queues.Queue) -> None:
    """Start the server on a free GPU, measure it, put its rows; what fails is its last row."""
    gpu, row = gpus.get(), {"server": job.server, "backend": job.backend, "profile": None}
    environment = job.environment | {"CUDA_VISIBLE_DEVICES": device_of(gpu)}
    try:
        say(f"{job.server}: starting")
        started = time.monotonic()
        with Server(job.model, job.log, job.flags, START_SECONDS, job.backend, environment) as server:
            row["start_s"] = round(time.monotonic() - started, 1)
            say(f"{job.server}: ready after {row['start_s']} s")
            for profile, words in job.runs.items():
                row["profile"] = profile
                url = f"http://127.0.0.1:{server.port}"
                client = cli.build_parser().parse_args(["bench", "load", "--url", url, *words])
                with stage(f"{job.server}: {profile}", PROFILE_SECONDS):
                    asyncio.run(load.measure([url], client, lambda figures: rows.put(row | figures)))
    except Exception as error:
        log = job.log.read_text(errors="replace") if job.log.exists() else ""
        rows.put(row | {"error": reason(error, log), "log": log[-4000:]})
    finally:
        gpus.put(gpu)


def device_of(gpu: int) -> str:
    """The number of one of the GPUs that this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[gpu] if visible else str(gpu)


def reason(error: Exception, log: str) -> str:
    """In one line: of a server that ended, its own last error."""
    own = re.findall(r"^[\w.]*(?:Error|Exception): .+", log, re.MULTILINE)
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}" + (f" {own[-1]}" if own else "")


def run(jobs: list[Job], args) -> list[dict]:
    """All rows, those of earlier runs first; the file is written after each."""
    before, servers = record.load(args.out), [job.server for job in jobs]
    rows = [row for row in before["rows"] if row["server"] not in servers]
    this_run = record.header() | {"servers_at_a_time": min(args.gpus, len(jobs)), "tenants": args.tenants}
    runs = before.get("runs", {}) | {
        job.server: this_run | {"flags": [flag for flag in job.flags if "=" not in flag]} for job in jobs
    }
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, ProcessPoolExecutor(args.gpus, context) as pool:
        gpus, found = manager.Queue(), manager.Queue()
        for gpu in range(args.gpus):
            gpus.put(gpu)
        pending = [pool.submit(measure, job, gpus, found) for job in jobs]
        done = False
        while not done:
            done = all(future.done() for future in pending)  # asked first: then nothing more can come
            while (row := _next(found)) is not None:
                row.pop("url", None)  # another port every time
                rows.append(row)
                say(f"{row['server']}: {row.get('error') or summary(row)}")
                rows = arranged(rows)
                record.save(args.out, rows, runs=runs, slo_first=args.slo_first, slo_token=args.slo_token, goal=load.GOAL)
        for future in pending:
            future.result()
    return rows


def _next(found: queues.Queue) -> dict | None:
    try:
        return found.get(timeout=1)
    except queues.Empty:
        return None


def arranged(rows: list[dict]) -> list[dict]:
    """By server, profile and rate; each with the highest rate at which its server met the objective with its profile."""
    for row in rows:
        mine = [r for r in rows if "error" not in r and (r["server"], r["profile"]) == (row["server"], row["profile"])]
        row["highest_rate"] = load.highest_rate(mine)
    order = [*SERVERS]
    return sorted(rows, key=lambda r: (order.index(r["server"]), r["profile"] or "", r.get("rate", math.inf)))


def summary(row: dict) -> str:
    met = "-" if row["attainment"] is None else f"{row['attainment']:.1%}"
    return f"{row['profile']} at {row['rate']:g} a second: SLO met by {met} of {row['requests']}, {row['errors']} errors"


def draw(out: Path) -> None:
    """The file's rows as .png and .svg beside it, a line of panels for each profile."""
    if importlib.util.find_spec("matplotlib") is None:
        say(f"no picture without matplotlib; later: python benchmarks/bench_load.py --out {out} --redraw")
        return
    from matplotlib.figure import Figure

    result = record.load(out)
    figure = Figure(figsize=(12, 3.6 * len(RATES)), layout="constrained")
    for panels, profile in zip(figure.subplots(len(RATES), 3), RATES):
        rows_of = {}
        for row in result["rows"]:
            if row["profile"] == profile and "error" not in row:
                rows_of.setdefault(row["server"], []).append(row)
        load.draw(panels, rows_of, argparse.Namespace(slo_first=result["slo_first"], slo_token=result["slo_token"]))
        panels[0].set_title(profile)
    for ending in (".png", ".svg"):
        figure.savefig(out.with_suffix(ending), dpi=150)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, help="JSON file to merge the rows into; pictures are written beside it")
    add("--servers", nargs="+", choices=SERVERS, default=DEFAULT)
    add("--gpus", type=positive, default=1, help="servers at a time, each on a GPU of its own")
    add("--tenants", type=positive, default=64)
    for profile, rates in RATES.items():
        add(f"--{profile}-rates", type=above_0, nargs="+", default=rates, help="requests a second")
    add("--seconds", type=above_0, default=12.0, help="of arrivals at each rate")
    add("--popularity", choices=("zipf", "uniform"), default="zipf")
    add("--slo-first", type=above_0, default=1000.0, metavar="MS", help="first token within")
    add("--slo-token", type=above_0, default=100.0, metavar="MS", help="mean time of each further token")
    add("--seed", type=int, default=0)
    add("--scratch", type=Path, default=Path("/dev/shm"), help="folder for adapter files (0.6 GB)")
    add("--patch-stock-loader", action="store_true", help=engines.patch_stock_loader.__doc__)
    add("--redraw", action="store_true", help="measure nothing, draw the pictures of --out")
    add("--tiny", action="store_true", help="a two-layer model on the CPU, to try the script")
    args = parser.parse_args(argv)
    if args.redraw:
        if args.out is None or not args.out.exists():
            parser.error(f"--redraw: want --out and an earlier run's file, found {args.out}")
        try:
            draw(args.out)
        except (ValueError, LookupError, TypeError, OSError) as error:
            parser.error(f"--redraw: {args.out} is no result file of this benchmark: {type(error).__name__}: {error}")
        return 0
    if not args.scratch.is_dir():
        parser.error(f"--scratch: found {args.scratch}, want a folder that exists")
    if args.patch_stock_loader:
        engines.patch_stock_loader()
    with tempfile.TemporaryDirectory(dir=args.scratch, prefix="scute-load-") as scratch:
        model = Path(scratch, "model")
        write_model(model, TINY_CONFIG if args.tiny else LLAMA_8B_CONFIG)
        kinds = {smaller(kind) if args.tiny else kind for server in args.servers for kind in SERVERS[server]}
        shape = TINY_SHAPE if args.tiny else LLAMA_8B
        # One file for all of a kind: each load makes a copy of its own in the server's memory.
        paths = {kind: write_adapter(Path(scratch), kind, f"{kind.method}{kind.size}", shape) for kind in kinds}
        say("adapters written")
        rows = run([job_of(server, model, paths, args) for server in args.servers], args)
    print(tables.load(rows))
    if args.out:
        draw(args.out)
    return 0 if all("error" not in row for row in rows if row["server"] in args.servers) else 1


if __name__ == "__main__":
    raise SystemExit(main())
