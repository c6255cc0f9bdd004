"""What models weigh and what devices have left, before anything is started."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

SPARE = 1.1  # over weights: activations, and what an allocator keeps
PROCESSES = 3 << 30  # host memory of SGLang's processes and of the calling one, without weights


def check(needs: dict[str, tuple[str, int]], say: Callable[[str], None]) -> None:
    """Say what needs how many bytes on which device; ValueError with the numbers if one has less."""
    short = []
    for what, (device, size) in needs.items():
        need, have = size + (PROCESSES if device == "cpu" else 0), free_bytes(device)
        line = f"{what} needs about {need / 2**30:.1f} GiB on {device}, which has {have / 2**30:.1f} GiB free"
        say(line)
        if need > have:
            short.append(line)
    if short:
        raise ValueError("too little memory: " + "; ".join(short))


def parameters_of(folder: Path) -> int:
    """Elements of all tensors in a folder's safetensors files, by their headers. ValueError for one that has none."""
    count = 0
    for path in folder.glob("*.safetensors"):
        try:
            with open(path, "rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if length > path.stat().st_size - 8:
                    raise ValueError(f"a header of {length} bytes")
                header = json.loads(file.read(length))
            count += sum(math.prod(entry["shape"]) for key, entry in header.items() if key != "__metadata__")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path}: not a well-formed safetensors file: {error}") from None
    return count


def weights_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def free_bytes(device: str) -> int:
    """Bytes that are free on "cpu" or "cuda"; 0 if the device is not there."""
    import torch

    if device == "cuda":
        return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
    import psutil

    free, group = psutil.virtual_memory().available, Path("/sys/fs/cgroup")
    try:  # a container may have less than its machine
        limit, used = ((group / f"memory.{what}").read_text().strip() for what in ("max", "current"))
        cache = int(dict(map(str.split, (group / "memory.stat").read_text().splitlines()))["inactive_file"])
    except OSError:
        return free
    return free if limit == "max" else min(free, int(limit) - int(used) + cache)
