"""SGLang's own server on the CPU, over HTTP: exactness, names, loads and unloads."""

from __future__ import annotations

import threading
import time

import make_adapters
import pytest
from servers import prompt

METHODS = ["lora", "dora", "ia3", "vera", "oft"]
TOLERANCE = 1e-5


def error_of(kit, adapter, served) -> float:
    """Largest difference of served log-probabilities, over prompt and generated tokens, from PEFT's."""
    ids, table = served
    assert not table.isnan().any()
    return (table - kit.logprobs(adapter, ids)).abs().max().item()


def effect_of(kit, adapter, served) -> float:
    return (kit.logprobs(adapter, served[0]) - kit.logprobs(None, served[0])).abs().max().item()


# Exactness


def test_five_methods_in_one_batch_equal_peft(server, kit, loaded):
    tenants = [None, *loaded(*METHODS)]
    answers = server.logprobs([prompt(i) for i in range(len(tenants))], tenants)
    for tenant, served in zip(tenants, answers):
        assert error_of(kit, tenant, served) <= TOLERANCE, tenant
        assert tenant is None or effect_of(kit, tenant, served) > 0.05
    state = server.state()
    assert state["max_tenants_in_forward"] >= 5 and state["max_methods_in_forward"] >= 5
    assert {state["tenants"][name]["method"] for name in METHODS} == {"LORA", "DORA", "IA3", "VERA", "OFT"}


@pytest.mark.parametrize("adapter", sorted(make_adapters.ADAPTERS))
def test_every_adapter_equals_peft(server, kit, loaded, adapter):
    loaded(adapter)
    mine, base = server.logprobs([prompt(1), prompt(1)], [adapter, None], n=4)
    assert error_of(kit, adapter, mine) <= TOLERANCE
    assert error_of(kit, None, base) <= TOLERANCE


def test_decoding_equals_peft_greedy_for_32_tokens(server, kit, loaded):
    tenants = loaded(*METHODS)
    answers = server.generate([prompt(7)] * len(tenants), tenants, n=32)
    for tenant, answer in zip(tenants, answers):
        assert answer["output_ids"] == kit.greedy(tenant, prompt(7), 32), tenant


def test_more_tenants_than_slots_equal_single_runs(server, kit, loaded):
    names = loaded(*METHODS, "lora_q", "lora_r1", "dora_near", "ia3_no_ff", "oft_o_down", "lora_head", "vera_seed")
    tenants = ([*names, None] * 3)[:36]
    prompts = [prompt(i) for i in range(36)]
    together = server.generate(prompts, tenants, n=8)
    alone = [server.generate(ids, tenant, n=8) for ids, tenant in zip(prompts, tenants)]
    assert [a["output_ids"] for a in together] == [a["output_ids"] for a in alone]
    assert server.state()["pool"]["resident"] <= 8


def test_chunked_prefill(server, kit, loaded):
    tenants = loaded("lora_head", "oft")
    answers = server.logprobs([prompt(3, 150), prompt(4, 70)], tenants, n=2)
    for tenant, served in zip(tenants, answers):
        assert error_of(kit, tenant, served) <= TOLERANCE


def test_prefix_cache_is_shared_within_a_tenant_only(server, kit, loaded):
    loaded("lora_v", "dora")
    ids = prompt(11, 40)
    cached = {}
    for adapter in ("lora_v", None, "dora", "lora_v"):
        answer = server.generate(ids, adapter, n=2)
        cached.setdefault(adapter, []).append(answer["meta_info"]["cached_tokens"])
        assert answer["output_ids"] == kit.greedy(adapter, ids, 2)
    assert cached[None] == [0] and cached["dora"] == [0]
    assert cached["lora_v"][0] == 0 and cached["lora_v"][1] > 0


def test_a_reloaded_name_does_not_reuse_the_old_prefixes(server, kit):
    ids = prompt(12, 40)
    for adapter in ("lora", "dora"):
        assert server.load("x", kit.adapter(adapter))[0] == 200
        answer = server.generate(ids, "x", n=4)
        assert answer["output_ids"] == kit.greedy(adapter, ids, 4) and answer["meta_info"]["cached_tokens"] == 0
        assert server.unload("x")[0] == 200


# Names


@pytest.mark.parametrize("name", ["lora", "tiny:lora", "default:lora"])
def test_names_of_a_tenant(server, kit, loaded, name):
    loaded("lora")
    want = kit.greedy("lora", prompt(5), 4)
    assert server.generate(prompt(5), name, n=4)["output_ids"] == want
    check_completions(server, name, want)


@pytest.mark.parametrize("name", ["tiny", "", "default"])
def test_names_of_the_base(server, kit, loaded, name):
    loaded("lora")
    want = kit.greedy(None, prompt(5), 4)
    assert server.generate(prompt(5), name, n=4)["output_ids"] == want
    check_completions(server, name, want)


@pytest.mark.parametrize("name", ["nobody", "tiny:nobody", "tiny:", "junk:lora", "a/../../b", "lora:lora"])
def test_other_names_are_not_found(server, loaded, name):
    loaded("lora")
    assert server.call("/generate", {"input_ids": prompt(5), "lora_path": name})[0] == 404
    assert server.call("/generate", {"input_ids": prompt(5), "lora_path": name, "stream": True})[0] == 404
    assert server.call("/generate", {"input_ids": [prompt(5)] * 2, "lora_path": ["lora", name]})[0] == 404
    other = [
        ("/v1/score", {"query": prompt(5), "items": [[5]], "label_token_ids": [7]}),
        ("/v1/embeddings", {"input": "w5"}),
        ("/v1/rerank", {"query": "w5", "documents": ["w6"]}),
        ("/api/chat", {"messages": [{"role": "user", "content": "w5"}]}),
        ("/api/generate", {"prompt": "w5"}),
    ]
    for path, body in [*completions(name, prompt(5), 4), *((p, b | {"model": name}) for p, b in other)]:
        status, reply = server.call(path, body)
        assert status == 404 and "refused [not_found]" in str(reply), path


def check_completions(server, model: str, want: list[int]) -> None:
    for path, body in completions(model, prompt(5), len(want)):
        if model or path != "/v1/messages":  # SGLang asks for a name there
            words = reply_text(server.ok(path, body)).split()
            # Responses keeps back some of its tokens.
            assert words and words == [f"w{i}" for i in want][: len(words)], path


def completions(model: str, ids: list[int], n: int) -> list[tuple[str, dict]]:
    """The endpoints that complete a prompt, greedily."""
    text = " ".join(f"w{i}" for i in ids)
    messages = [{"role": "user", "content": text}]
    return [
        ("/v1/completions", {"model": model, "prompt": ids, "max_tokens": n, "temperature": 0}),
        ("/v1/chat/completions", {"model": model, "messages": messages, "max_tokens": n, "temperature": 0}),
        ("/v1/messages", {"model": model, "messages": messages, "max_tokens": n, "temperature": 0}),
        ("/v1/responses", {"model": model, "input": text, "max_output_tokens": n, "temperature": 0}),
    ]


def reply_text(reply: dict) -> str:
    if "choices" in reply:
        choice = reply["choices"][0]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
    else:
        content = reply["content"] if "content" in reply else reply["output"][0]["content"]
        text = content[0]["text"]
    return text.strip()


def test_lists_of_adapters(server, kit, loaded):
    loaded("lora", "oft")
    answers = server.generate([prompt(5)] * 3, ["lora", None, "oft"], n=4)
    assert [a["output_ids"] for a in answers] == [kit.greedy(a, prompt(5), 4) for a in ("lora", None, "oft")]
    for paths in (["lora"], ["lora"] * 4, []):
        assert server.call("/generate", {"input_ids": [prompt(5)] * 3, "lora_path": paths})[0] == 400
    assert server.call("/generate", {"input_ids": prompt(5), "lora_path": ["lora"]})[0] == 400


def test_model_and_lora_path_may_not_contradict(server, loaded):
    loaded("lora", "oft")
    body = {"model": "lora", "prompt": prompt(5), "max_tokens": 2}
    assert server.call("/v1/completions", body | {"lora_path": "lora"})[0] == 200
    assert server.call("/v1/completions", body | {"lora_path": "oft"})[0] == 400


def test_an_id_in_the_body_chooses_nothing(server, kit, loaded):
    loaded("lora")
    assert server.generate(prompt(5), None, n=4, lora_id="0" * 32)["output_ids"] == kit.greedy(None, prompt(5), 4)


# Loads and unloads


def test_refused_loads_have_their_status_and_change_nothing(server, kit, loaded, tmp_path):
    loaded("lora")
    before = server.generate(prompt(5), "lora", n=4)["output_ids"]
    (tmp_path / "empty").mkdir()
    for name, folder, status, code in (
        ("lora", kit.adapter("lora"), 409, "in_use"),
        ("new", str(tmp_path / "nowhere"), 404, "not_found"),
        ("new", "org/repo", 404, "not_found"),
        ("new", str(tmp_path / "empty"), 404, "not_found"),
        ("new", kit.adapter("lora", base="mistral"), 400, "bad_shape"),
        ("default", kit.adapter("lora"), 400, "bad_config"),
        ("tiny:new", kit.adapter("lora"), 400, "bad_config"),
    ):
        found, reply = server.load(name, folder)
        assert found == status and f"adapter '{name}' refused [{code}]" in reply["error_message"], reply
        assert list(reply["loaded_adapters"]) == ["lora"]
    assert server.unload("new")[0] == 404
    assert server.generate(prompt(5), "lora", n=4)["output_ids"] == before


def test_a_changed_base_is_refused_while_a_fold_depends_on_it(server, kit, loaded):
    loaded("lora", "dora")
    status, reply = server.call("/update_weights_from_disk", {"model_path": kit.base()})
    assert status == 400 and "adapter 'dora' refused [in_use]" in reply["message"]
    server.unload("dora")
    assert server.call("/update_weights_from_disk", {"model_path": kit.base()})[0] == 200
    assert server.generate(prompt(5), "lora", n=4)["output_ids"] == kit.greedy("lora", prompt(5), 4)


def test_unload_is_final(server, kit):
    server.load("x", kit.adapter("lora"))
    assert server.generate(prompt(5), "x", n=2)
    assert server.unload("x")[0] == 200
    assert server.call("/generate", {"input_ids": prompt(5), "lora_path": "x"})[0] == 404
    assert "x" not in [card["id"] for card in server.ok("/v1/models")["data"]]
    assert "x" not in server.state()["tenants"]


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


def test_a_name_is_free_while_its_old_adapter_finishes(server, kit):
    server.load("x", kit.adapter("lora"))
    answers = []
    asking = threading.Thread(target=lambda: answers.append(server.generate(prompt(5), "x", n=400)))
    asking.start()
    while server.state()["pool"]["resident"] == 0:
        time.sleep(0.01)
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
    answers = []
    asking = threading.Thread(target=lambda: answers.append(server.generate(prompt(5), "x", n=200)))
    asking.start()
    while server.state()["pool"]["resident"] == 0:
        time.sleep(0.01)
    assert server.unload("x", timeout=60)[0] == 200
    asking.join()
    assert answers[0]["output_ids"][:32] == kit.greedy("lora", prompt(5), 32)
