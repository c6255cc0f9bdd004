"""``scute top`` and ``scute bench load`` and servers that answer anything: said in words, exit code 2, no traceback."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import threading
import time

import pytest
from test_commands import CONTROL, fails

from scute_sgl import cli, load_client, top

STATE = {"forwards": 1, "captured": 0, "replays": 0, "slots": 1, "modules": 1, "tenants": {}}
STATE["pool"] = dict.fromkeys("used arena_bytes shared_bytes resident swap_ins evictions".split(), 0)


@pytest.fixture(scope="module")
def odd():
    """Its url, and a dict whose "all" is the reply to every request, byte for byte."""
    replies: dict[str, bytes] = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.wfile.write(replies["all"])
            with contextlib.suppress(OSError):
                while "drip" in replies:
                    self.wfile.write(replies["drip"])
                    time.sleep(0.1)

        do_POST = do_GET

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}", replies
        running.shutdown()


def ok(text: bytes | str) -> bytes:
    return b"HTTP/1.0 200 OK\r\n\r\n" + (text if isinstance(text, bytes) else text.encode())


URLS = ["", "nonsense", "http://", "http://x y", "http://h:abc", "http://h:99999", "ftp://h", "http://[::1"]
URLS += ["http://\x1b[31m", "http://a..b", f"http://{'a' * 300}"]


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("words", [["top", "--once"], ["bench", "load"]])
def test_what_is_no_url_is_named(capsys, words, url):
    assert f"--url: found {url!r}, want a URL such as" in fails(capsys, *words, "--url", url)


GARBAGE = [b"", b"garbage\r\n\r\n", b"HTTP/1.0 200 OK\r\nContent-Length: 9\r\n\r\nx", ok(""), ok("5"), ok("[]")]
GARBAGE += [ok(b"\xff"), ok(json.dumps({"internal_states": [{"scute": STATE | {"more": float("nan")}}]}))]
GARBAGE += [ok("[" * 100_000), ok('{"data": [5]}'), ok('{"data": [{"parent": 1}]}'), b"HTTP/1.0 500 \x1b[31m\r\n\r\n"]


@pytest.mark.parametrize("reply", GARBAGE)
@pytest.mark.parametrize("words", [["top", "--once"], ["bench", "load"]])
def test_a_server_that_answers_garbage_is_named(odd, capsys, words, reply):
    url, replies = odd
    replies["all"] = reply
    assert url in fails(capsys, *words, "--url", url, "--json")


@pytest.mark.parametrize(
    "change",
    [
        {"tenants": 5}, {"tenants": {"a": None}}, {"tenants": {"a": {"method": 5}}}, {"pool": {}}, {"forwards": "x"},
        {"forwards": 10**400}, {"pool": STATE["pool"] | {"used": -1}}, {"pool": STATE["pool"] | {"used": True}},
    ],
)  # fmt: skip
def test_another_state_than_scutes_is_said(odd, capsys, change):
    url, replies = odd
    replies["all"] = ok(json.dumps({"internal_states": [{"scute": STATE | change}]}))
    assert "another state than this version" in fails(capsys, "top", "--once", "--url", url)


def test_top_names_things_itself(odd, capsys):
    url, replies = odd
    tenant = {"method": "LORA", "live": [], "bytes": 1, "resident": True, "name": 5}
    pool = STATE["pool"] | {"time": "x", "name": 5}
    replies["all"] = ok(json.dumps({"internal_states": [{"scute": STATE | {"pool": pool, "tenants": {"a": tenant}}}]}))
    assert cli.main(["top", "--once", "--url", url]) == 0
    assert "\na " in capsys.readouterr().out


def test_top_counts_only_what_is_a_number(odd, monkeypatch):
    lines = [f'scute_rows_total{{method="M{n}"}} {value}' for n, value in enumerate(["3.0", "NaN", "x", "+Inf", "1e999", "2e+06"])]
    monkeypatch.setattr(top, "_get", lambda *_: "\n".join(lines))
    assert top._counters("", None) == ({"M0": 3, "M5": 2_000_000}, {})


def test_a_reply_that_drips_is_given_up(odd, capsys, monkeypatch):
    """Every read is short, all of them together are not."""
    url, replies = odd
    monkeypatch.setattr(top, "REPLY_SECONDS", 0.5)
    replies["all"] = b"HTTP/1.0 200 OK\r\n\r\n"
    replies["drip"] = b"x"
    assert "a reply of over 0.5 seconds" in fails(capsys, "top", "--once", "--url", url)
    del replies["drip"]


@pytest.mark.parametrize("key", ["a\nb", "\u043a", ""])
def test_a_key_that_no_header_holds_is_named(capsys, key):
    assert "--api-key: found" in fails(capsys, "top", "--once", "--api-key", key)


@pytest.mark.parametrize("count", ["1", None, [1], 10**400, -1, 1.5])
def test_a_server_that_counts_tokens_in_no_numbers_is_an_error(odd, count):
    url, replies = odd
    event = json.dumps({"meta_info": {"completion_tokens": count}})
    replies["all"] = ok(f"data: {event}\n\n")
    (outcome,) = asyncio.run(load_client.drive(url, [load_client.Call(0.0, None, 4, 2)], 0, timeout=10))
    assert outcome.error


def test_top_shows_a_state_without_control_characters(odd, capsys):
    url, replies = odd
    tenant = {"method": CONTROL, "live": [CONTROL], "bytes": 1, "resident": True}
    replies["all"] = ok(json.dumps({"internal_states": [{"scute": STATE | {"tenants": {CONTROL: tenant}}}]}))
    assert cli.main(["top", "--once", "--url", url]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\\x1b" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rates", "1e9", "--seconds", "1e9"], "requests at the highest rate, want at most"),
        (["--rates", "1", "--input", "999999999"], "want at most"),
        (["--rates", "nan"], "found 'nan', want a number above 0"),
        (["--output", "0"], "found '0', want a whole number above 0"),
        (["--tenants", "a", "a"], "want each name once"),
        (["--plot", "a.jpg"], "want a name that ends in .png or .svg"),
        (["--plot", "/nowhere/a.png"], "there is no such folder"),
    ],
)
def test_no_load_is_made_that_cannot_be(capsys, flags, message):
    assert message in fails(capsys, "bench", "load", "--url", "http://127.0.0.1:1", *flags)
