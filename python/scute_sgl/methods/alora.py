"""Activated LoRA (aLoRA), a LoRA with alora_invocation_tokens, which is off until a prompt invokes it.

    F(x) = (x W) + b + (x A^T) B^T   from the first token of the last occurrence of the tokens in the prompt on
    F(x) = (x W) + b0                before it, and everywhere if the prompt lacks them

What is generated is not searched: it continues what the prompt began. lora_bias is a part of the term. PEFT combines
no other kind of LoRA with it, knows it on linear layers only, and finds the tokens for causal language models only.

Checked against ALoraLinearVariant and get_alora_offsets_for_generate in peft/tuners/lora/variants.py of PEFT 0.21.2.
"""

from __future__ import annotations

import dataclasses
import math

from scute_sgl.errors import AdapterError
from scute_sgl.slots import Adapter, BaseShape

FIELD = "alora_invocation_tokens"
MOST_TOKENS = 1024  # every prompt is searched for them


def invocation(config: dict, base: BaseShape | None) -> tuple[int, ...]:
    """The invocation tokens of a LoRA's config, () without any. AdapterError if they cannot be found in a prompt."""
    found = config.get(FIELD)
    if found is None:
        return ()
    end = math.inf if base is None else base.vocab_size
    good = isinstance(found, list) and 1 <= len(found) <= MOST_TOKENS
    if not good or not all(type(token) is int and 0 <= token < end for token in found):
        below = "" if base is None else f" below {end}, the base's vocabulary"
        hint = f"found {found!r:.80}, want a list of 1 to {MOST_TOKENS} token ids{below}"
        raise AdapterError("bad_config", hint, key=FIELD)
    if (task := config.get("task_type")) != "CAUSAL_LM":
        raise AdapterError("bad_config", f"found {task!r:.80} beside {FIELD}, want CAUSAL_LM", key="task_type")
    if config.get("init_lora_weights") == "mica":
        hint = f"found mica beside {FIELD}; PEFT defines no such layer"
        raise AdapterError("bad_config", hint, key="init_lora_weights")
    return tuple(found)


def activated(adapter: Adapter, tokens: tuple[int, ...]) -> Adapter:
    """The adapter, to be applied from these tokens on. AdapterError if it changes the rows before them too."""
    for path, slots in adapter.modules.items():
        if slots.base_bias is not None:
            hint = f"found beside {FIELD}, want none: a bias of the base is another before the invocation too"
            raise AdapterError("bad_config", hint, module=path, key="bias")
        if slots.tokens is not None:
            hint = f"found beside {FIELD}, want none: own rows of the vocabulary hold before the invocation too"
            raise AdapterError("bad_config", hint, module=path, key="trainable_token_indices")
    for path in adapter.norms:
        hint = f"found beside {FIELD}, want none: a norm of its own holds before the invocation too"
        raise AdapterError("bad_config", hint, module=path, key="modules_to_save")
    return dataclasses.replace(adapter, invocation=tokens)
