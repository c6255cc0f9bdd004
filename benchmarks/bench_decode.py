"""Decode time per token of many adapter workloads, against the base model's own step beside it.

    python benchmarks/bench_decode.py --backend scute --out benchmarks/results/decode_h200.json
    python benchmarks/bench_decode.py --backend csgmv --out benchmarks/results/decode_h200.json --patch-stock-loader

Backends: scute; SGLang's own csgmv, triton and triton_experimental (SGLANG_EXPERIMENTAL_LORA_OPTI=1); none, a second
base engine. A run holds two engines on one GPU, the base's and the backend's, and measures them in turns: base,
backend, base, backend ... So every ratio is taken within seconds, and the base's repeats are the identical runs
whose difference (``spread``) says what a ratio is worth.

Time per token = (time of 144 output tokens - time of 16) / 128 of a burst of bs requests with 128 input tokens, the
median of the rounds. Llama-3.1-8B shape, dummy weights, float16, decoding in CUDA graphs.

Rows are merged into --out after every workload; one that the file has for this backend is skipped without --again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import linear_regression, median

import engines
import record
from byte_model import added_ms, bytes_of_workload
from engines import EngineProcess, Settings
from tables import COUNTED_MS
from workloads import COMPARISONS, LLAMA_8B_CONFIG, WORKLOADS, Kind

SHORT, LONG = 16, 144
RANKS = [f"lora_r{rank}x16_bs16" for rank in (8, 16, 32, 64)]  # equal but for the bytes
BACKENDS = ("scute", *engines.STOCK, "none")


def milliseconds(engine: EngineProcess, rows: list[str | None]) -> float:
    return (engine.seconds(rows, LONG) - engine.seconds(rows, SHORT)) / (LONG - SHORT) * 1e3


def measure(id: str, backend: str, engine: EngineProcess, base: EngineProcess, rounds: int, tp: int = 1) -> dict:
    """One row of the results; base and backend take turns."""
    workload = WORKLOADS[id]
    rows, alone = workload.rows(), [None] * workload.bs
    times, base_times = [], []
    engine.seconds(rows, SHORT)
    base.seconds(alone, SHORT)
    for _ in range(rounds):  # the base first and last: a drift shows up as spread
        base_times.append(milliseconds(base, alone))
        times.append(milliseconds(engine, rows))
    base_times.append(milliseconds(base, alone))
    tpot, base_ms = median(times), median(base_times)
    return {
        "workload": id,
        "backend": backend,
        "tp": tp,
        "bs": workload.bs,
        "tenants": len(workload.names()),
        "tpot_ms": round(tpot, 4),
        "base_ms": round(base_ms, 4),
        "ratio": round(tpot / base_ms, 4),
        "spread": round((max(base_times) - min(base_times)) / base_ms, 4),
        "predicted_ms": round(base_ms + added_ms(workload), 4) if tp == 1 else None,  # the byte model is one GPU's
        "target": workload.target if tp == 1 else None,
        "best_stock": workload.best,
        "rounds_ms": [round(t, 4) for t in times],
        "base_rounds_ms": [round(t, 4) for t in base_times],
    }


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


def starts(backend: str, ids: list[str], settings: Settings) -> list[tuple[tuple, list[str]]]:
    """How to start the backend's engines, one after the other, and the workloads that each is for."""
    if backend == "none":
        return [((engines.start_base, settings), ids)]
    if backend == "scute":
        return [((engines.start_scute, settings, tenants_of(ids)), ids)]
    result = []
    for rank in sorted({WORKLOADS[id].stock_rank() for id in ids}):
        group = [id for id in ids if WORKLOADS[id].stock_rank() == rank]
        tenants = tenants_of(group) or tenants_of(["lora_r16x1_bs1"])  # stock LoRA does not start without any
        result.append(((engines.start_stock, settings, backend, rank, tenants), group))
    return result


def run(args) -> list[dict]:
    before = record.load(args.out)
    rows = [row for row in before["rows"] if row["workload"] not in COMPARISONS]
    done = {row["workload"] for row in rows if row["backend"] == args.backend and not args.again}
    ids = [id for id in args.workloads if id not in done and runs_on(args.backend, id)]
    if not ids:
        return rows
    sizes = tuple(args.capture or sorted({WORKLOADS[id].bs for id in ids}))
    settings = Settings(args.model, args.scratch, sizes, args.slots, args.memory, tp=args.tp)
    args.model.mkdir(parents=True, exist_ok=True)
    (args.model / "config.json").write_text(json.dumps(LLAMA_8B_CONFIG))
    this_run = record.header() | {"slots": args.slots, "capture": sizes}
    runs = before.get("runs", {}) | {args.backend: this_run}
    with EngineProcess(engines.start_base, settings) as base:
        for start, group in starts(args.backend, ids, settings):
            with EngineProcess(*start) as engine:
                for id in group:
                    row = measure(id, args.backend, engine, base, args.rounds, args.tp)
                    if args.backend == "scute":
                        engines.check_distinct(engine, WORKLOADS[id].names())
                    rows = [r for r in rows if (r["workload"], r["backend"]) != (id, args.backend)] + [row]
                    record.save(args.out, rows + comparisons(rows), summary=summary(rows), runs=runs)
                    print(line(row), flush=True)
    return rows


def runs_on(backend: str, id: str) -> bool:
    if backend == "none":
        return id.startswith("none_")
    return backend == "scute" or WORKLOADS[id].stock_rank() is not None


def line(row: dict) -> str:
    target = f"target {row['target']:.3f}" if row["target"] else ""
    return (
        f"{row['workload']:27} {row['backend']:20} {row['tpot_ms']:8.3f} ms  base {row['base_ms']:7.3f}  ratio "
        f"{row['ratio']:6.3f}  spread {row['spread']:.3f}  predicted {row['predicted_ms'] or float('nan'):7.3f}  {target}"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=BACKENDS, default="scute")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), metavar="ID")
    parser.add_argument("--out", type=Path, help="JSON file to merge the rows into")
    parser.add_argument("--again", action="store_true", help="measure workloads that the file already has")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel GPUs of every engine; one --out for each")
    parser.add_argument("--slots", type=int, default=1024, help="adapter slots of our engine")
    parser.add_argument("--capture", type=int, nargs="+", help="captured batch sizes; default: the workloads' own")
    parser.add_argument("--memory", type=float, default=0.7, help="mem_fraction_static of each of the two engines")
    parser.add_argument("--model", type=Path, default=Path("/tmp/llama8b"), help="folder for the model's config")
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm/scute_bench"), help="folder for adapter files")
    parser.add_argument("--patch-stock-loader", action="store_true", help=engines.patch_stock_loader.__doc__)
    args = parser.parse_args(argv)
    if args.patch_stock_loader:
        engines.patch_stock_loader()
    rows = run(args)
    print("\n".join(["", *map(line, rows + comparisons(rows)), str(summary(rows))]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
