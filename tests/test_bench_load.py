"""benchmarks/bench_load.py: equal servers and requests, failures that cost no other row, the table and the pictures."""

from __future__ import annotations

import argparse
import json
import queue
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FIGURES = {"rate": 4.0, "requests": 9, "errors": 0, "attainment": 1.0}
FIGURES |= {f"{what}_ms_p{p}": 1.5 for what in ("ttft", "tpot") for p in (50, 90, 99)}


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")


def options(**given) -> argparse.Namespace:
    defaults = {"tiny": False, "tenants": 64, "seconds": 12.0, "popularity": "zipf", "seed": 0, "gpus": 1, "out": None}
    defaults |= {"decode_rates": [2.0, 4.0], "prefill_rates": [1.0], "slo_first": 1000.0, "slo_token": 100.0}
    return argparse.Namespace(**defaults | given)


def jobs_of(folder: Path, servers, **given) -> dict:
    import bench_load

    class Paths(dict):
        def __missing__(self, kind):
            return folder / f"{kind.method}{kind.size}"

    return {server: bench_load.job_of(server, folder / "model", Paths(), options(**given)) for server in servers}


def parsed(flags: list[str]) -> dict[str, list[str]]:
    """Flag -> its values."""
    found = {}
    for word in flags:
        if word.startswith("--"):
            values = found[word] = []
        else:
            values.append(word)
    return found


# What is asked of whom


def test_tenants_are_64_of_five_methods_in_turns():
    import bench_load

    mixed = bench_load.tenants(bench_load.MIX, 64)
    assert sorted(Counter(kind.method for kind in mixed.values()).values()) == [12, 13, 13, 13, 13]
    assert {kind.method for kind in list(mixed.values())[:5]} == {"lora", "dora", "ia3", "vera", "oft"}
    converted = bench_load.tenants((bench_load.LORA64,), 64)
    assert len(converted) == 64 and {kind.size for kind in converted.values()} == {64}


def test_servers_differ_in_the_backend_and_in_what_holds_the_tenants(tmp_path):
    import bench_load

    jobs = jobs_of(tmp_path, bench_load.SERVERS)
    flags = {server: parsed(job.flags) for server, job in jobs.items()}
    own = {"--lora-paths", "--max-loras-per-batch", "--max-lora-rank", "--scute-arena-mb"}
    shared = [{name: values for name, values in found.items() if name not in own} for found in flags.values()]
    assert all(found == shared[0] for found in shared) and shared[0]["--load-format"] == ["dummy"]
    for server, found in flags.items():
        assert len(found["--lora-paths"]) == 64
        if jobs[server].backend == "scute":
            assert "--max-loras-per-batch" not in found
        else:
            assert (found["--max-loras-per-batch"], found["--max-lora-rank"]) == (["65"], ["64"])
            assert all(path.endswith("lora64") for path in found["--lora-paths"])
    assert int(flags["scute_lora64"]["--scute-arena-mb"][0]) > 64 * 320 > int(flags["scute"]["--scute-arena-mb"][0])
    assert jobs["triton_experimental"].backend == "triton"
    assert {job.environment["SGLANG_EXPERIMENTAL_LORA_OPTI"] for job in jobs.values()} == {"0", "1"}


def test_all_servers_get_the_same_requests(tmp_path):
    from scute_sgl import cli, load_client

    jobs = jobs_of(tmp_path, ["scute", "csgmv"])
    drawn = []
    for job in jobs.values():
        a = cli.build_parser().parse_args(["bench", "load", *job.runs["decode"]])
        assert (a.profile, a.rates, a.slo_first) == ("decode", [2.0, 4.0], 1000.0) and len(a.tenants) == 64
        calls = load_client.draw(4.0, a.seconds, a.tenants, a.popularity, 128, 256, a.seed)
        drawn.append([(call.at, a.tenants.index(call.tenant), call.input, call.output) for call in calls])
    assert drawn[0] == drawn[1]


# Failures


class Running:
    port = 1

    def __init__(self, *_):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def measured(monkeypatch, job, server, outcome) -> list[dict]:
    """The rows that measure() puts when this server runs and load.measure does what ``outcome(profile, add)`` does."""
    import bench_load

    async def measure(urls, args, add):
        outcome(args.profile, add)

    monkeypatch.setattr(bench_load, "Server", server)
    monkeypatch.setattr(bench_load.load, "measure", measure)
    gpus, rows = queue.Queue(), queue.Queue()
    gpus.put(0)
    bench_load.measure(job, gpus, rows)
    assert gpus.get_nowait() == 0  # for the next server
    return [rows.get_nowait() for _ in range(rows.qsize())]


def test_a_server_that_does_not_start_is_a_row_with_its_own_last_error(monkeypatch, tmp_path):
    class Broken(Running):
        def __enter__(self):
            raise RuntimeError("the server did not start; the end of its log:\nmany\nlines")

    job = jobs_of(tmp_path, ["csgmv"])["csgmv"]
    job.log.write_text("ValueError: first\n  File x\nsome.where.OutOfMemoryError: 2 GiB\nReceived sigquit\n")
    (row,) = measured(monkeypatch, job, Broken, None)
    assert (row["server"], row["backend"], row["profile"]) == ("csgmv", "csgmv", None)
    assert row["error"].startswith("RuntimeError: the server did not start") and row["error"].endswith("2 GiB")
    assert "\n" not in row["error"] and "sigquit" in row["log"]


def test_what_was_measured_before_a_failure_stays(monkeypatch, tmp_path):
    def outcome(profile, add):
        add(FIGURES)
        if profile == "prefill":
            raise OSError("connection lost")

    rows = measured(monkeypatch, jobs_of(tmp_path, ["triton"])["triton"], Running, outcome)
    assert [(row["profile"], "error" in row) for row in rows] == [("decode", False), ("prefill", False), ("prefill", True)]
    assert rows[0]["rate"] == 4.0 and rows[0]["start_s"] >= 0 and rows[-1]["error"] == "OSError: connection lost"


def test_rows_are_in_order_with_the_highest_rate_of_their_server_and_profile():
    import bench_load

    at = lambda server, rate, met: {"server": server, "profile": "decode", "rate": rate, "attainment": met}  # noqa: E731
    failed = {"server": "triton", "profile": "decode", "error": "OSError"}
    rows = [failed, at("scute", 8, 0.5), at("triton", 2, 0.9), at("scute", 4, 0.999), at("scute", 2, 1.0)]
    found = [(row["server"], row.get("rate"), row["highest_rate"]) for row in bench_load.arranged(rows)]
    assert found == [("scute", 2, 4), ("scute", 4, 4), ("scute", 8, 4), ("triton", 2, None), ("triton", None, None)]


# What is shown


def rows_of_two() -> list[dict]:
    good = {"server": "scute", "backend": "scute", "profile": "decode", "highest_rate": 4.0} | FIGURES
    bad = {"server": "csgmv", "backend": "csgmv", "profile": None, "error": "ValueError: a|b", "highest_rate": None}
    return [good, good | {"rate": 8.0, "attainment": None, "ttft_ms_p50": None, "profile": "prefill"}, bad]


def test_the_table_has_equally_many_cells_in_every_line():
    import tables

    lines = tables.load(rows_of_two()).splitlines()
    assert len({line.count("|") for line in lines}) == 1 and len(lines) == 5
    assert "failed: ValueError: a/b" in lines[-1] and "| 100.0% | 4 |" in lines[2]


def test_the_pictures_hold_every_server(tmp_path):
    pytest.importorskip("matplotlib")
    import bench_load

    out = tmp_path / "load.json"
    out.write_text(json.dumps({"rows": rows_of_two(), "slo_first": 1000, "slo_token": 100}))
    assert bench_load.main(["--out", str(out), "--redraw"]) == 0
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG") and "<svg" in out.with_suffix(".svg").read_text()


# The whole


def test_a_tiny_run_on_the_cpu(tmp_path):
    import bench_load

    out = tmp_path / "load.json"
    command = ["--tiny", "--servers", "scute", "--tenants", "10", "--seconds", "2", "--out", str(out)]
    command += ["--decode-rates", "3", "2", "--prefill-rates", "2", "--scratch", str(tmp_path)]
    assert bench_load.main(command) == 0
    result = json.loads(out.read_text())
    assert [(row["profile"], row["rate"]) for row in result["rows"]] == [("decode", 2), ("decode", 3), ("prefill", 2)]
    for row in result["rows"]:
        assert (row["server"], row["tenants"], row["errors"]) == ("scute", 10, 0) and row["requests"] > 0
        assert row["ttft_ms_p50"] > 0 and "url" not in row and "highest_rate" in row
    assert result["runs"]["scute"]["servers_at_a_time"] == 1 and "--lora-paths" in result["runs"]["scute"]["flags"]
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]  # the adapters' files are gone
