"""``scute bench load``: the draws, the figures, a server with known delays, and SGLang's own on the CPU."""

from __future__ import annotations

import asyncio
import collections
import json
import math
import re
import socket
import threading
import time

import pytest
from aiohttp import web

from scute_sgl import cli, load
from scute_sgl.load_client import Call, Outcome, draw, drive, tenants_of, warm_up

NAMES = [f"t{k}" for k in range(1, 9)]


# Draws


def test_arrivals_are_poisson():
    calls = draw(rate=50.0, seconds=200.0, tenants=NAMES, popularity="uniform", input=100, output=10, seed=3)
    gaps = [b.at - a.at for a, b in zip(calls, calls[1:])]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert min(gaps) > 0 and 0 < calls[0].at and calls[-1].at < 200
    assert mean == pytest.approx(1 / 50, rel=0.04)  # 10,000 gaps: one standard error is 1%
    assert deviation == pytest.approx(mean, rel=0.06)
    in_a_second = collections.Counter(int(call.at) for call in calls)
    counts = [in_a_second[second] for second in range(200)]
    assert sum((n - 50) ** 2 for n in counts) / 200 == pytest.approx(50, rel=0.35)  # as large as its mean


def test_the_seed_decides_everything():
    one, same, other = (draw(5.0, 60.0, NAMES, "zipf", 64, 64, seed) for seed in (1, 1, 2))
    assert one == same and one != other


def test_at_another_rate_the_same_calls_come_at_another_pace():
    slow, fast = draw(2.0, 60.0, NAMES, "zipf", 64, 64, 0), draw(4.0, 30.0, NAMES, "zipf", 64, 64, 0)
    assert [(c.tenant, c.input, c.output) for c in slow] == [(c.tenant, c.input, c.output) for c in fast]
    assert [c.at for c in slow] == pytest.approx([2 * c.at for c in fast])


@pytest.mark.parametrize("popularity, weight", [("zipf", lambda k: 1 / k), ("uniform", lambda k: 1.0)])
def test_tenants_are_as_popular_as_asked(popularity, weight):
    calls = draw(100.0, 200.0, NAMES, popularity, 8, 8, 0)
    found = collections.Counter(call.tenant for call in calls)
    total = sum(map(weight, range(1, 9)))
    for k, name in enumerate(NAMES, 1):
        assert found[name] / len(calls) == pytest.approx(weight(k) / total, rel=0.12)


def test_lengths_are_uniform_around_their_mean():
    calls = draw(100.0, 100.0, [None], "zipf", 65, 16, 0)
    for lengths, low, high in (([c.input for c in calls], 33, 97), ([c.output for c in calls], 8, 24)):
        assert (min(lengths), max(lengths)) == (low, high)
        assert sum(lengths) / len(lengths) == pytest.approx((low + high) / 2, rel=0.02)


# Figures


def outcome(at=0.0, ttft=0.5, token=0.05, tokens=11, error="", late=0.0) -> Outcome:
    call = Call(at, "t", 4, tokens)
    return Outcome(call, at + late, at + ttft, at + ttft + token * (tokens - 1), 1, tokens, error)


def test_percentiles_are_values_that_were_measured():
    values = list(range(1, 101))
    assert [load.percentile(values, p) for p in (50, 90, 99, 100)] == [50, 90, 99, 100]
    assert load.percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert load.percentile([7.0], 1) == load.percentile([7.0], 99) == 7.0
    assert load.percentile([], 50) is None


def test_attainment_counts_both_limits_and_errors():
    events = [
        outcome(),  # within both
        outcome(ttft=1.0, token=0.1),  # just
        outcome(ttft=1.01),
        outcome(token=0.11),
        outcome(error="HTTP 500"),
    ]
    found = load.summary(events, slo_first=1000, slo_token=100)
    assert (found["requests"], found["errors"], found["first_error"]) == (5, 1, "HTTP 500")
    assert found["attainment"] == pytest.approx(2 / 5)
    assert load.summary(events, slo_first=1100, slo_token=200)["attainment"] == pytest.approx(4 / 5)


def test_latencies_count_from_when_a_request_was_due():
    found = load.summary([outcome(at=10.0, ttft=2.0, late=1.5, token=0.02, tokens=51)], 1000, 100)
    assert found["ttft_ms_p50"] == pytest.approx(2000) and found["client_late_ms_p99"] == pytest.approx(1500)
    assert found["tpot_ms_p99"] == pytest.approx(20)
    assert found["output_tokens_per_s"] == pytest.approx(51 / 13) and found["requests_per_s"] == pytest.approx(1 / 13)


def test_tokens_that_came_with_the_first_are_not_waited_for():
    event = Outcome(Call(0, None, 1, 9), 0, 1.0, 2.0, first_tokens=5, tokens=9)
    assert event.tpot == pytest.approx(1 / 4)


def test_nothing_answered_is_no_latency():
    found = load.summary([outcome(error="x")], 1000, 100)
    assert found["ttft_ms_p50"] is None and found["attainment"] == 0 and found["output_tokens_per_s"] == 0
    assert load.summary([], 1000, 100)["attainment"] is None


def test_the_highest_rate_has_none_below_it_that_fails():
    rows = [{"rate": r, "attainment": a} for r, a in ((8, 0.5), (1, 1.0), (2, 0.99), (4, 0.98))]
    assert load.highest_rate(rows) == 2
    assert load.highest_rate([*rows, {"rate": 16, "attainment": 1.0}]) == 2
    assert load.highest_rate(rows[:1]) is None


# A server whose delays are known


@pytest.fixture(scope="module")
def known():
    """Its url. The first token takes 0.3 s, each further one 0.05 s; "broken" and "short" answer wrongly."""

    async def models(_):
        cards = [{"id": "base"}, *({"id": name, "parent": "base"} for name in ("a", "b"))]
        return web.json_response({"data": cards})

    async def generate(request):
        body = await request.json()
        if body.get("lora_path") == "broken":
            return web.json_response({"error": "no such adapter"}, status=404)
        reply = web.StreamResponse()
        await reply.prepare(request)
        wanted = body["sampling_params"]["max_new_tokens"]
        for n in range(1, wanted + (body.get("lora_path") != "short")):
            await asyncio.sleep(0.3 if n == 1 else 0.05)
            answer = {"text": "x" * 300_000, "meta_info": {"completion_tokens": n, "finish_reason": {"type": "length"}}}
            await reply.write(b"data: " + json.dumps(answer).encode() + b"\n\n")
        await reply.write(b"data: [DONE]\n\n")
        return reply

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    loop, ready = asyncio.new_event_loop(), threading.Event()

    async def start():
        app = web.Application()
        app.add_routes([web.get("/v1/models", models), web.post("/generate", generate)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        ready.set()

    loop.create_task(start())
    threading.Thread(target=loop.run_forever, daemon=True).start()
    assert ready.wait(20)
    yield f"http://127.0.0.1:{port}"
    loop.call_soon_threadsafe(loop.stop)


def test_known_delays_are_measured_and_requests_do_not_wait_for_each_other(known):
    calls = [Call(0.02 * n, "a", 4, 5) for n in range(20)]
    started = time.monotonic()
    outcomes = asyncio.run(drive(known, calls, 0, timeout=30))
    assert time.monotonic() - started < 0.5 * 20 * 0.5  # one after the other: 20 times half a second
    assert [o.error for o in outcomes] == [""] * 20 and {o.tokens for o in outcomes} == {5}
    found = load.summary(outcomes, 1000, 1000)
    assert 300 <= found["ttft_ms_p50"] < 600 and 48 <= found["tpot_ms_p50"] < 120


def test_what_fails_is_an_error_and_says_why(known):
    calls = [Call(0, "broken", 4, 2), Call(0, "short", 4, 3), Call(0, "a", 4, 2)]
    broken, short, good = asyncio.run(drive(known, calls, 0, timeout=30))
    assert broken.error.startswith("HTTP 404: ") and short.error.startswith("2 tokens, want 3: {'type': 'length'}")
    assert not good.error
    assert asyncio.run(drive(known, [Call(0, "a", 4, 50)], 0, timeout=0.5))[0].error.startswith("TimeoutError")
    with pytest.raises(RuntimeError, match="broken: HTTP 404"):
        asyncio.run(warm_up(known, ["a", "broken"], 4, 30))


def test_the_tenants_are_those_that_have_a_base(known):
    assert asyncio.run(tenants_of(known)) == ["a", "b"]


# The command


def test_a_run_against_sglang_on_the_cpu(server, loaded, capsys):
    names = loaded("lora", "oft")
    url = f"http://127.0.0.1:{server.port}"
    command = ["bench", "load", "--url", url, "--rates", "4", "2", "--seconds", "2", "--json"]
    command += ["--input", "16", "--output", "6"]
    assert cli.main([*command, "--slo-first", "60000", "--slo-token", "60000"]) == 0
    *rows, best = json.loads(capsys.readouterr().out)
    assert [row["rate"] for row in rows] == [2, 4] and best == {"url": url, "highest_rate": 4}
    for row in rows:
        expected = draw(row["rate"], 2.0, names, "zipf", 16, 6, 0)
        assert (row["requests"], row["errors"], row["attainment"]) == (len(expected), 0, 1)
        assert 0 < row["ttft_ms_p50"] <= row["ttft_ms_p90"] <= row["ttft_ms_p99"]
        assert 0 < row["tpot_ms_p50"] and row["output_tokens_per_s"] > 0
    assert cli.main([*command, "--slo-first", "0.001"]) == 0
    assert json.loads(capsys.readouterr().out)[-1]["highest_rate"] is None


def test_two_servers_side_by_side(known, capsys):
    other = known.replace("127.0.0.1", "localhost")
    flags = ["--url", known, "--url", other, "--rates", "5", "--seconds", "1", "--output", "3"]
    assert cli.main(["bench", "load", *flags]) == 0
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines() if re.match(r" +5 http", line)]
    assert [line[1] for line in lines] == [known, other] and lines[0][2] == lines[1][2]
    assert f"{other}: highest rate that meets the SLO for 99%: 5 requests a second" in out


def test_the_plot_is_an_image(known, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "load.png"
    flags = ["--url", known, "--rates", "5", "--seconds", "1", "--output", "3", "--plot", str(file)]
    assert cli.main(["bench", "load", *flags]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--url", "http://127.0.0.1:9"], "Cannot connect"),
        (["--url", "nonsense"], "nonsense"),
        (["--url", "KNOWN", "--url", "KNOWN"], "two different ones"),
        (["--url", "KNOWN", "--tenants", "broken"], "broken: HTTP 404"),
        (["--rates", "0"], "want a number above 0"),
        (["--input", "none"], "want a whole number above 0"),
    ],
)
def test_bad_usage_is_status_2_in_words(known, capsys, flags, message):
    try:
        status = cli.main(["bench", "load", *(known if flag == "KNOWN" else flag for flag in flags)])
    except SystemExit as end:  # argparse's way
        status = end.code
    out, err = capsys.readouterr()
    assert status == 2 and message in err and "Traceback" not in err and not out


def test_plotting_without_matplotlib_is_said_before_the_run(known, capsys, monkeypatch):
    monkeypatch.setattr(load.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["bench", "load", "--url", known, "--plot", "x.png"]) == 2
    assert "pip install 'scute_sgl[plot]'" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["decode", "prefill", "ops"])
def test_the_other_kinds_are_the_scripts_of_a_clone(kind, monkeypatch, capsys, tmp_path):
    commands = []

    def execv(program, command):
        commands.append(command)
        raise SystemExit

    monkeypatch.setattr(load.os, "execv", execv)
    with pytest.raises(SystemExit):
        cli.main(["bench", kind, "--only", "lora", "--help"])
    assert load.Path(commands[0][1]).name == f"bench_{kind}.py" and load.Path(commands[0][1]).is_file()
    assert commands[0][2:] == ["--only", "lora", "--help"]

    monkeypatch.setattr(load, "__file__", str(tmp_path / "python/scute_sgl/load.py"))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", kind]) == 2
    assert "run this in a clone" in capsys.readouterr().err
