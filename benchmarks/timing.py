"""Times of work on the current GPU, by replays of CUDA graphs."""

from __future__ import annotations

import statistics

import torch


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
