"""Served in bf16 and fp16: as near PEFT float32 as PEFT itself is in that dtype, also for adapters near the identity.

Trained vectors lie there: DoRA's s - 1 and (IA)3's l - 1 of 0.2% rms, OFT's rotations by 0.003. A 16-bit number near
1 cannot hold them; s - 1 can. What 16 bits do to the base's own activations hides so small an effect in any single
log-probability, but not in the average over many: the served effect is projected on PEFT's.
"""

from __future__ import annotations

import pytest
import torch
from peft_answers import load_peft
from servers import ALL_LOGPROBS, log_table, prompt

import scute_sgl

BASE = "llama_16bit"
NEAR = ["dora_near", "ia3_near", "oft_near", "boft_near", "hra_near", "pissa_near", "deft_near", "road_near", "hira_near"]
NEAR += ["randlora_near"]
FAR = ["lora", "lora_fp16_file", "dora", "ia3", "vera", "oft", "boft", "loha", "lokr_whole", "miss"]
FAR += ["hra", "deft", "peanut", "glora", "pissa", "fourierft", "waveft", "road_4", "shira", "supertuning_supra"]
FAR += ["hira", "glora_lora", "miss_bat", "randlora", "randlora_bias"]
PROMPTS = [prompt(seed, 128) for seed in range(16)]


def ask_an_engine(model_path: str, folders: dict[str, str], dtype: str) -> dict:
    engine = scute_sgl.Engine(
        model_path=model_path, lora_paths=folders, dtype=dtype, scute_arena_mb=16, log_level="warning"
    )
    try:
        served = {}
        for tenant in [None, *folders]:
            greedy = {"temperature": 0, "max_new_tokens": 1}
            replies = engine.generate(input_ids=PROMPTS, sampling_params=greedy, lora_path=tenant, **ALL_LOGPROBS)
            tables = [log_table(ids, reply)[1] for ids, reply in zip(PROMPTS, replies, strict=True)]
            served[tenant] = torch.cat(tables).numpy()  # a tensor's memory would end with the process
        return served
    finally:
        engine.shutdown()


@pytest.fixture(scope="module", params=["bfloat16", "float16"])
def answers(request, kit, elsewhere):
    """(dtype, {tenant: served log-probabilities (prompts * 128, vocabulary)})."""
    folders = {name: kit.adapter(name, BASE) for name in [*NEAR, *FAR]}
    served = elsewhere(ask_an_engine, kit.base(BASE), folders, request.param)
    return getattr(torch, request.param), {tenant: torch.from_numpy(table) for tenant, table in served.items()}


@torch.inference_mode()
def peft(kit, tenant: str | None, dtype: torch.dtype) -> torch.Tensor:
    model = load_peft(kit.base(BASE), tenant and kit.adapter(tenant, BASE), dtype)
    return model(input_ids=torch.tensor(PROMPTS)).logits.float().log_softmax(-1).flatten(0, 1)


@pytest.mark.parametrize("tenant", NEAR)
def test_an_adapter_near_the_identity_keeps_its_effect(kit, answers, tenant):
    """As PEFT does: in bf16 it keeps nine tenths of (IA)3's, for a factor of 1.002 moves few numbers of 8 bits."""
    dtype, served = answers
    want = peft(kit, tenant, torch.float32) - peft(kit, None, torch.float32)
    effects = served[tenant] - served[None], peft(kit, tenant, dtype) - peft(kit, None, dtype)
    kept, pefts = (((got * want).sum() / want.square().sum()).item() for got in effects)
    assert abs(kept - pefts) < 0.1 and kept > 0.8, f"{kept:.1%}, PEFT {pefts:.1%} of an effect of {want.std().item():.1e}"


@pytest.mark.parametrize("tenant", [*NEAR, *FAR])
def test_an_adapter_is_as_exact_as_in_peft(kit, answers, tenant):
    dtype, served = answers
    want = peft(kit, tenant, torch.float32)
    own, pefts = ((table - want).abs().mean().item() for table in (served[tenant], peft(kit, tenant, dtype)))
    assert own <= 1.25 * pefts, f"mean error {own:.2e}, PEFT's own {pefts:.2e}"
