"""Times of work on the current GPU, by replays of CUDA graphs."""

from __future__ import annotations

import argparse
import re
import statistics
from pathlib import Path

import torch


def regex(text: str) -> str:
    """An argparse type."""
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise argparse.ArgumentTypeError(f"found {text[:80]!r}, want a regular expression: {error}") from None
    return text


def check_options(parser: argparse.ArgumentParser, parts: str, allowed: tuple[str, ...], out: Path | None) -> None:
    """Ends with code 2 and a message, before anything is measured that could not be measured or written."""
    if unknown := set(parts.split(",")) - set(allowed):
        parser.error(f"--parts: found {', '.join(sorted(unknown))!r}, want some of {','.join(allowed)}")
    if out is not None and (out.is_dir() or not out.absolute().parent.is_dir()):
        parser.error(f"--json: found {str(out)!r}, want a file in a folder that exists")
    if not torch.cuda.is_available():
        parser.error("times kernels; want an NVIDIA GPU, and PyTorch finds none")


def graph_of(body) -> torch.cuda.CUDAGraph:
    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph


def microseconds(*graphs: torch.cuda.CUDAGraph, seconds: float = 0.25) -> list[float]:
    """Median time of a replay of each, taken in turns."""

    def once(graph, times: int) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(times):
            graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / times

    each = once(graphs[0], 3)
    times = max(1, min(10, int(seconds * 1e6 / 20 / each)))
    samples = [[once(graph, times) for graph in graphs] for _ in range(20)]
    return [statistics.median(column) for column in zip(*samples)]


def copy_bandwidth() -> float:
    """Bytes read and written a microsecond by a large copy."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / microseconds(graph_of(lambda: target.copy_(source)))[0]
