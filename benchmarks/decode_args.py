"""The flags of bench_decode.py, checked before an engine starts: a run takes many minutes and much of a GPU."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import engines
import record
from workloads import COMPARISONS, LLAMA_8B_CONFIG, WORKLOADS

BACKENDS = ("scute", *engines.STOCK, "none")
OF_A_ROW = ("workload", "backend", "bs", "tenants", "tpot_ms", "base_ms", "ratio", "spread", "predicted_ms", "target")


def parse(argv: list[str] | None, description: str) -> argparse.Namespace:
    """Ends with code 2 and a message for what cannot be measured."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=["scute"])
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), metavar="ID")
    parser.add_argument("--out", type=Path, help="JSON file to merge the rows into")
    parser.add_argument("--again", action="store_true", help="measure workloads that the file already has")
    parser.add_argument("--rounds", type=_above_0, default=3)
    parser.add_argument("--tp", type=_above_0, default=1, help="tensor-parallel GPUs of every engine; one --out for each")
    parser.add_argument("--slots", type=_above_0, default=1024, help="adapter slots of our engine")
    parser.add_argument("--capture", type=_above_0, nargs="+", help="captured batch sizes; default: the workloads' own")
    parser.add_argument("--memory", type=_share, default=0.9, help="mem_fraction_static of each engine: of what all leave")
    parser.add_argument("--model", type=Path, default=Path("/tmp/llama8b"), help="folder for the model's config")
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm/scute_bench"), help="folder for adapter files")
    parser.add_argument("--disable-custom-all-reduce", action="store_true", help="all-reduce over NCCL alone")
    parser.add_argument("--patch-stock-loader", action="store_true", help=engines.patch_stock_loader.__doc__)
    args = parser.parse_args(argv)
    try:
        _check(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def runs_on(backend: str, id: str) -> bool:
    if backend == "none":
        return id.startswith("none_")
    return backend == "scute" or (backend in WORKLOADS[id].stock and WORKLOADS[id].stock_rank() is not None)


def _check(args: argparse.Namespace) -> None:
    """ValueError, in words."""
    for backend in args.backends:
        able = [id for id in WORKLOADS if runs_on(backend, id)]
        if not set(able) & set(args.workloads):
            raise ValueError(f"--backends {backend}: runs none of these --workloads, but {', '.join(able)}")
    most = max(len(WORKLOADS[id].names()) for id in args.workloads)
    if "scute" in args.backends and args.slots < most:
        raise ValueError(f"--slots {args.slots}: these --workloads have up to {most} tenants at once")
    _check_writable("--model", args.model)
    _check_writable("--scratch", args.scratch)
    config = args.model / "config.json"
    if config.exists() and _json(config, "--model") != LLAMA_8B_CONFIG:
        raise ValueError(f"--model {args.model}: holds another model's config.json, which a run would overwrite")
    if args.out is not None:
        if args.out.is_dir():
            raise ValueError(f"--out {args.out}: is a folder, want a file")
        _check_writable("--out", args.out.absolute().parent)
        _check_results(args.out, args.tp)


def _check_writable(flag: str, folder: Path) -> None:
    """The folder itself, or the nearest above it that exists."""
    nearest = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise ValueError(f"{flag}: {nearest} is not a folder that can be written to")


def _check_results(path: Path, tp: int) -> None:
    """That an earlier file is one of ours, to which this run's rows may be added."""
    if not path.exists():
        return
    found = _json(path, "--out")
    rows = found.get("rows") if isinstance(found, dict) else None
    if not isinstance(rows, list) or not isinstance(found.get("runs", {}), dict):
        raise ValueError(f"--out {path}: is not a result file of this benchmark; want a new name")
    for row in rows:
        if not isinstance(row, dict) or not all(name in row for name in OF_A_ROW):
            raise ValueError(f"--out {path}: has a row {str(row)[:80]}; want {', '.join(OF_A_ROW)}")
        if row["workload"] not in WORKLOADS | COMPARISONS:
            continue  # of an earlier version
        if row.get("tp", 1) != tp:
            raise ValueError(f"--out {path}: has rows of --tp {row.get('tp', 1)}, not {tp}; want one file for each")


def _json(path: Path, flag: str) -> object:
    try:
        return record.load(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{flag} {path}: not readable as JSON: {error}") from None


def _above_0(text: str) -> int:
    if not text.isdecimal() or len(text) > 9 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text[:80]!r}, want a whole number of at least 1")
    return int(text)


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"found {text[:80]!r}, want a number between 0 and 1")
    return value
