"""Decode time per token of many adapter workloads, against the base model's own step beside it.

    python benchmarks/bench_decode.py --backend scute --out benchmarks/results/decode_h200.json
    python benchmarks/bench_decode.py --backend csgmv --out benchmarks/results/decode_h200.json --patch-stock-loader

Backends: scute; SGLang's own csgmv, triton and triton_experimental (SGLANG_EXPERIMENTAL_LORA_OPTI=1); none, the
base alone. A run holds two engines on one GPU, the base's and the backend's, and measures them in turns: base,
backend, base, backend ... So every ratio is taken within seconds, and the base's repeats are the identical runs
whose difference (``spread``) says what a ratio is worth.

Time per token = (time of 144 output tokens - time of 16) / 128 of a burst of bs requests with 128 input tokens, the
median of the rounds. Llama-3.1-8B shape, dummy weights, float16, decoding in CUDA graphs.

Rows are merged into --out after every workload; one that the file has for this backend is skipped without --again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import engines
import record
from byte_model import added_ms
from engines import Burst, Settings
from workloads import COMPARISONS, LLAMA_8B_CONFIG, WORKLOADS, Kind

SHORT, LONG = 16, 144
BACKENDS = ("scute", *engines.STOCK, "none")


def milliseconds(burst: Burst, rows: list[str | None]) -> float:
    return (burst.seconds(rows, LONG) - burst.seconds(rows, SHORT)) / (LONG - SHORT) * 1e3


def measure(id: str, backend: str, burst: Burst, base: Burst, rounds: int) -> dict:
    """One row of the results; base and backend take turns."""
    workload = WORKLOADS[id]
    rows, alone = workload.rows(), [None] * workload.bs
    times, base_times = [], []
    burst.seconds(rows, SHORT)
    base.seconds(alone, SHORT)
    for _ in range(rounds):
        base_times.append(milliseconds(base, alone))
        times.append(milliseconds(burst, rows))
    tpot, base_ms = median(times), median(base_times)
    return {
        "workload": id,
        "backend": backend,
        "bs": workload.bs,
        "tenants": len(workload.names()),
        "tpot_ms": round(tpot, 4),
        "base_ms": round(base_ms, 4),
        "ratio": round(tpot / base_ms, 4),
        "spread": round((max(base_times) - min(base_times)) / base_ms, 4),
        "predicted_ms": round(base_ms + added_ms(workload), 4),
        "target": workload.target,
        "best_stock": workload.best,
        "rounds_ms": [round(t, 4) for t in times],
        "base_rounds_ms": [round(t, 4) for t in base_times],
    }


def comparisons(rows: list[dict]) -> list[dict]:
    """The rows that divide one of our own workloads by another, where both are there."""
    ours = {row["workload"]: row for row in rows if row["backend"] == "scute"}
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


def tenants_of(ids: list[str]) -> dict[str, Kind]:
    return {name: kind for id in ids for kind, count in WORKLOADS[id].tenants for name in kind.names(count)}


def started(backend: str, ids: list[str], settings: Settings, base) -> Iterator[tuple[object, list[str]]]:
    """The backend's engines, one after the other, each with the workloads that it is for."""
    if backend == "none":
        yield base, ids
    elif backend == "scute":
        engine = engines.start_scute(settings, tenants_of(ids))
        yield engine, ids
        engine.shutdown()
    else:
        ranks = sorted({rank for id in ids if (rank := WORKLOADS[id].stock_rank())})
        for rank in ranks:
            group = [id for id in ids if WORKLOADS[id].stock_rank() == rank]
            engine = engines.start_stock(settings, backend, rank, tenants_of(group) or tenants_of(["lora_r16x1_bs1"]))
            yield engine, group
            engine.shutdown()


def run(args) -> list[dict]:
    before = record.load(args.out)
    rows = [row for row in before["rows"] if row["workload"] not in COMPARISONS]
    done = {row["workload"] for row in rows if row["backend"] == args.backend and not args.again}
    ids = [id for id in args.workloads if id not in done and runs_on(args.backend, id)]
    if not ids:
        return rows
    sizes = tuple(args.capture or sorted({WORKLOADS[id].bs for id in ids}))
    settings = Settings(args.model, args.scratch, sizes, args.slots, args.memory)
    args.model.mkdir(parents=True, exist_ok=True)
    (args.model / "config.json").write_text(json.dumps(LLAMA_8B_CONFIG))
    this_run = record.header() | {"slots": args.slots, "capture": sizes}
    runs = before.get("runs", {}) | {args.backend: this_run}
    base = engines.start_base(settings)
    for engine, group in started(args.backend, ids, settings, base):
        for id in group:
            row = measure(id, args.backend, Burst(engine), Burst(base), args.rounds)
            if args.backend == "scute":
                engines.check_distinct(engine, WORKLOADS[id].names())
            rows = [r for r in rows if (r["workload"], r["backend"]) != (id, args.backend)] + [row]
            record.save(args.out, rows + comparisons(rows), runs=runs)
            print(line(row), flush=True)
    base.shutdown()
    return rows


def runs_on(backend: str, id: str) -> bool:
    if backend == "none":
        return id.startswith("none_")
    return backend == "scute" or WORKLOADS[id].stock_rank() is not None


def line(row: dict) -> str:
    target = f"target {row['target']:.3f}" if row["target"] else ""
    return (
        f"{row['workload']:27} {row['backend']:20} {row['tpot_ms']:8.3f} ms  base {row['base_ms']:7.3f}  ratio "
        f"{row['ratio']:6.3f}  spread {row['spread']:.3f}  predicted {row['predicted_ms']:7.3f}  {target}"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=BACKENDS, default="scute")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), metavar="ID")
    parser.add_argument("--out", type=Path, help="JSON file to merge the rows into")
    parser.add_argument("--again", action="store_true", help="measure workloads that the file already has")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slots", type=int, default=1024, help="adapter slots of our engine")
    parser.add_argument("--capture", type=int, nargs="+", help="batch sizes to capture; default: those of the workloads")
    parser.add_argument("--memory", type=float, default=0.3, help="mem_fraction_static of each of the two engines")
    parser.add_argument("--model", type=Path, default=Path("/tmp/llama8b"), help="folder for the model's config")
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm/scute_bench"), help="folder for adapter files")
    parser.add_argument("--patch-stock-loader", action="store_true", help=engines.patch_stock_loader.__doc__)
    args = parser.parse_args(argv)
    if args.patch_stock_loader:
        engines.patch_stock_loader()
    rows = run(args)
    print("\n".join(["", *map(line, rows + comparisons(rows))]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
