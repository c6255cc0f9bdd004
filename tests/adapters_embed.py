"""Adapters that change norms or rows of the vocabulary, alone and beside a method's own tensors. PEFT writes them.

``EMBED``: name -> writer(base folder, adapter folder), for ADAPTERS in make_adapters.py. ``UNTIED``: more of them, for
untied bases. ``WITH_NORMS``: other methods with modules_to_save. Not a test module.
"""

from __future__ import annotations

import peft
from adapters_folded import ALL, Writer, writer

TOKENS = [*range(126, 2, -3), 127]  # in no order of theirs
NORMS = ["input_layernorm", "post_attention_layernorm", "norm"]


def _tokens(**fields) -> Writer:
    return writer(peft.TrainableTokensConfig, **{"token_indices": TOKENS} | fields)


def _lora(**fields) -> Writer:
    return writer(peft.LoraConfig, **{"r": 4, "lora_alpha": 6, "target_modules": ALL} | fields)


EMBED: dict[str, Writer] = {
    "ln_tuning": writer(peft.LNTuningConfig, target_modules=NORMS),
    "ln_tuning_near": writer(peft.LNTuningConfig, near=True, target_modules=NORMS),
    "ln_tuning_default": writer(peft.LNTuningConfig),
    "ln_tuning_last": writer(peft.LNTuningConfig, target_modules=["norm"]),
    "ln_tuning_one": writer(peft.LNTuningConfig, target_modules=r"model\.layers\.1\.input_layernorm"),
    "ln_tuning_saves": writer(
        peft.LNTuningConfig, target_modules=["input_layernorm"], modules_to_save=["layers.0.post_attention_layernorm"]
    ),
    "trainable_tokens": _tokens(),
    "trainable_tokens_near": writer(peft.TrainableTokensConfig, near=True, token_indices=TOKENS),
    "trainable_tokens_head": _tokens(target_modules=["lm_head"], token_indices=TOKENS[:7]),
    "lora_tokens": _lora(trainable_token_indices=TOKENS),
    "lora_tokens_head": _lora(trainable_token_indices={"lm_head": TOKENS[::2], "embed_tokens": TOKENS[:5]}),
    "lora_tokens_both": _lora(
        trainable_token_indices={"embed_tokens": TOKENS, "lm_head": TOKENS}, target_modules=["v_proj"]
    ),
    "dora_tokens": _lora(use_dora=True, trainable_token_indices={"embed_tokens": TOKENS}, target_modules=["q_proj"]),
}

# PEFT cannot run these where embedding and output head are tied.
UNTIED: dict[str, Writer] = {
    "trainable_tokens_both": _tokens(target_modules=["embed_tokens", "lm_head"]),
}

WITH_NORMS: dict[str, Writer] = {
    "lora_saves_norm": _lora(modules_to_save=["input_layernorm"]),
    "lora_saves_norms": _lora(modules_to_save=["norm"], target_modules=[*ALL, "lm_head"]),  # PEFT matches plain ends
    "dora_saves_norms": _lora(use_dora=True, modules_to_save=["input_layernorm", "model.norm"], target_modules=[
        "q_proj", "up_proj", "lm_head"]),
    "ia3_saves_norms": writer(
        peft.IA3Config, target_modules=ALL, feedforward_modules=["q_proj", "gate_proj", "down_proj"],
        modules_to_save=NORMS,
    ),
    "oft_saves_norms": writer(peft.OFTConfig, target_modules=ALL, oft_block_size=16, modules_to_save=NORMS),
    "oft_share_saves_norms": writer(
        peft.OFTConfig, target_modules=["k_proj", "up_proj"], oft_block_size=8, block_share=True, modules_to_save=NORMS
    ),
    "hra_saves_norms": writer(peft.HRAConfig, r=5, target_modules=["v_proj", "gate_proj"], modules_to_save=NORMS),
    "lora_tokens_saves_norms": _lora(trainable_token_indices=TOKENS, modules_to_save=NORMS),
    "vera_saves_norms": writer(peft.VeraConfig, r=8, target_modules=["o_proj", "down_proj"], modules_to_save=NORMS),
}  # fmt: skip

# Shared matrices behind a norm of the adapter's own.
REFUSED_NORMS: dict[str, Writer] = {
    "vera_q_saves_norms": writer(peft.VeraConfig, r=8, target_modules=["q_proj"], modules_to_save=NORMS),
}
