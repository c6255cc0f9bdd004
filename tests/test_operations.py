"""What an operator sees of a folder of adapters: what is served, log lines, metrics, ``scute top``."""

from __future__ import annotations

import http.server
import json
import re
import shutil
import threading
import urllib.request
from pathlib import Path

import pytest
from servers import TOLERANCE, Server, prompt

import scute_sgl
from scute_sgl import cli, top
from scute_sgl.metrics import FLUSH_SECONDS

GOOD = ["dora", "ia3", "linked", "lora", "vera"]


@pytest.fixture(scope="module")
def shelf(kit, tmp_path_factory):
    """Good adapters, one of them a link to elsewhere; three that must be refused; folders that are no adapters."""
    shelf = tmp_path_factory.mktemp("shelf") / "adapters"
    for name in GOOD:
        if name != "linked":
            shutil.copytree(kit.adapter(name), shelf / name)
    (shelf / "linked").symlink_to(kit.adapter("oft"))
    shutil.copytree(kit.adapter("lora"), shelf / "default")
    shutil.copytree(kit.adapter("lora"), shelf / "pickled")
    (shelf / "pickled/adapter_model.safetensors").rename(shelf / "pickled/adapter_model.bin")
    other = Path(shutil.copytree(kit.adapter("lora"), shelf / "other"))
    config = json.loads((other / "adapter_config.json").read_text()) | {"peft_type": "NO\nSUCH\x1b[2J"}
    (other / "adapter_config.json").write_text(json.dumps(config))
    (shelf / "notes").mkdir()
    (shelf / "notes/readme.txt").write_text("adapters of May")
    return shelf


# An engine, before there is a server


def use_an_engine(model_path: str, shelf: str) -> dict:
    engine = scute_sgl.Engine(model_path=model_path, scute_adapter_dir=shelf, dtype="float32", max_loaded_loras=2)
    try:
        tenants = engine.get_server_info()["internal_states"][0]["scute"]["tenants"]
        outside = engine.load_lora_adapter("passwd", "/etc")
    finally:
        engine.shutdown()
    return {"tenants": list(tenants), "outside": outside.error_message}


def test_an_engine_loads_a_folder_and_keeps_to_it(kit, shelf, elsewhere):
    found = elsewhere(use_an_engine, kit.base(), str(shelf))
    assert found["tenants"] == ["dora", "ia3"]  # the first two by name; none pushed another out
    assert found["outside"].startswith("adapter 'passwd' refused [unsafe_file]: found '/etc', want")


# A server


class ScuteServe(Server):
    program = ("scute_sgl", "serve")


@pytest.fixture(scope="module")
def shop(kit, shelf, tmp_path_factory):
    """``scute serve`` with metrics, and two slots for five adapters."""
    log = tmp_path_factory.mktemp("shop") / "server.log"
    flags = ["--adapter-dir", str(shelf), "--enable-metrics", "--scute-arena-mb", "8", "--max-loras-per-batch", "2"]
    with ScuteServe(kit.base(), log, *flags) as running:
        yield running


def test_a_folder_is_served_but_for_what_is_refused(shop, kit):
    assert sorted(shop.state()["tenants"]) == GOOD
    for adapter in GOOD:
        served = shop.logprobs(prompt(3), adapter, n=2)
        written = "oft" if adapter == "linked" else adapter
        assert kit.error(written, served) <= TOLERANCE and kit.effect(written, served) > 0.05
    for name in ("pickled", "other", "notes"):
        assert shop.call("/generate", {"input_ids": prompt(3), "lora_path": name})[0] == 404


def test_the_start_is_summed_up(shop, shelf):
    log = shop.log.read_text()
    assert re.search(r"scute: ready: arena 8 MiB, 2 slots, \d+ modules, no CUDA graphs, \d+ hooks verified\n", log)
    assert f"scute: 5 adapters loaded: {', '.join(map(repr, GOOD))}\n" in log
    assert f"scute: 3 adapters of {shelf} refused" in log
    assert re.search(r"scute: adapter 'default' refused \[bad_config\]: .*\(\d+\.\d ms\)\n", log)
    assert re.search(r"scute: adapter 'pickled' refused \[unsafe_file\]: adapter_model\.bin: .*\(\d+\.\d ms\)\n", log)
    # what a file says can neither end a line nor reach the terminal as a command
    assert re.search(r"scute: adapter 'other' refused \[unsupported_method\]: peft_type: peft_type=NO\\nSUCH\\x1b", log)
    # after a first pass, which shows what the model calls, and before anybody is served
    steps = ["Prefill batch", "scute: loaded", "3 adapters of", "ready to roll"]
    assert sorted(steps, key=log.index) == steps


@pytest.mark.parametrize("path", ["/etc", "..", "../..", "", "lora/../../elsewhere", "linked"])
def test_a_request_cannot_leave_the_adapter_dir(shop, shelf, path):
    before = shop.state()["tenants"].keys()
    status, reply = shop.load("new", path if path in ("/etc", "") else str(shelf / path))
    assert status == 400 and reply["error_message"].startswith("adapter 'new' refused [unsafe_file]: "), reply
    assert shop.state()["tenants"].keys() == before


def test_loads_unloads_and_evictions_are_logged(shop, shelf):
    status, reply = shop.load("again", str(shelf / "../adapters/lora"))
    assert status == 200, reply
    for adapter in ("again", "dora", "ia3"):
        shop.generate(prompt(4), adapter, n=1)
    assert shop.unload("again")[0] == 200
    size = shop.state()["tenants"]["lora"]["bytes"]
    log = shop.log.read_text()
    for what in ("loaded", "evicted", "unloaded"):
        assert re.search(rf"scute: {what} 'again', LORA, {size} bytes, \d+\.\d ms\n", log), what
    assert re.search(r"scute: loaded 'vera', VERA, \d+ bytes, ", log)


def scrape(server) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics") as reply:
        lines = reply.read().decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line.startswith("scute_"))}


def settled(server) -> dict[str, float]:
    """The metrics once the rows of all passes so far are written."""
    threading.Event().wait(2 * FLUSH_SECONDS)
    return scrape(server)


def test_metrics_are_the_servers_own_counters(shop):
    before = settled(shop)
    shop.generate(prompt(21, 30), "lora", n=8)
    shop.generate(prompt(22, 20), "vera", n=4)
    shop.generate(prompt(23, 10), None, n=2)
    shop.generate(prompt(24, 10), "dora", n=1)
    assert shop.call("/generate", {"input_ids": prompt(3), "lora_path": "nobody"})[0] == 404
    assert shop.load("new", "/etc")[0] == 400
    after, state = settled(shop), shop.state()
    pool = state["pool"]
    assert {name: after[f"scute_{name}"] for name in ("tenants_loaded", "tenants_resident", "arena_bytes")} == {
        "tenants_loaded": 5, "tenants_resident": pool["resident"], "arena_bytes": pool["arena_bytes"]
    }  # fmt: skip
    assert [after[f"scute_arena_{name}_bytes"] for name in ("used", "free", "shared")] == [
        pool[name] for name in ("used", "free", "shared_bytes")
    ]
    assert after["scute_swap_ins_total"] == pool["swap_ins"] and after["scute_evictions_total"] == pool["evictions"]
    assert pool["evictions"] > 0 and after["scute_arena_used_bytes"] > 0

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0)

    # a prompt's rows, and one for each token but the last, which nobody reads the answer to
    rows = {method: grown(f'scute_rows_total{{method="{method}"}}') for method in ("LORA", "VERA", "DORA", "base")}
    for method, least in {"LORA": 37, "VERA": 23, "DORA": 10, "base": 11}.items():
        assert least <= rows[method] <= least + 1, rows  # the overlapped scheduler may run one pass more
    assert grown('scute_refusals_total{code="not_found"}') == 1
    assert grown('scute_refusals_total{code="unsafe_file"}') == 1
    assert 0 < grown("scute_swap_in_seconds_count") <= grown("scute_swap_ins_total")
    assert grown("scute_swap_in_seconds_sum") > 0


def test_the_documented_metrics_are_the_served_ones(shop):
    page = Path(__file__).parents[1] / "docs/operating.md"
    rows = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| `scute_")]
    named = set(re.findall(r"`(scute_\w+)", "\n".join(rows)))
    assert named == {re.sub(r"(_bucket|_sum|_count)?(\{.*)?$", "", name) for name in scrape(shop)}


def test_top_prints_a_list_or_a_table(shop, capsys):
    url = f"http://127.0.0.1:{shop.port}"
    for adapter in ("lora", "ia3"):
        shop.generate(prompt(4), adapter, n=1)
    assert shop.load("new", "/etc")[0] == 400
    settled(shop)
    assert cli.main(["top", "--url", url, "--once", "--json"]) == 0
    *adapters, total = json.loads(capsys.readouterr().out)
    state = shop.state()
    assert {a.pop("name"): a for a in adapters} == state["tenants"]
    assert total["name"] == "total" and total["loaded"] == 5 and total["slots"] == 2
    assert {name: total[name] for name in state["pool"]} == state["pool"]
    assert total["rows"]["LORA"] > 0 and total["refusals"]["unsafe_file"] > 0

    assert cli.main(["top", "--url", url, "--once"]) == 0
    screen = capsys.readouterr().out
    assert "\x1b" not in screen and re.search(r"5 loaded, \d on the device, 2 slots", screen)
    size = f"{state['tenants']['ia3']['bytes']:,}"
    assert re.search(rf"^ia3 +IA3 +s +{size} +yes$", screen, re.MULTILINE), screen


def test_top_redraws_with_rates(monkeypatch, capsys):
    pool = {"resident": 1, "arena_bytes": 8 << 20, "used": 2 << 20, "shared_bytes": 0, "swap_ins": 3, "evictions": 0}
    adapter = {"name": "sql\x1b[2J", "method": "LORA", "live": ["A", "B"], "bytes": 1024, "resident": True}
    total = {"name": "total", "loaded": 1, "slots": 4, "rows": None, "refusals": {}, **pool}
    looks = [[adapter, total | {"time": 10.0, "forwards": 100}], [adapter, total | {"time": 12.0, "forwards": 150}]]
    naps = iter([None, KeyboardInterrupt])

    def nap(seconds):
        assert seconds == 2
        if stop := next(naps):
            raise stop

    monkeypatch.setattr(top, "look", lambda url, key: looks.pop(0))
    monkeypatch.setattr(top.time, "sleep", nap)
    assert cli.main(["top"]) == 0
    first, second = capsys.readouterr().out.split(top.CLEAR)[1:]
    assert "100 passes, 3 swap-ins" in first and "150 passes (25.0/s), 3 swap-ins (0.0/s)" in second
    assert "2.0 of 8.0 MiB used (25.0%)" in second and "rows" not in second and "sql\\x1b[2J  LORA" in second


def test_top_says_what_it_cannot_reach(capsys):
    class Stock(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            answer = b'{"internal_states": [{}]}' if self.path == "/server_info" else b"{}"
            self.send_response(401 if self.path.startswith("/locked") else 200)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Stock) as stock:
        threading.Thread(target=stock.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{stock.server_port}"
        said = {url: "not a server with the scute backend", f"{url}/locked": "401"}
        for where, text in said.items():
            assert cli.main(["top", "--once", "--url", where]) == 2
            assert text in capsys.readouterr().err
        stock.shutdown()
    assert cli.main(["top", "--once", "--url", url]) == 2
    assert "no server answers at" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        cli.main(["top", "--interval", "0"])
    assert end.value.code == 2
