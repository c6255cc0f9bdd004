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
    adapter_dir: str = _option("", "folder whose adapters are loaded at start, each under its folder's name")
    adapter_root: str = _option("", "folder outside which no adapter is loaded while serving; default: the adapter dir")
    check_ranks: bool = _option(False, "for tests: compare the tensor-parallel ranks' decisions before every pass")
    poison: bool = _option(False, "for tests: fill free adapter memory with NaN")

    @classmethod
    def read(cls) -> Options:
        """The options of this process, from its environment."""
        given = {f.name: os.environ[_variable(f.name)] for f in fields(cls) if _variable(f.name) in os.environ}
        return cls(**{name: _parse(name, text) for name, text in given.items()})

    @property
    def confining_root(self) -> str:
        """The folder in which adapters loaded while serving must lie; "" for anywhere."""
        return self.adapter_root or self.adapter_dir

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
    """Set options for this process and the processes that it starts. TypeError for a name that is none, ValueError
    for a value out of range and for a folder that is not there."""
    for name, value in settings.items():
        if name not in {f.name for f in fields(Options)}:
            raise TypeError(f"scute_{name} is not an option; options: {', '.join('scute_' + f.name for f in fields(Options))}")
        text = _folder(name, value) if isinstance(getattr(Options, name), str) else str(int(value))
        _parse(name, text)
        os.environ[_variable(name)] = text


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add ``--scute-*``; parsing one writes its environment variable."""
    group = parser.add_argument_group("scute")
    for option in fields(Options):
        flag = "--scute-" + option.name.replace("_", "-")
        kind = {"nargs": 0} if option.type == "bool" else {"type": type(option.default)}
        group.add_argument(flag, action=_Write, dest=f"scute_{option.name}", help=option.metadata["help"], **kind)


class _Write(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None):
        try:
            write(**{self.dest.removeprefix("scute_"): True if values == [] else values})
        except ValueError as error:
            parser.error(f"{option_string}: {error}")


def _variable(name: str) -> str:
    return f"SCUTE_{name.upper()}"


def _folder(name: str, path: str) -> str:
    """The absolute path: it means the same to every process, wherever it goes. "" is a mistake, not the default."""
    if not os.path.isdir(path):
        raise ValueError(f"{_variable(name)} is {str(path)!r}; want a folder")
    return os.path.abspath(path)


def _parse(name: str, text: str) -> int | bool | str:
    if isinstance(getattr(Options, name), str):
        return text
    value = int(text)
    if isinstance(getattr(Options, name), bool):
        if value not in (0, 1):
            raise ValueError(f"{_variable(name)} is {value}; want 0 or 1")
        return bool(value)
    if value < 0:
        raise ValueError(f"{_variable(name)} is {value}; want at least 0")
    return value
