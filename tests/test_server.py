"""SGLang's own server on the CPU, over HTTP: what it answers is what PEFT computes."""

from __future__ import annotations

import make_adapters
import pytest
from servers import TOLERANCE, prompt

METHODS = ["lora", "dora", "ia3", "vera", "oft"]
TWELVE = [*METHODS, "lora_q", "lora_r1", "lora_r200", "ia3_no_ff", "oft_o_down", "lora_head", "vera_seed"]


def test_five_methods_in_one_batch_equal_peft(server, kit, loaded):
    tenants = [None, *loaded(*METHODS)]
    answers = server.logprobs([prompt(i) for i in range(len(tenants))], tenants)
    for tenant, served in zip(tenants, answers):
        assert kit.error(tenant, served) <= TOLERANCE, tenant
        assert tenant is None or kit.effect(tenant, served) > 0.05
    state = server.state()
    assert state["max_tenants_in_forward"] >= 5 and state["max_methods_in_forward"] >= 5
    assert {state["tenants"][name]["method"] for name in METHODS} == {"LORA", "DORA", "IA3", "VERA", "OFT"}


@pytest.mark.parametrize("adapter", sorted(make_adapters.ADAPTERS))
def test_every_adapter_equals_peft(server, kit, loaded, adapter):
    loaded(adapter)
    mine, base = server.logprobs([prompt(1), prompt(1)], [adapter, None], n=4)
    assert kit.error(adapter, mine) <= TOLERANCE
    assert kit.error(None, base) <= TOLERANCE
    least = 2e-3 if adapter.endswith("_near") else 0.05
    assert kit.effect(adapter, mine) > least or adapter in make_adapters.WITHOUT_EFFECT


def test_decoding_equals_peft_greedy_for_32_tokens(server, kit, loaded):
    tenants = loaded(*TWELVE)
    answers = server.generate([prompt(7)] * len(tenants), tenants, n=32)
    for tenant, answer in zip(tenants, answers):
        assert answer["output_ids"] == kit.greedy(tenant, prompt(7), 32), tenant


def test_36_rows_of_12_tenants_on_8_slots_equal_single_runs(server, kit, loaded):
    loaded(*TWELVE)
    tenants = ([*TWELVE, None] * 3)[:36]
    prompts = [prompt(i) for i in range(36)]
    together = server.logprobs(prompts, tenants, n=8)
    for ids, tenant, served in zip(prompts, tenants, together):
        assert kit.error(tenant, served) <= TOLERANCE, tenant
        alone, _ = server.logprobs(ids, tenant, n=8)
        assert served[0] == alone, tenant
    assert server.state()["pool"]["resident"] <= 8 < len(TWELVE)


def test_an_embedding_and_a_head_in_a_mixed_prefill(server, kit, loaded):
    """Prompts of several lengths: the head sees one row of some and many of others."""
    tenants = [None, *loaded("lora_head", "lora_embed", "oft_head", "dora_embed_head"), None]
    prompts = [prompt(i, 5 + 9 * i) for i in range(len(tenants))]
    for tenant, served in zip(tenants, server.logprobs(prompts, tenants, n=2)):
        assert kit.error(tenant, served) <= TOLERANCE, tenant
    for tenant, ids, answer in zip(tenants, prompts, server.generate(prompts, tenants, n=2)):
        assert answer["output_ids"] == kit.greedy(tenant, ids, 2), tenant


def test_chunked_prefill(server, kit, loaded):
    """The server cuts prompts into chunks of 64 tokens."""
    tenants = loaded("lora_head", *METHODS)
    prompts = [prompt(i, 70 + 40 * i) for i in range(len(tenants))]
    for tenant, served in zip(tenants, server.logprobs(prompts, tenants, n=2)):
        assert kit.error(tenant, served) <= TOLERANCE, tenant


def test_prefix_cache_is_shared_within_a_tenant_only(server, kit, loaded):
    tenants = [None, *loaded("lora_v", "lora_head", "dora")]  # the head alone changes no KV, but who could know
    ids = prompt(11, 40)
    for hits in (False, True):
        for tenant in tenants:
            answer = server.generate(ids, tenant, n=2)
            assert (answer["meta_info"]["cached_tokens"] > 0) is hits, tenant
            assert answer["output_ids"] == kit.greedy(tenant, ids, 2)


def test_a_reloaded_name_does_not_reuse_the_old_prefixes(server, kit):
    ids = prompt(12, 40)
    for adapter in ("lora", "dora", "lora"):
        assert server.load("x", kit.adapter(adapter))[0] == 200
        answer = server.generate(ids, "x", n=4)
        assert answer["output_ids"] == kit.greedy(adapter, ids, 4) and answer["meta_info"]["cached_tokens"] == 0
        assert server.unload("x")[0] == 200


def test_a_grammar_without_a_gpu_is_refused(server, loaded):
    """SGLang's xgrammar would look for a driver and end the scheduler."""
    for tenant in (None, *loaded("lora")):
        body = {"text": "w5 w6", "lora_path": tenant, "sampling_params": {"max_new_tokens": 2, "regex": "w[0-9]+"}}
        status, reply = server.call("/generate", body)
        assert status == 400 and "Grammar-based generation" in str(reply), reply
    assert server.generate(prompt(3), "lora", n=2)["output_ids"]
