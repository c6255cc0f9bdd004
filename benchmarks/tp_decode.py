"""Decode time per token under tensor parallelism: the base, ours, and SGLang's own backends, all on the same GPUs.

    python benchmarks/tp_decode.py --tp 2 --out benchmarks/results

As bench_decode.py, but all engines start side by side and share one base engine, and a workload's backends are
measured one right after the other. Writes decode_tpN.json.
"""

from __future__ import annotations

import argparse
import json
import os
from contextlib import ExitStack
from pathlib import Path

import bench_decode
import engines
import record
from engines import EngineProcess, Settings
from workloads import LLAMA_8B_CONFIG, WORKLOADS

IDS = ["none_bs16", "lora_r16x16_bs16", "lora_r16x20_bs20", "mix5x20_bs20"]
STOCK = ("csgmv", "triton")
STOCK_RANK = 16


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True, help="folder for the result file")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=IDS, metavar="ID")
    parser.add_argument("--backends", nargs="+", choices=("scute", *STOCK), default=["scute", *STOCK])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--disable-custom-all-reduce", action="store_true", help="all-reduce over NCCL alone")
    parser.add_argument("--patch-stock-loader", action="store_true", help=engines.patch_stock_loader.__doc__)
    args = parser.parse_args(argv)
    os.environ["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "0"  # engines that start together see each other's memory
    if args.patch_stock_loader:
        engines.patch_stock_loader()
    model = Path("/tmp/llama8b")
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(LLAMA_8B_CONFIG))
    more = {"disable_custom_all_reduce": True} if args.disable_custom_all_reduce else {}
    sizes = tuple(sorted({WORKLOADS[id].bs for id in args.workloads}))

    def settings(name: str) -> Settings:
        scratch = Path("/dev/shm/scute_tp") / name  # engines delete what they have read
        return Settings(model, scratch, sizes, slots=1024, memory=0.7, tp=args.tp, more=more)

    rows = []
    with ExitStack() as stack:
        base = stack.enter_context(EngineProcess(engines.start_base, settings("base")))
        running = {}
        for backend in args.backends:
            ids = [id for id in args.workloads if served(backend, id)]
            start = engines.start_scute, settings(backend), bench_decode.tenants_of(ids)
            if backend in STOCK:
                start = engines.start_stock, settings(backend), backend, STOCK_RANK, bench_decode.tenants_of(ids)
            running[backend] = stack.enter_context(EngineProcess(*start))
        for id in args.workloads:
            for backend, engine in running.items():
                if served(backend, id):
                    rows.append(bench_decode.measure(id, backend, engine, base, args.rounds, args.tp))
                    record.save(args.out / f"decode_tp{args.tp}.json", rows, capture=sizes)
                    print(bench_decode.line(rows[-1]), flush=True)
    return 0


def served(backend: str, id: str) -> bool:
    return backend == "scute" or WORKLOADS[id].stock_rank() == STOCK_RANK


if __name__ == "__main__":
    raise SystemExit(main())
