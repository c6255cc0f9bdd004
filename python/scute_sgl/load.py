"""``scute bench load``: requests over a running server's tenants, at rates that do not wait for its answers.

Arrivals are Poisson, and tenants are popular by Zipf's law (the k-th 1/k as often as the first) or all alike; both are
drawn from a seed, so two servers get the same requests. Time counts from the moment when a request was due, also if
this client sent it late. An answer meets the objective (SLO) if its first token came in time and the others, on
average, too; one that failed does not.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from scute_sgl import console
from scute_sgl.console import above_0, picture, positive, say

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from scute_sgl.load_client import Outcome

PROFILES = {"decode": (128, 256), "prefill": (2048, 16)}  # mean tokens in and out
PERCENTILES = (50, 90, 99)
GOAL = 0.99
MOST_REQUESTS, MOST_TOKENS, MOST_INPUT = 1_000_000, 500_000_000, 10_000_000
LATE_MS = 50  # beyond it the client is measured too, and says so
SCRIPTS = {"decode": "time per token of adapter workloads", "prefill": "prefill's ops", "ops": "decoding's ops"}


def add_parser(commands) -> None:
    bench = commands.add_parser("bench", help="measure: a running server (load), or what benchmarks/ measures")
    kinds = bench.add_subparsers(dest="kind", required=True, metavar="KIND")
    for kind, what in SCRIPTS.items():
        script = kinds.add_parser(kind, help=f"{what}; needs a clone", add_help=False, allow_abbrev=False)
        script.set_defaults(run=run_script, rest=[])
    parser = kinds.add_parser(
        "load", help="a running server under open-loop load", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--url", type=console.url, action="append", metavar="URL", help="a server (port 30000 here); two: side by side")
    add("--rates", type=above_0, nargs="+", default=[1.0, 2.0, 4.0, 8.0], help="requests a second, in turn (1 2 4 8)")
    add("--seconds", type=above_0, default=60.0, help="of arrivals at each rate (60)")
    add("--tenants", nargs="+", metavar="NAME", help="most popular first; default: all loaded in the first server")
    add("--popularity", choices=("zipf", "uniform"), default="zipf")
    add("--profile", choices=PROFILES, default="decode", help="128 tokens in, 256 out (decode), or 2048 in, 16 out")
    add("--input", type=positive, help="mean tokens in; lengths are uniform from half of it to one and a half")
    add("--output", type=positive, help="mean tokens out, likewise")
    add("--slo-first", type=above_0, default=1000.0, metavar="MS", help="first token within (1000)")
    add("--slo-token", type=above_0, default=100.0, metavar="MS", help="mean time of each further token (100)")
    add("--seed", type=int, default=0)
    add("--timeout", type=above_0, default=600.0, metavar="S", help="of one request (600)")
    add("--json", action="store_true", help="print a JSON list and nothing else")
    add("--plot", type=picture, metavar="FILE", help="draw latencies and attainment over the rate; needs matplotlib")
    parser.set_defaults(run=run)


def run_script(args) -> int:
    """Replace this process by a script of benchmarks/."""
    for folder in (Path(__file__).parents[2] / "benchmarks", Path("benchmarks")):
        script = folder / f"bench_{args.kind}.py"
        if script.is_file():
            os.execv(sys.executable, [sys.executable, str(script), *args.rest])
    say(f"scute bench {args.kind}: an installed package has no benchmarks/bench_{args.kind}.py; run this in a clone")
    return 2


def run(args) -> int:
    urls = args.url or ["http://127.0.0.1:30000"]
    try:
        if args.plot and importlib.util.find_spec("matplotlib") is None:
            raise ValueError("--plot needs matplotlib: pip install 'scute_sgl[plot]'")
        if len(urls) > 2 or len(set(urls)) < len(urls):
            raise ValueError("want one --url, or two different ones")
        if len(set(args.tenants or ())) < len(args.tenants or ()):
            raise ValueError("--tenants: want each name once; popularity follows their order")
        _check_size(args)
        rows: list[dict] = []
        asyncio.run(measure(urls, args, rows.append))
    except (OSError, ValueError, RuntimeError) as error:
        say(f"scute bench load: {error or type(error).__name__}")
        return 2
    best = [{"url": url, "highest_rate": highest_rate([row for row in rows if row["url"] == url])} for url in urls]
    print(json.dumps([*rows, *best]) if args.json else table(rows, best))
    if args.plot:
        plot(rows, args)
    return 0


def _check_size(args) -> None:
    """ValueError for more requests and tokens than this client holds: all are made before the clock starts."""
    requests = max(args.rates) * args.seconds
    tokens = requests * (args.input or PROFILES[args.profile][0])
    for what, found, most in (("requests", requests, MOST_REQUESTS), ("prompt tokens", tokens, MOST_TOKENS)):
        if found > most:
            raise ValueError(f"{found:.3g} {what} at the highest rate, want at most {most:,}; lower it or --seconds")
    if (args.input or 1) > MOST_INPUT:
        raise ValueError(f"--input {args.input}: want at most {MOST_INPUT:,}")


async def measure(urls: list[str], args, add: Callable[[dict], None]) -> None:
    """``add`` a row for every rate and server, as they come; servers take turns, for they may share a machine."""
    from scute_sgl import load_client as client

    input, output = args.input or PROFILES[args.profile][0], args.output or PROFILES[args.profile][1]
    tenants = args.tenants or await client.tenants_of(urls[0]) or [None]
    say(f"{len(tenants)} tenants" if tenants != [None] else "no adapter is loaded: every request is for the base")
    for url in urls:
        say(f"{url}: warming up, one request for each tenant")
        await client.warm_up(url, tenants, input, args.timeout)
    for rate in sorted(set(args.rates)):
        calls = client.draw(rate, args.seconds, tenants, args.popularity, input, output, args.seed)
        for url in urls:
            say(f"{url}: {len(calls)} requests at {rate:g} a second")
            outcomes = await client.drive(url, calls, (args.seed, rate), args.timeout)
            facts = {"url": url, "rate": rate, "tenants": len(tenants), "popularity": args.popularity}
            facts |= {"input": input, "output": output}
            row = facts | summary(outcomes, args.slo_first, args.slo_token)
            if row["first_error"]:
                say(f"{row['errors']} errors, such as: {row['first_error']}")
            if (late := row["client_late_ms_p99"] or 0) > LATE_MS:
                say(f"this client sent 1% of them over {late:.0f} ms late; it needs a less busy machine")
            add(row)


def percentile(values: list[float], percent: float) -> float | None:
    """The smallest value that at least ``percent`` % of them do not exceed."""
    return sorted(values)[max(math.ceil(len(values) * percent / 100), 1) - 1] if values else None


def summary(outcomes: list[Outcome], slo_first: float, slo_token: float) -> dict:
    """Latencies in ms, of the answered; attainment, of all. ``slo_*`` in ms."""
    good = [o for o in outcomes if not o.error]
    met = [o for o in good if o.ttft * 1e3 <= slo_first and o.tpot * 1e3 <= slo_token]
    took = max((o.last for o in good), default=math.inf)
    times = {"ttft": [o.ttft * 1e3 for o in good], "tpot": [o.tpot * 1e3 for o in good if o.tokens > o.first_tokens]}
    return {
        "requests": len(outcomes),
        "errors": len(outcomes) - len(good),
        "first_error": next((o.error for o in outcomes if o.error), None),
        **{f"{what}_ms_p{p}": percentile(values, p) for what, values in times.items() for p in PERCENTILES},
        "requests_per_s": len(good) / took,
        "output_tokens_per_s": sum(o.tokens for o in good) / took,
        "attainment": len(met) / len(outcomes) if outcomes else None,
        "client_late_ms_p99": percentile([(o.sent - o.call.at) * 1e3 for o in outcomes], 99),
    }


def highest_rate(rows: list[dict]) -> float | None:
    """The highest measured rate up to which every measured rate meets the objective for 99% of its requests."""
    best = None
    for row in sorted(rows, key=lambda row: row["rate"]):
        if row["attainment"] is None or row["attainment"] < GOAL:
            break
        best = row["rate"]
    return best


def table(rows: list[dict], best: list[dict]) -> str:
    """Rates with the servers beside each other, and what each reaches."""
    width = max(len("server"), *(len(row["url"]) for row in rows))
    names = " ".join(f"{what + ' ' + str(p):>8}" for what in ("TTFT", "TPOT") for p in PERCENTILES)
    lines = [f"{'rate':>6} {'server':{width}} {'requests':>8} {'errors':>6} {names} {'tokens/s':>9} {'SLO met':>7}"]
    for row in rows:
        times = (row[f"{what}_ms_p{p}"] for what in ("ttft", "tpot") for p in PERCENTILES)
        times = " ".join(f"{'-' if t is None else format(t, '.1f'):>8}" for t in times)
        met = "-" if row["attainment"] is None else f"{row['attainment']:.1%}"
        speed, counts = row["output_tokens_per_s"], f"{row['requests']:>8} {row['errors']:>6}"
        lines.append(f"{row['rate']:>6g} {row['url']:{width}} {counts} {times} {speed:>9.1f} {met:>7}")
    lines.append("\nTTFT and TPOT in ms: time to the first token, and for each further one; percentiles.")
    for row in best:
        reached = "none of these" if row["highest_rate"] is None else f"{row['highest_rate']:g} requests a second"
        lines.append(f"{row['url']}: highest rate that meets the SLO for {GOAL:.0%}: {reached}")
    return "\n".join(lines)


def plot(rows: list[dict], args) -> None:
    """Latencies and attainment over the rate, a line for each server."""
    from matplotlib.figure import Figure

    figure, rows_of = Figure(figsize=(12, 3.6), layout="constrained"), {}
    for row in rows:
        rows_of.setdefault(row["url"], []).append(row)
    draw(figure.subplots(1, 3), rows_of, args)
    figure.savefig(args.plot, dpi=150)


def draw(panels: Sequence, rows_of: dict[str, list[dict]], args) -> None:
    """Three matplotlib axes: TTFT, TPOT and attainment of each server's rows, in the order of their rates."""
    for color, (server, rows) in enumerate(rows_of.items()):
        rates = [row["rate"] for row in rows]
        for panel, what in zip(panels, ("ttft", "tpot")):
            for p, style in ((50, "-"), (99, "--")):
                values = [math.nan if row[f"{what}_ms_p{p}"] is None else row[f"{what}_ms_p{p}"] for row in rows]
                panel.plot(rates, values, style, marker=".", color=f"C{color}", label=console.label(f"{server} p{p}"))
        attained = [math.nan if row["attainment"] is None else 100 * row["attainment"] for row in rows]
        panels[2].plot(rates, attained, marker=".", color=f"C{color}", label=console.label(server))
    limits = (args.slo_first, args.slo_token, 100 * GOAL)
    for panel, name, limit in zip(panels, ("TTFT, ms", "TPOT, ms", "requests that meet the SLO, %"), limits):
        panel.axhline(limit, color="gray", linewidth=0.8)
        panel.set(xlabel="requests a second", ylabel=name, ylim=(0, None))
        panel.legend(fontsize="small")
