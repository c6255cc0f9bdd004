"""What stock SGLang 0.5.17 serves wrongly, refuses obscurely or dies of: here it is exact, or refused clearly, and
the server lives on. One test for each row of the table in the project's study of stock SGLang."""

from __future__ import annotations

import time

import pytest
from servers import TOLERANCE, prompt

EXACT = {
    "lora": "exact",
    "lora_layers": "exact",
    "lora_head": "exact alone, wrong beside base rows",
    "lora_rslora": "wrong",
    "lora_alpha_pattern": "wrong",
    "lora_bias_o": "wrong: the bias is dropped",
    "lora_bias_qv": "KeyError at load",
    "lora_rank_pattern": "the first request kills the server",
    "lora_kv": "the first request kills the server",
    "lora_up": "the first request kills the server",
    "lora_q": "KeyError at load",
    "lora_qk": "KeyError at load",
    "lora_saves_norm": "the first request kills the server",
    "dora": "refused",
    "ia3": "refused with the text 'r'",
    "vera": "refused with the text 'lora_alpha'",
    "oft": "refused with the text 'lora_alpha'",
}
REFUSED = {  # what stock does, and our refusal
    "lora_saves_head": ("wrong: ignored", "[bad_config]: modules_to_save: found ['lm_head']"),
    "lily": ("refused with the text 'lora_alpha'", "[unsupported_method]: peft_type: peft_type=LILY: its router averages"),
}


@pytest.fixture(autouse=True)
def the_server_lives_on(server, kit):
    yield
    assert server.generate(prompt(5), None, n=4)["output_ids"] == kit.greedy(None, prompt(5), 4)


@pytest.mark.parametrize("adapter", EXACT, ids=lambda adapter: f"{adapter} ({EXACT[adapter]})")
def test_adapter_is_exact_beside_base_rows(server, kit, loaded, adapter):
    loaded(adapter)
    tenants = [None, adapter, None]
    answers = server.logprobs([prompt(i, 12 + 8 * i) for i in range(3)], tenants, n=4)
    assert all(kit.error(tenant, served) <= TOLERANCE for tenant, served in zip(tenants, answers))
    assert kit.effect(adapter, answers[1]) > 0.05


@pytest.mark.parametrize("adapter", REFUSED, ids=lambda adapter: f"{adapter} ({REFUSED[adapter][0]})")
def test_adapter_is_refused_clearly(server, kit, adapter):
    status, reply = server.load("sql", kit.adapter(adapter))
    assert status == 400 and reply["error_message"].startswith(f"adapter 'sql' refused {REFUSED[adapter][1]}"), reply
    assert server.call("/generate", {"input_ids": prompt(5), "lora_path": "sql"})[0] == 404


@pytest.mark.parametrize(
    ("request_fields", "status"),
    [({"input_ids": prompt(5, 3000)}, 400), ({"sampling_params": {"n": 2, "max_new_tokens": 4}}, 200)],
    ids=["over-long prompt", "n=2"],
)
def test_unload_does_not_hang_nor_does_the_next(server, kit, request_fields, status):
    for name in ("x", "y"):
        assert server.load(name, kit.adapter("lora"))[0] == 200
    body = {"input_ids": prompt(5), "lora_path": "x", "sampling_params": {"max_new_tokens": 4}}
    assert server.call("/generate", body | request_fields)[0] == status
    started = time.monotonic()
    assert server.unload("x")[0] == server.unload("y")[0] == 200
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("model", ["lora", "tiny:lora"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
def test_the_name_that_models_lists_is_not_the_base(server, kit, loaded, path, model):
    """The first word tells them apart; Responses keeps back some of its words."""
    loaded("lora")
    ids = next(ids for ids in map(prompt, range(100)) if kit.greedy("lora", ids, 1) != kit.greedy(None, ids, 1))
    text = " ".join(f"w{i}" for i in ids)
    body = {"/v1/completions": {"prompt": text, "max_tokens": 6}, "/v1/responses": {"input": text, "max_output_tokens": 6}}
    reply = server.ok(path, {"model": model, "temperature": 0, **body[path]})
    answer = reply["choices"][0]["text"] if "choices" in reply else reply["output"][0]["content"][0]["text"]
    assert answer.split()[0] == f"w{kit.greedy('lora', ids, 1)[0]}"
