"""Decode time per token of many adapter workloads, against the base model's own step beside it.

    python benchmarks/bench_decode.py --out benchmarks/results/decode_h200.json
    python benchmarks/bench_decode.py --backends scute csgmv triton_experimental triton --patch-stock-loader --out ...

Backends: scute; SGLang's own csgmv, triton and triton_experimental (SGLANG_EXPERIMENTAL_LORA_OPTI=1); none, a second
base engine. A run holds the base's engine, ours and up to two of SGLang's own on one GPU and measures them in turns:
base, ours, theirs, base, ours, theirs ... So every ratio is taken within seconds, and the base's repeats are the
identical runs whose difference (``spread``) says what a ratio is worth. SGLang's own pad every adapter to the largest
rank, so they start anew for each.

Time per token = (time of 144 output tokens - time of 16) / 128 of a burst of bs requests with 128 input tokens, the
median of the rounds. Llama-3.1-8B shape, dummy weights, float16, decoding in CUDA graphs.

Rows are merged into --out after every workload; one that the file has for this backend is skipped without --again.
"""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import linear_regression, median

import decode_args
import engines
import record
from byte_model import added_ms, bytes_of_workload
from decode_args import runs_on
from engines import EngineProcess, Settings
from tables import COUNTED_MS
from workloads import COMPARISONS, LLAMA_8B_CONFIG, WORKLOADS, Kind

SHORT, LONG = 16, 144
AT_ONCE = 2  # of SGLang's own engines beside the base's and ours: there is memory for no more
RANKS = [f"lora_r{rank}x16_bs16" for rank in (8, 16, 32, 64)]  # equal but for the bytes


def milliseconds(engine: EngineProcess, rows: list[str | None]) -> float:
    return (engine.seconds(rows, LONG) - engine.seconds(rows, SHORT)) / (LONG - SHORT) * 1e3


def measure(id: str, running: dict[str, EngineProcess], base: EngineProcess, rounds: int, tp: int) -> list[dict]:
    """A row of the results for each backend; the base and all of them take turns."""
    workload = WORKLOADS[id]
    rows, alone = workload.rows(), [None] * workload.bs
    times, base_times = {backend: [] for backend in running}, []
    for engine, asked in [(base, alone), *((engine, rows) for engine in running.values())]:
        engine.seconds(asked, SHORT)
    for _ in range(rounds):  # the base first and last: a drift shows up as spread
        base_times.append(milliseconds(base, alone))
        for backend, engine in running.items():
            times[backend].append(milliseconds(engine, rows))
    base_times.append(milliseconds(base, alone))
    base_ms = median(base_times)
    return [
        {
            "workload": id,
            "backend": backend,
            "tp": tp,
            "bs": workload.bs,
            "tenants": len(workload.names()),
            "tpot_ms": round(median(taken), 4),
            "base_ms": round(base_ms, 4),
            "ratio": round(median(taken) / base_ms, 4),
            "spread": round((max(base_times) - min(base_times)) / base_ms, 4),
            "predicted_ms": round(base_ms + added_ms(workload), 4) if tp == 1 else None,  # the byte model is one GPU's
            "target": workload.target if tp == 1 else None,
            "best_stock": workload.best,
            "rounds_ms": [round(t, 4) for t in taken],
            "base_rounds_ms": [round(t, 4) for t in base_times],
        }
        for backend, taken in times.items()
    ]


def comparisons(rows: list[dict]) -> list[dict]:
    """The rows that divide one of our own workloads by another, where both are there."""
    ours = {row["workload"]: row for row in rows if row["backend"] == "scute" and row["predicted_ms"] is not None}
    result = []
    for id, c in COMPARISONS.items():
        if not {c.workload, c.reference} <= ours.keys():
            continue
        row, reference = ours[c.workload], ours[c.reference]
        predicted = reference["tpot_ms"] + added_ms(WORKLOADS[c.workload]) - added_ms(WORKLOADS[c.reference])
        result.append(
            {
                "workload": id,
                "backend": "scute",
                "tp": row.get("tp", 1),
                "bs": row["bs"],
                "tenants": row["tenants"],
                "tpot_ms": row["tpot_ms"],
                "base_ms": reference["tpot_ms"],
                "ratio": round(row["tpot_ms"] / reference["tpot_ms"], 4),
                "spread": max(row["spread"], reference["spread"]),
                "predicted_ms": round(predicted, 4),
                "target": c.target,
                "best_stock": None,
            }
        )
    return result


def summary(rows: list[dict]) -> dict:
    """About our rows: added time fitted as a + bytes / b over ranks 8 to 64, and how well the byte model predicts."""
    ours = {row["workload"]: row for row in rows if row["backend"] == "scute" and row["predicted_ms"] is not None}
    ours = {id: row for id, row in ours.items() if id in WORKLOADS}
    added = {id: row["tpot_ms"] - row["base_ms"] for id, row in ours.items()}
    result = {}
    ranks = [id for id in RANKS if id in added]
    if len(ranks) > 1:
        line = linear_regression([bytes_of_workload(WORKLOADS[id]) for id in ranks], [added[id] for id in ranks])
        result |= {"fit_a_ms": round(line.intercept, 4), "fit_b_tb_per_s": round(1e-9 / line.slope, 3)}
    predicted = {id: row["predicted_ms"] - row["base_ms"] for id, row in ours.items()}
    errors = [abs(predicted[id] / ms - 1) for id, ms in added.items() if ms >= COUNTED_MS]
    if errors:
        result["model_median_error"] = round(median(errors), 4)
    return result


def tenants_of(ids: list[str]) -> dict[str, Kind]:
    return {name: kind for id in ids for kind, count in WORKLOADS[id].tenants for name in kind.names(count)}


@dataclass(frozen=True)
class Phase:
    """Workloads, and the engines of SGLang's own backends, of one maximum rank, that are measured with them."""

    ids: list[str]
    backends: tuple[str, ...] = ()
    rank: int = 0
    ours: bool = True  # measured too


def phases(wanted: dict[str, list[str]]) -> list[Phase]:
    """What to measure together, of each backend's workloads: with ours the first two of SGLang's own, then the others.
    What is measured without SGLang's own comes with the first, so that nothing waits for another start."""
    stock = [backend for backend in wanted if backend in engines.STOCK]
    ranks = sorted({WORKLOADS[id].stock_rank() for backend in stock for id in wanted[backend]})
    found = []
    for rank in ranks:
        ids = [id for id in WORKLOADS if WORKLOADS[id].stock_rank() == rank and any(id in wanted[b] for b in stock)]
        asked = [backend for backend in stock if any(id in wanted[backend] for id in ids)]
        found += [Phase(ids, tuple(asked[at : at + AT_ONCE]), rank, at == 0) for at in range(0, len(asked), AT_ONCE)]
    there = {id for phase in found for id in phase.ids}
    alone = [id for id in WORKLOADS if id not in there and any(id in ids for ids in wanted.values())]
    first = found[0] if found else Phase([])
    return [replace(first, ids=alone + first.ids), *found[1:]]


def start(stack: ExitStack, settings: Settings, phase: Phase, wanted: dict[str, list[str]]) -> dict[str, EngineProcess]:
    """SGLang's own engines of a phase. They start in the background."""
    running = {}
    for backend in phase.backends:
        tenants = tenants_of([id for id in phase.ids if id in wanted[backend]])
        tenants = tenants or tenants_of(["lora_r16x1_bs1"])  # stock LoRA does not start without any
        begin = engines.start_stock, settings.of(backend), backend, phase.rank, tenants
        running[backend] = stack.enter_context(EngineProcess(*begin))
    return running


def run(args) -> list[dict]:
    before = record.load(args.out)
    rows = [row for row in before["rows"] if row["workload"] not in COMPARISONS]
    done = set() if args.again else {(row["workload"], row["backend"]) for row in rows}
    wanted = {b: [id for id in args.workloads if (id, b) not in done and runs_on(b, id)] for b in args.backends}
    wanted = {backend: ids for backend, ids in wanted.items() if ids}
    if not wanted:
        return rows
    sizes = tuple(args.capture or sorted({WORKLOADS[id].bs for ids in wanted.values() for id in ids}))
    more = {"disable_custom_all_reduce": True} if args.disable_custom_all_reduce else {}
    settings = Settings(args.model, args.scratch, sizes, args.slots, args.memory, tp=args.tp, more=more)
    args.model.mkdir(parents=True, exist_ok=True)
    (args.model / "config.json").write_text(json.dumps(LLAMA_8B_CONFIG))
    this_run = record.header() | {"slots": args.slots, "capture": sizes}
    runs = before.get("runs", {}) | dict.fromkeys(wanted, this_run)
    with ExitStack() as stack:
        base = stack.enter_context(EngineProcess(engines.start_base, settings))
        ours = {}
        if "scute" in wanted:
            begin = engines.start_scute, settings.of("scute"), tenants_of(wanted["scute"])
            ours["scute"] = stack.enter_context(EngineProcess(*begin))
        if "none" in wanted:
            ours["none"] = stack.enter_context(EngineProcess(engines.start_base, settings))
        for phase in phases(wanted):
            with ExitStack() as theirs:
                running = (ours if phase.ours else {}) | start(theirs, settings, phase, wanted)
                for id in phase.ids:
                    asked = {backend: engine for backend, engine in running.items() if id in wanted[backend]}
                    if not asked:
                        continue
                    new = measure(id, asked, base, args.rounds, args.tp)
                    if "scute" in asked:
                        engines.check_distinct(asked["scute"], WORKLOADS[id].names())
                    rows = [r for r in rows if r["workload"] != id or r["backend"] not in asked] + new
                    record.save(args.out, rows + comparisons(rows), summary=summary(rows), runs=runs)
                    print("\n".join(map(line, new)), flush=True)
    return rows


def line(row: dict) -> str:
    target = f"target {row['target']:.3f}" if row["target"] else ""
    return (
        f"{row['workload']:27} {row['backend']:20} {row['tpot_ms']:8.3f} ms  base {row['base_ms']:7.3f}  ratio "
        f"{row['ratio']:6.3f}  spread {row['spread']:.3f}  predicted {row['predicted_ms'] or float('nan'):7.3f}  {target}"
    )


def main(argv: list[str] | None = None) -> int:
    args = decode_args.parse(argv, __doc__)
    os.environ["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "0"  # engines that start together see each other's memory
    if args.patch_stock_loader:
        engines.patch_stock_loader()
    rows = run(args)
    print("\n".join(["", *map(line, rows + comparisons(rows)), str(summary(rows))]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
