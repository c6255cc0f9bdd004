"""scute_sgl.Engine on bases of other shapes; with SGLANG_PLUGINS=scute, as an operator may set it."""

from __future__ import annotations

import os
import re

import pytest
from servers import ALL_LOGPROBS, TOLERANCE, log_table, prompt

import scute_sgl

GREEDY = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
ADAPTERS = {
    "qwen2": [
        "lora", "dora_bias_all", "ia3_no_ff", "lora_embed_head", "vera_all", "oft_bias_only", "beft", "boft_factors",
        "glora", "adamss", "hra_gs", "ln_tuning", "trainable_tokens", "lora_tokens", "lora_tokens_head",
        "road", "shira_seed", "supertuning_supra", "glora_lora", "hira", "miss_bat_head", "randlora_bias",
    ],
    "llama_tied": [
        "lora_embed", "lora_head", "dora_embed_head", "oft_head", "tinylora_embed_head", "unilora_seed", "dora_tokens",
    ],
    "mistral": [
        "dora", "ia3", "vera", "oft_exact", "unilora", "lokr_both", "ln_tuning", "lora_tokens_saves_norms", "randlora_drawn",
    ],
}  # fmt: skip
PROMPTS = [prompt(i) for i in range(24)]
ENVIRONMENT = {
    "SGLANG_PLUGINS": "scute",
    "SGLANG_ENABLE_LOGPROB_CHUNK": "1",
    "SGLANG_LOGPROB_CHUNK_SIZE": "32",  # the output head is called several times a pass
}


def use_an_engine(model_path: str, folders: dict[str, str]) -> dict:
    """Two adapters loaded at the start, the others later; one mixed batch; what is refused."""
    os.environ.update(ENVIRONMENT)  # of a process that only runs engines
    names = list(folders)
    engine = scute_sgl.Engine(
        model_path=model_path,
        lora_paths={name: folders[name] for name in names[:2]},
        dtype="float32",
        scute_arena_mb=16,
        log_level="warning",
    )
    try:
        loaded = [engine.load_lora_adapter(name, folders[name]) for name in names[2:]]
        batch = {"input_ids": PROMPTS[: len(names) + 1], "lora_path": [None, *names]}
        answers = engine.generate(**batch, sampling_params=GREEDY, **ALL_LOGPROBS)
        state = engine.get_server_info()["internal_states"][0]["scute"]
        try:
            engine.generate(input_ids=PROMPTS[0], sampling_params=GREEDY, lora_path="nobody")
            unknown = ""
        except ValueError as error:
            unknown = str(error)
        unloaded = engine.unload_lora_adapter(names[0])
        again = engine.load_lora_adapter(names[1], folders[names[1]])
    finally:
        engine.shutdown()
    failures = [result.error_message for result in [*loaded, unloaded] if not result.success]
    return {"answers": answers, "state": state, "failures": failures, "unknown": unknown, "again": again.error_message}


@pytest.mark.parametrize("base", sorted(ADAPTERS))
def test_a_mixed_batch_on_another_base_equals_peft(kit, elsewhere, base):
    names = ADAPTERS[base]
    found = elsewhere(use_an_engine, kit.base(base), {name: kit.adapter(name, base) for name in names})
    assert not found["failures"]
    for tenant, ids, answer in zip([None, *names], PROMPTS, found["answers"]):
        served = log_table(ids, answer)
        assert kit.error(tenant, served, base) <= TOLERANCE, tenant
        assert tenant is None or kit.effect(tenant, served, base) > 0.05
    assert found["state"]["max_tenants_in_forward"] == len(names)
    assert found["state"]["pool"]["arena_bytes"] == 16 << 20
    assert re.search(r"adapter 'nobody' refused \[not_found\]", found["unknown"])
    assert "refused [in_use]" in found["again"]
