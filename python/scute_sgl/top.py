"""``scute top``: a running server's adapters and counters, read from its /server_info and, if it is on, /metrics."""

from __future__ import annotations

import argparse
import http.client
import json
import re
import shutil
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

from scute_sgl import console
from scute_sgl.errors import printable

MIB = 1 << 20
REPLY_SECONDS, MOST_REPLY = 10, 64 * MIB
CLEAR = "\x1b[H\x1b[J"  # to the top left, and erase what follows
NUMBER = r"(\d{1,18}(?:\.\d+)?(?:e\+\d\d)?)"  # as Prometheus' client writes counters
HEADER = ("adapter", "method", "live slots", "own bytes", "on device")


class Unreachable(Exception):
    """Why there is nothing to show."""


def add_parser(commands) -> None:
    parser = commands.add_parser("top", help="watch a running server's adapters and counters")
    here = "http://127.0.0.1:30000"
    parser.add_argument("--url", type=console.url, default=here, help="of the server (default: %(default)s)")
    parser.add_argument("--api-key", type=console.token, metavar="KEY", help="the server's, if it has one")
    parser.add_argument("--interval", type=_seconds, default=2.0, metavar="S", help="seconds (default: 2)")
    parser.add_argument("--once", action="store_true", help="look once, for scripts")
    parser.add_argument("--json", action="store_true", help="print a JSON list for each look and nothing else")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit code: 0, also when interrupted; 2, with a message, where no such server answers."""
    before = None
    try:
        while True:
            now = look(args.url, args.api_key)
            if args.json:
                print(json.dumps(now), flush=True)
            else:
                text = "\n".join(map(printable, screen(now, before, args.url)))
                print(text if args.once else CLEAR + text, flush=True)
            if args.once:
                return 0
            before = now
            time.sleep(args.interval)
    except Unreachable as error:
        console.say(f"scute top: {error}")
        return 2
    except (KeyboardInterrupt, BrokenPipeError):
        return 0


def look(url: str, api_key: str | None = None) -> list[dict]:
    """One object for each adapter, and a last one, "total", of the server. Unreachable if there is no scute server.

    ``rows`` (by method) and ``refusals`` (by code) are None where the server runs without --enable-metrics.
    """
    try:
        info = json.loads(_get(url, "/server_info", api_key), parse_constant=_no_constant)
        scute = info["internal_states"][0]["scute"]
    except urllib.error.HTTPError as error:
        hint = ": give its --api-key" if error.code in (401, 403) else ""
        raise Unreachable(f"{url} answers {error.code} {error.reason}{hint}") from None
    except (OSError, http.client.HTTPException) as error:
        raise Unreachable(f"no server answers at {url}: {getattr(error, 'reason', error)}") from None
    except (ValueError, LookupError, TypeError, RecursionError):
        raise Unreachable(f"{url} is not a server with the scute backend") from None
    try:
        adapters, total = _state(scute)
    except (AttributeError, KeyError, TypeError):  # of another version
        raise Unreachable(f"{url} tells another state than this version of scute reads") from None
    rows, refusals = _counters(url, api_key)
    return [*adapters, {**total, "rows": rows, "refusals": refusals}]


def _state(scute: dict) -> tuple[list[dict], dict]:
    """The adapters and the total. AttributeError, KeyError or TypeError for a state without what ``screen`` shows."""
    adapters = [{**tenant, "name": name} for name, tenant in scute["tenants"].items()]
    counters = {name: scute[name] for name in ("forwards", "captured", "replays", "slots", "modules")}
    total = {**scute["pool"], **counters, "name": "total", "time": time.time(), "loaded": len(adapters)}
    for name in (*counters, "used", "arena_bytes", "shared_bytes", "resident", "swap_ins", "evictions"):
        _check_count(total[name])
    for adapter in adapters:
        adapter["method"] + ", ".join(adapter["live"])
        _check_count(adapter["bytes"]), _check_count(int(adapter["resident"] + 0))
    return adapters, total


def _no_constant(text: str) -> None:
    raise ValueError(f"{text}, which is no JSON")


def _check_count(value: object) -> None:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise TypeError(f"{str(value)[:40]} is no count")


def screen(now: list[dict], before: list[dict] | None, url: str) -> Iterator[str]:
    """The lines to show; rates need the look before."""
    *adapters, total = now
    share = 100 * total["used"] / max(total["arena_bytes"], 1)
    yield f"scute top   {url}   {time.strftime('%H:%M:%S', time.localtime(total['time']))}"
    yield (
        f"arena       {total['used'] / MIB:.1f} of {total['arena_bytes'] / MIB:.1f} MiB used ({share:.1f}%),"
        f" {total['shared_bytes'] / MIB:.1f} MiB of it shared"
    )
    yield f"adapters    {total['loaded']} loaded, {total['resident']} on the device, {total['slots']} slots"
    counts = [f"{total[name]} {label}{_rate(name, now, before)}" for name, label in _COUNTS.items()]
    yield f"since start {', '.join(counts)}"
    for label, by in (("rows", total["rows"]), ("refusals", total["refusals"])):
        if by:
            yield f"{label:11} {', '.join(f'{name} {count}' for name, count in sorted(by.items()))}"
    yield ""
    yield from _table(sorted(adapters, key=lambda adapter: (not adapter["resident"], adapter["name"])))


_COUNTS = {"forwards": "passes", "swap_ins": "swap-ins", "evictions": "evictions"}


def _rate(name: str, now: list[dict], before: list[dict] | None) -> str:
    if before is None:
        return ""
    return f" ({(now[-1][name] - before[-1][name]) / max(now[-1]['time'] - before[-1]['time'], 1e-3):.1f}/s)"


def _table(adapters: list[dict]) -> Iterator[str]:
    """As many adapters as fit on a terminal; all of them where the output is none."""
    room = max(shutil.get_terminal_size().lines - 10, 1) if sys.stdout.isatty() else len(adapters)
    lines = [HEADER]
    for adapter in adapters[:room]:
        place = "yes" if adapter["resident"] else "no"
        live, size = ", ".join(adapter["live"]) or "-", f"{adapter['bytes']:,}"
        lines.append((printable(adapter["name"]), adapter["method"], live, size, place))
    widths = [max(map(len, column)) for column in zip(*lines)]
    for name, method, live, size, place in lines:
        yield f"{name:{widths[0]}}  {method:{widths[1]}}  {live:{widths[2]}}  {size:>{widths[3]}}  {place}"
    if len(adapters) > room:
        yield f"... and {len(adapters) - room} more"


def _counters(url: str, api_key: str | None) -> tuple[dict[str, int] | None, dict[str, int] | None]:
    """(rows by method, refusals by code), both None where the server has no metrics."""
    try:
        text = _get(url, "/metrics", api_key)
    except (OSError, ValueError, http.client.HTTPException):
        return None, None
    rows = re.findall(rf'^scute_rows_total\{{method="(\w+)"\}} {NUMBER}$', text, re.MULTILINE)
    refusals = re.findall(rf'^scute_refusals_total\{{code="(\w+)"\}} {NUMBER}$', text, re.MULTILINE)
    return {name: int(float(count)) for name, count in rows}, {code: int(float(count)) for code, count in refusals}


def _get(url: str, path: str, api_key: str | None) -> str:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    request = urllib.request.Request(url.rstrip("/") + path, headers=headers)
    text, until = b"", time.monotonic() + REPLY_SECONDS
    with urllib.request.urlopen(request, timeout=REPLY_SECONDS) as reply:
        while part := reply.read1(MIB):
            text += part
            if len(text) > MOST_REPLY:
                raise ValueError(f"a reply of over {MOST_REPLY} bytes")
            if time.monotonic() > until:
                raise TimeoutError(f"a reply of over {REPLY_SECONDS} seconds")
    return text.decode()


def _seconds(text: str) -> float:
    value = console.above_0(text)
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"found {text}, want 0.1 to 3600 seconds")
    return value
