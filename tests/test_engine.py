"""scute_sgl.Engine, in this process, on bases of other shapes; with SGLANG_PLUGINS=scute, as an operator may set it."""

from __future__ import annotations

import pytest
from servers import ALL_LOGPROBS, log_table, prompt

import scute_sgl

TOLERANCE = 1e-5
GREEDY = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
ADAPTERS = {
    "qwen2": ["lora", "dora_bias_all", "ia3_no_ff", "lora_embed_head", "vera_all", "oft_bias_only"],
    "llama_tied": ["lora_embed", "lora_head", "dora_embed_head", "oft_head"],
    "mistral": ["dora", "ia3", "vera", "oft_exact"],
}


@pytest.mark.parametrize("base", sorted(ADAPTERS))
def test_a_mixed_batch_on_another_base_equals_peft(kit, base, monkeypatch):
    monkeypatch.setenv("SGLANG_PLUGINS", "scute")
    monkeypatch.setenv("SGLANG_ENABLE_LOGPROB_CHUNK", "1")
    monkeypatch.setenv("SGLANG_LOGPROB_CHUNK_SIZE", "32")  # the output head is called several times a pass
    names = ADAPTERS[base]
    at_start, later = names[:2], names[2:]
    engine = scute_sgl.Engine(
        model_path=kit.base(base),
        lora_paths={name: kit.adapter(name, base) for name in at_start},
        dtype="float32",
        scute_arena_mb=16,
        log_level="warning",
    )
    try:
        for name in later:
            loaded = engine.load_lora_adapter(name, kit.adapter(name, base))
            assert loaded.success, loaded.error_message
        tenants = [None, *names]
        prompts = [prompt(i) for i in range(len(tenants))]
        answers = engine.generate(input_ids=prompts, sampling_params=GREEDY, lora_path=tenants, **ALL_LOGPROBS)
        for tenant, ids, answer in zip(tenants, prompts, answers):
            tokens, table = log_table(ids, answer)
            assert (table - kit.logprobs(tenant, tokens, base)).abs().max() <= TOLERANCE, tenant
        state = engine.get_server_info()["internal_states"][0]["scute"]
        assert state["max_tenants_in_forward"] == len(names)
        assert state["pool"]["arena_bytes"] == 16 << 20
        with pytest.raises(ValueError, match=r"adapter 'nobody' refused \[not_found\]"):
            engine.generate(input_ids=prompts[0], sampling_params=GREEDY, lora_path="nobody")
        assert engine.unload_lora_adapter(names[0]).success
        refused = engine.load_lora_adapter(names[1], kit.adapter(names[1], base))
        assert not refused.success and "refused [in_use]" in refused.error_message
    finally:
        engine.shutdown()
