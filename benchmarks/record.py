"""Result files: what was measured, where, with which versions, by which command."""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

PACKAGES = ("scute_sgl", "sglang", "torch", "transformers", "peft")
BEGAN = time.perf_counter()


@functools.cache
def header() -> dict:
    """The facts that head every result file. They take a second to find out."""
    return {
        "date": datetime.date.today().isoformat(),
        "device": _device(),
        "versions": {"python": sys.version.split()[0]} | {name: _version(name) for name in PACKAGES},
        "commit": _commit(),
        "command": shlex.join(["python", *sys.argv]),
    }


def load(path: Path | None) -> dict:
    """An earlier result file, or the beginning of one."""
    return json.loads(path.read_text()) if path and path.exists() else {"rows": []}


def save(path: Path | None, rows: list[dict], **more) -> None:
    """Write the file anew; called after every row, so that a stopped run keeps what it measured."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(header() | more | {"rows": rows}, indent=1) + "\n")


def stage(text: str) -> None:
    """Say what is done, and after how many seconds of the run."""
    print(f"[{time.perf_counter() - BEGAN:5.0f} s] {text}", flush=True)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _device() -> str:
    import torch

    if not torch.cuda.is_available():
        return f"CPU, {os.cpu_count()} cores"
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0]
    return f"{torch.cuda.device_count()}x {torch.cuda.get_device_name()}, driver {driver}, CUDA {torch.version.cuda}"


def _commit() -> str:
    """SCUTE_COMMIT, where the files are a copy of that commit; else the checked-out one, marked if files differ from it."""
    commit = os.environ.get("SCUTE_COMMIT") or _output("git", "rev-parse", "--short", "HEAD")
    if not commit or "SCUTE_COMMIT" in os.environ:
        return commit or "unknown"
    return commit + ("-dirty" if _output("git", "status", "--porcelain", "--untracked-files=no") else "")


def _output(*command: str) -> str:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, cwd=Path(__file__).parent, check=False, timeout=30
        ).stdout.strip()
    except OSError:
        return ""
