"""benchmarks/bench_ops.py on the CPU, in no time: which ops it calls for a step, and what its rows say."""

from __future__ import annotations

import importlib
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import bench_ops
import op_cases
from op_cases import Bench, Workload

from scute_sgl import ops

HALF = torch.float16
KINDS = ["lora", "vera", "oft", "kronecker", "hadamard"]


class OnTheCpu(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return args[0] if function is torch.Tensor.cuda else function(*args, **kwargs)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    """A GPU of capability 9.0 whose graphs run once, when they are made, and whose replays take 1, 2, 3 us and so on."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(ops, "linear_runs", lambda device: True)
    monkeypatch.setattr(bench_ops, "graph_of", lambda body: body())
    monkeypatch.setattr(bench_ops, "microseconds", lambda *graphs: [1.0 + i for i in range(len(graphs))])
    monkeypatch.setitem(op_cases.MODELS, "tiny", (2, 64, 96, (64, 16, 16)))
    with OnTheCpu():
        yield


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_the_same_in_both_ways(kind):
    bench = Bench(Workload(6, (8,) * 3, kind), 64, (64, 16, 16), 2, torch.float32)
    bench.make_plan()
    weight = bench.weights[1] if bench.weights else torch.randn(96, 64) / 8
    bench.run_linear(1, weight)
    got = bench.y.clone()
    if kind != "oft":  # whose GEMM is timed without its own inputs
        bench.run_beside(1, weight, torch.cuda.Stream())
        torch.testing.assert_close(got, bench.y)
    bench.run_linear(1, weight, [])
    torch.testing.assert_close(bench.y, bench.x @ weight.T)
    assert not torch.allclose(got, bench.y)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "dtype", "few"), [(24, HALF, True), (25, HALF, False), (24, torch.float32, False)])
def test_a_step_is_timed_as_it_is_served(monkeypatch, kind, rows, dtype, few):
    called = []
    for name in ("run_linear", "run_beside"):
        run = getattr(Bench, name)
        monkeypatch.setattr(Bench, name, lambda *args, name=name, run=run: (called.append(name), run(*args)))
    workload = Workload(rows, (8,) * 3, kind)
    (row,) = bench_ops.time_step("name", workload, "tiny", dtype, 0, None)
    others = ["without_sums_ms", "gemm_alone_ms"] if few else ["sums_alone_ms", "expand_alone_ms"]
    assert list(row) == ["workload", "op", "base_ms", "bytes", "added_ms", *others]
    assert [row[what] for what in ("base_ms", "added_ms", *others)] == pytest.approx([0.001, 0.001, 0.002, 0.003])
    assert called == ["run_linear" if few else "run_beside"] * 3 * 2 * 4  # graphs, layers, fused layers


def test_sglangs_layers_take_our_place():
    called = []
    layer = SimpleNamespace(apply_lora=lambda y, x: called.append(y.shape[1]))
    stock = SimpleNamespace(build=lambda workload, fused, dtype: {"triton": dict.fromkeys(fused, [layer, layer])})
    ours, theirs = bench_ops.time_step("name", Workload(16, (8,) * 3), "tiny", HALF, 0, stock)
    assert (ours["backend"], theirs["backend"]) == ("scute", "triton") and called == [96, 64, 192, 64] * 2
    assert theirs["added_ms"] == pytest.approx(0.004) and theirs["base_ms"] == ours["base_ms"]


@pytest.mark.parametrize("kind", ["lora", "vera"])
def test_linear_has_a_line_of_its_own(monkeypatch, kind):
    monkeypatch.setattr(bench_ops, "Bench", lambda *args: Bench(*args[:3], min(args[3], 2), *args[4:]))
    monkeypatch.setattr(bench_ops, "base_weights", lambda *args: op_cases.base_weights(*args[:2], 2, args[3]))
    rows = bench_ops.time_ops("name", Workload(16, (8,) * 16, kind), "tiny", 1.0, HALF, 0, None)
    by_op = {row["op"]: row["bytes"] for row in rows if row["layer"] == "o"}
    assert [*by_op] == ["before", "after", "linear"] and by_op["linear"] == by_op["after"] + 64 * 64 * 2
    rows = bench_ops.time_ops("name", Workload(25, (8,) * 16, kind), "tiny", 1.0, HALF, 0, None)
    assert {row["op"] for row in rows} == {"before", "after"}


@pytest.mark.parametrize(
    "script, flags, message",
    [
        ("bench_ops", ["--only", "("], "--only: found '(', want a regular expression"),
        ("bench_ops", ["--parts", "nonsense"], "--parts: found 'nonsense', want some of ops,step"),
        ("bench_ops", ["--room", "-5"], "--room: found '-5', want a whole number above 0"),
        ("bench_ops", ["--json", "/nowhere/x.json"], "--json: found '/nowhere/x.json', want a file in a folder that exists"),
        ("bench_ops", [], "want an NVIDIA GPU"),
        ("bench_prefill", ["--only", "("], "--only: found '(', want a regular expression"),
        ("bench_prefill", ["--parts", "step"], "--parts: found 'step', want some of ops,pass"),
        ("bench_prefill", ["--sets", "-1"], "--sets: found '-1', want a whole number above 0"),
        ("bench_prefill", [], "want an NVIDIA GPU"),
    ],
)
def test_what_cannot_be_measured_is_status_2_in_words(script, flags, message, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as end:
        importlib.import_module(script).main(flags)
    assert end.value.code == 2 and message in capsys.readouterr().err
