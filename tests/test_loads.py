"""Loads and unloads at run time, over HTTP: final, never in the way of requests, and without leaks."""

from __future__ import annotations

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from servers import prompt


def test_unload_is_final(server, kit):
    server.load("x", kit.adapter("lora"))
    assert server.generate(prompt(5), "x", n=2)
    assert server.unload("x")[0] == 200
    assert server.call("/generate", {"input_ids": prompt(5), "lora_path": "x"})[0] == 404
    assert "x" not in [card["id"] for card in server.ok("/v1/models")["data"]]
    assert "x" not in server.state()["tenants"]
    status, reply = server.unload("x")
    assert status == 404 and reply["error_message"] == "adapter 'x' refused [not_found]: not loaded"


def test_an_unloaded_adapter_leaves_no_bytes_behind(server, kit, loaded):
    loaded("lora", "vera")
    server.generate([prompt(1), prompt(2)], ["lora", "vera"], n=2)
    assert server.unload("lora")[0] == server.unload("vera")[0] == 200
    server.generate(prompt(3), None, n=2)  # the next pass lets go of what no batch names
    stats = server.state()["pool"]
    assert stats["used"] == stats["shared_bytes"] == stats["resident"] == 0


@pytest.mark.parametrize("request_kind", ["over-long", "bad parameters", "n=2", "stream, then disconnect"])
def test_unload_does_not_wait_for_requests_that_are_over(server, kit, request_kind):
    server.load("x", kit.adapter("lora"))
    body = {"input_ids": prompt(5), "lora_path": "x", "sampling_params": {"max_new_tokens": 4}}
    if request_kind == "over-long":
        assert server.call("/generate", body | {"input_ids": prompt(5, 3000)})[0] == 400
    elif request_kind == "bad parameters":
        assert server.call("/generate", body | {"sampling_params": {"temperature": -1}})[0] == 400
    elif request_kind == "n=2":
        assert len(server.ok("/generate", body | {"sampling_params": {"max_new_tokens": 4, "n": 2}})) == 2
    else:
        long = {"max_new_tokens": 1500, "ignore_eos": True}
        server.hang_up("/generate", body | {"sampling_params": long, "stream": True})
    started = time.monotonic()
    assert server.unload("x")[0] == 200
    assert time.monotonic() - started < 10
    assert server.load("x", kit.adapter("oft"))[0] == 200
    assert server.generate(prompt(5), "x", n=4)["output_ids"] == kit.greedy("oft", prompt(5), 4)
    assert server.unload("x")[0] == 200


def ask(server, n: int) -> tuple[threading.Thread, list[dict]]:
    """A request for n tokens of "x" that has begun: its thread, and where its answer will be."""
    answers = []
    asking = threading.Thread(target=lambda: answers.append(server.generate(prompt(5), "x", n=n)))
    asking.start()
    while server.state()["pool"]["resident"] == 0:
        time.sleep(0.01)
    return asking, answers


def test_a_name_is_free_while_its_old_adapter_finishes(server, kit):
    server.load("x", kit.adapter("lora"))
    asking, answers = ask(server, n=400)
    leaving = threading.Thread(target=lambda: server.unload("x", timeout=60))
    leaving.start()
    while server.load("x", kit.adapter("oft"))[0] != 200:
        time.sleep(0.01)
    assert not answers
    assert server.generate(prompt(5), "x", n=4)["output_ids"] == kit.greedy("oft", prompt(5), 4)
    asking.join(), leaving.join()
    assert answers[0]["output_ids"][:32] == kit.greedy("lora", prompt(5), 32)
    assert server.unload("x")[0] == 200


def test_running_requests_finish_before_their_adapter_goes(server, kit):
    server.load("x", kit.adapter("lora"))
    asking, answers = ask(server, n=200)
    assert server.unload("x", timeout=60)[0] == 200
    asking.join()
    assert answers[0]["output_ids"][:32] == kit.greedy("lora", prompt(5), 32)


def test_beyond_max_loaded_loras_the_least_recently_used_is_unloaded(server, kit):
    """The server's limit is 16."""
    names = [f"t{i}" for i in range(16)]
    for name in names:
        assert server.load(name, kit.adapter("lora_q"), pinned=name == "t1")[0] == 200
    server.generate(prompt(5), "t0", n=1)
    for name, evicted in (("new", "t2"), ("newer", "t3")):  # t0 was used since, t1 is pinned
        names.append(name)
        names.remove(evicted)
        status, reply = server.load(name, kit.adapter("lora_q"))
        assert status == 200 and sorted(reply["loaded_adapters"]) == sorted(names)
        assert server.call("/generate", {"input_ids": prompt(5), "lora_path": evicted})[0] == 404
        assert server.generate(prompt(5), name, n=4)["output_ids"] == kit.greedy("lora_q", prompt(5), 4)
    for name in names:
        assert server.unload(name)[0] == 200


def test_a_storm_of_loads_and_unloads_changes_no_answer(server, kit, loaded):
    """200 operations while six requests at a time generate, of adapters that stay and of those that come and go."""
    stay = loaded("lora", "dora", "ia3", "oft", "vera")
    come_and_go = ["lora_kv", "vera_seed", "dora_near", "oft_o_down", "lora_head"]
    want = {adapter: kit.greedy(adapter, prompt(9), 24) for adapter in [None, *stay, *come_and_go]}
    wrong, asked, over = [], [], threading.Event()

    def ask(tenants):
        for tenant in itertools.cycle(tenants):
            if over.is_set():
                return
            answer = server.generate(prompt(9), tenant, n=24)["output_ids"]
            asked.append(tenant)
            if answer != want[tenant]:
                wrong.append((tenant, answer))

    def change(name):
        for adapter in itertools.islice(itertools.cycle(come_and_go), 25):  # a load, an answer, an unload
            assert server.load(name, kit.adapter(adapter))[0] == 200
            if server.generate(prompt(9), name, n=24)["output_ids"] != want[adapter]:
                wrong.append((name, adapter))
            assert server.unload(name)[0] == 200

    with ThreadPoolExecutor(8) as threads:
        asking = [threads.submit(ask, [None, *stay][i:] + [None, *stay][:i]) for i in (0, 3)]
        changing = [threads.submit(change, f"guest{i}") for i in range(4)]
        for change_done in changing:
            change_done.result()
        over.set()
        for done in asking:
            done.result()
    assert not wrong
    assert len(asked) > 20 and set(asked) == {None, *stay}
    server.generate(prompt(9), None, n=1)
    assert server.state()["tenants"].keys() == set(stay)


def test_memory_does_not_grow_with_loads(server, kit):
    """Adapters of over a megabyte, once the allocators have seen such."""

    def cycle(times):
        for _ in range(times):
            assert server.load("x", kit.adapter("lora_r500"))[0] == 200
            server.generate(prompt(5), "x", n=1)
            assert server.unload("x")[0] == 200
        parent = psutil.Process(server.process.pid)
        return sum(process.memory_info().rss for process in [parent, *parent.children(recursive=True)])

    before = cycle(15)
    size = 30 * (1 << 20)
    assert cycle(30) - before < size / 2


def test_the_base_may_change_under_adapters_that_do_not_depend_on_it(server, kit, loaded):
    loaded("lora_q", "vera_r16")
    assert server.call("/update_weights_from_disk", {"model_path": kit.base()})[0] == 200
    assert server.generate(prompt(5), "lora_q", n=4)["output_ids"] == kit.greedy("lora_q", prompt(5), 4)
