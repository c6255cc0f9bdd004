"""Every setting of scute, in one dataclass.

As ``--scute-*`` flags they are added around SGLang's own; as ``scute_*`` keywords :func:`scute_sgl.Engine` takes
them. SGLang does not carry unknown settings to its worker processes, so both write ``SCUTE_*`` environment
variables, which children inherit, and every process reads them back with :meth:`Options.read`.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, field, fields

MIB = 1 << 20
DEFAULT_SLOTS = 1024  # --max-loras-per-batch left at its default
MOST_SLOTS = 4096  # that the plan op's shared memory holds
CPU_ARENA_MB = 256
CPU_MAX_TOTAL_TOKENS = 65_536
GPU_ARENA_SHARE, GPU_ARENA_MB = 0.1, 8192


def _option(default, help: str):
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Options:
    arena_mb: int = _option(0, "MiB of device memory for adapters; default: 256 on CPU, 10%% of a GPU up to 8192")
    allow_hub: bool = _option(False, "let load requests name Hugging Face hub adapters, which are then downloaded")
    graph_rank: int = _option(512, "decoding batches with an adapter of a larger rank run without CUDA graphs")
    check_ranks: bool = _option(False, "for tests: compare the tensor-parallel ranks' decisions before every pass")
    poison: bool = _option(False, "for tests: fill free adapter memory with NaN")

    @classmethod
    def read(cls) -> Options:
        """The options of this process, from its environment."""
        given = {f.name: os.environ[_variable(f.name)] for f in fields(cls) if _variable(f.name) in os.environ}
        return cls(**{name: _parse(name, text) for name, text in given.items()})

    def arena_bytes(self, device) -> int:
        """Size of the arena on a torch device."""
        if self.arena_mb:
            return self.arena_mb * MIB
        if device.type == "cpu":
            return CPU_ARENA_MB * MIB
        import torch

        return gpu_arena_bytes(torch.cuda.get_device_properties(device).total_memory)


def gpu_arena_bytes(memory: float) -> int:
    """The default arena of a GPU with so many bytes of memory."""
    return min(int(memory * GPU_ARENA_SHARE), GPU_ARENA_MB * MIB)


def write(**settings) -> None:
    """Set options for this process and the processes that it starts. TypeError for a name that is none."""
    for name, value in settings.items():
        if name not in {f.name for f in fields(Options)}:
            raise TypeError(f"scute_{name} is not an option; options: {', '.join('scute_' + f.name for f in fields(Options))}")
        _parse(name, str(int(value)))
        os.environ[_variable(name)] = str(int(value))


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add ``--scute-*``; parsing one writes its environment variable."""
    group = parser.add_argument_group("scute")
    for option in fields(Options):
        flag = "--scute-" + option.name.replace("_", "-")
        kind = {"nargs": 0} if option.type == "bool" else {"type": int}
        group.add_argument(flag, action=_Write, dest=f"scute_{option.name}", help=option.metadata["help"], **kind)


class _Write(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None):
        try:
            write(**{self.dest.removeprefix("scute_"): True if values == [] else values})
        except ValueError as error:
            parser.error(f"{option_string}: {error}")


def _variable(name: str) -> str:
    return f"SCUTE_{name.upper()}"


def _parse(name: str, text: str) -> int | bool:
    value = int(text)
    if isinstance(getattr(Options, name), bool):
        if value not in (0, 1):
            raise ValueError(f"{_variable(name)} is {value}; want 0 or 1")
        return bool(value)
    if value < 0:
        raise ValueError(f"{_variable(name)} is {value}; want at least 0")
    return value
