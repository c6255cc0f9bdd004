"""The decode benchmark's bookkeeping, with engines that only count: who is measured with whom, and what a row says."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import bench_decode
from workloads import WORKLOADS

ONE_TOKEN = {"base": 0.005, "scute": 0.006, "csgmv": 0.008, "triton": 0.009, "triton_experimental": 0.007, "none": 0.005}


class Engine:
    """Answers a burst in the time that its backend is given a token; the base gets slower, as a warming card does."""

    running: list[str] = []
    most = 0
    log: list[tuple[str, int, int]] = []

    def __init__(self, start, settings, *rest):
        named = [argument for argument in rest if isinstance(argument, str)]
        self.name = named[0] if named else {"start_base": "base", "start_scute": "scute"}[start.__name__]
        self.calls = 0
        Engine.running.append(self.name)
        Engine.most = max(Engine.most, len(Engine.running))

    def seconds(self, rows, new_tokens):
        self.calls += 1
        Engine.log.append((self.name, len(rows), new_tokens))
        slower = 1 + 0.01 * (self.calls // 2) if self.name == "base" else 1
        return 0.1 + new_tokens * ONE_TOKEN[self.name] * slower

    def __enter__(self):
        return self

    def __exit__(self, *_):
        Engine.running.remove(self.name)


@pytest.fixture
def measured(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_decode, "EngineProcess", Engine)
    monkeypatch.setattr(bench_decode.engines, "check_distinct", lambda engine, names: None)
    Engine.most, Engine.log = 0, []

    def run(*arguments: str) -> list[dict]:
        out = tmp_path / "decode.json"
        fixed = ["--out", str(out), "--model", str(tmp_path / "model"), "--rounds", "2"]
        assert bench_decode.main([*arguments, *fixed]) == 0
        assert not Engine.running
        return json.loads(out.read_text())["rows"]

    return run


def rows_by_name(rows):
    return {(row["workload"], row["backend"]): row for row in rows}


def test_ours_and_theirs_take_turns_with_one_base(measured):
    ids = ["lora_r16x16_bs16", "lora_r64x20_bs20", "mix5x20_bs20"]
    backends = ["scute", "csgmv", "triton_experimental", "triton"]
    rows = rows_by_name(measured("--backends", *backends, "--workloads", *ids))
    assert set(rows) >= {(id, backend) for id in ids[:2] for backend in backends} | {("mix5x20_bs20", "scute")}
    assert ("mix5x20_bs20", "csgmv") not in rows  # SGLang's own know plain LoRA only
    assert Engine.most == 2 + bench_decode.AT_ONCE
    for (id, backend), row in rows.items():
        if id not in WORKLOADS:
            continue
        assert row["tpot_ms"] == pytest.approx(1e3 * ONE_TOKEN[backend])
        assert row["ratio"] == pytest.approx(row["tpot_ms"] / row["base_ms"], rel=1e-3)
        assert len(row["rounds_ms"]) == 2 and len(row["base_rounds_ms"]) == 3 and row["spread"] > 0
    both = [row for row in rows.values() if row["workload"] == "lora_r16x16_bs16"]
    first = {row["backend"]: row["base_rounds_ms"] for row in both}
    assert first["scute"] == first["csgmv"] == first["triton_experimental"]  # in the same turns
    assert first["triton"] != first["scute"]  # later: there is memory for two of SGLang's own at a time
    assert rows["mix5_as_r64_vs_mix5", "scute"]["ratio"] == pytest.approx(1)


def test_what_the_file_has_is_not_measured_again(measured):
    measured("--workloads", "none_bs16", "ia3x16_bs16")
    Engine.log = []
    rows = rows_by_name(measured("--backends", "scute", "none", "--workloads", "none_bs16", "ia3x16_bs16"))
    assert {name for name, _, _ in Engine.log} == {"base"} or ("none_bs16", "none") in rows
    assert "scute" not in {name for name, _, _ in Engine.log}
    Engine.log = []
    measured("--again", "--workloads", "ia3x16_bs16")
    assert {name for name, _, _ in Engine.log} == {"base", "scute"}
    assert {count for _, count, _ in Engine.log} == {16}


def test_each_of_sglang_s_own_is_measured_where_it_is_worth_a_start():
    wanted = {
        backend: [id for id in WORKLOADS if bench_decode.runs_on(backend, id)]
        for backend in ("scute", "triton_experimental", "csgmv")
    }
    found = bench_decode.phases(wanted)
    assert [(phase.rank, phase.backends) for phase in found] == [
        (16, ("triton_experimental", "csgmv")), (64, ("triton_experimental", "csgmv")), (256, ("triton_experimental",)),
    ]  # fmt: skip
    assert sorted(id for phase in found for id in phase.ids) == sorted(WORKLOADS)  # each once: ours runs all


ROW = {"workload": "none_bs16", "backend": "scute", "bs": 16, "tenants": 0, "tpot_ms": 1.0, "base_ms": 1.0, "ratio": 1.0}
ROW |= {"spread": 0.0, "predicted_ms": 1.0, "target": None}


@pytest.mark.parametrize("words, message", [
    (["--rounds", "0"], "--rounds: found '0', want a whole number of at least 1"),
    (["--rounds", "x"], "--rounds: found 'x'"),
    (["--tp", "-1"], "--tp: found '-1'"),
    (["--capture", "16", "0"], "--capture: found '0'"),
    (["--slots", "15", "--workloads", "ia3x16_bs16"], "--slots 15: these --workloads have up to 16 tenants"),
    (["--memory", "nan"], "--memory: found 'nan', want a number between 0 and 1"),
    (["--memory", "1"], "--memory: found '1'"),
    (["--backends", "scute", "none", "--workloads", "lora_r16x1_bs1"], "--backends none: runs none of these"),
    (["--backends", "csgmv", "--workloads", "ia3x16_bs16"], "--backends csgmv: runs none of these"),
    (["--model", "FILE"], "--model: "),
    (["--scratch", "FILE"], "--scratch: "),
    (["--model", "FOREIGN"], "holds another model's config.json"),
    (["--out", "FOREIGN"], "is a folder, want a file"),
    (["--out", "FILE/x.json"], "is not a folder that can be written to"),
    (["--out", "FILE"], "not readable as JSON"),
    (["--out", "LIST"], "is not a result file"),
    (["--out", "ROWS"], "has a row {'workload': 'none_bs16'}; want workload, backend"),
    (["--out", "GOOD", "--tp", "2"], "has rows of --tp 1, not 2"),
])  # fmt: skip
def test_what_cannot_be_measured_ends_before_an_engine_starts(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.setattr(bench_decode, "EngineProcess", None)
    monkeypatch.setattr(bench_decode.engines, "patch_stock_loader", None)
    foreign = tmp_path / "FOREIGN"
    foreign.mkdir()
    (foreign / "config.json").write_text('{"model_type": "qwen2"}')
    files = {"FILE": "", "LIST": "[]", "ROWS": json.dumps({"rows": [{"workload": "none_bs16"}]}), "GOOD": json.dumps({"rows": [ROW]})}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    places = {name: str(tmp_path / name) for name in (*files, "FOREIGN", "FILE/x.json")}
    with pytest.raises(SystemExit) as end:
        bench_decode.main(["--patch-stock-loader", *(places.get(word, word) for word in words)])
    assert end.value.code == 2 and message in capsys.readouterr().err
    assert (foreign / "config.json").read_text() == '{"model_type": "qwen2"}'


def test_an_earlier_file_of_this_benchmark_is_continued(tmp_path):
    (tmp_path / "decode.json").write_text(json.dumps({"rows": [ROW, ROW | {"workload": "of an earlier version", "tp": 4}]}))
    again = ["--workloads", "none_bs16", "--out", str(tmp_path / "decode.json"), "--model", str(tmp_path / "model")]
    assert bench_decode.main(again) == 0
