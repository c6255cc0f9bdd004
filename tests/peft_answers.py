"""PEFT's own answers, on the CPU: what every served log-probability is held against. Not a test module.

    peft_logprobs(base, adapter, [1, 2, 3])       # (3, vocabulary) float32; adapter None is the base
    peft_greedy(base, adapter, [1, 2, 3], n=8)    # 8 token ids
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import peft.tuners.boft.layer as boft_layer
import peft.tuners.lora.layer as lora_layer
import torch
import transformers
from peft import PeftModel, PeftType
from peft.tuners.lora.variants import QALoraLinearVariant, get_alora_offsets_for_generate
from torch import Tensor

transformers.utils.logging.disable_progress_bar()


class BlockDiagonal:
    """What BOFT's CUDA extension computes, which PEFT would try to build: (n, k, b, b) -> (n, k b, k b)."""

    @staticmethod
    def forward(blocks: Tensor) -> tuple[Tensor]:
        return (torch.stack([torch.block_diag(*stage) for stage in blocks]),)


boft_layer.get_fbd_cuda = lambda: BlockDiagonal


def variant_of(layer, *, config, resolve=lora_layer.Linear.resolve_lora_variant, **kwargs):
    """PEFT builds QALoRA on the layers of a GPTQ base only; here on any, with the code that it has for those."""
    return QALoraLinearVariant() if config.use_qalora else resolve(layer, config=config, **kwargs)


lora_layer.Linear.resolve_lora_variant = variant_of


def load_base(base_dir: str, dtype: torch.dtype = torch.float32):
    return transformers.AutoModelForCausalLM.from_pretrained(base_dir, dtype=dtype, attn_implementation="eager")


def load_peft(base_dir: str, adapter_dir: str | None, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """A fresh base with the adapter loaded from its folder, in eval mode; adapter None is the base itself.

    Some methods take singular vectors out of the base when they load. PEFT computes them in float32, which errs by up
    to 5e-6 of a weight of 0.1 where singular values lie close; here they are as exact as float64 makes them.
    """
    model = load_base(base_dir, dtype)
    if adapter_dir is None:
        return model.eval()
    with mock.patch("torch.linalg.svd", _svd):
        model = PeftModel.from_pretrained(model, adapter_dir).eval()
    if model.peft_config["default"].peft_type == PeftType.POLY:  # PEFT wants the task in every call
        config = json.loads((Path(adapter_dir) / "adapter_config.json").read_text())
        model.base_model._register_pre_hooks(torch.tensor([config.get("task_id", 0)]))
    return model


def _svd(matrix: Tensor, full_matrices: bool = True, svd=torch.linalg.svd) -> tuple[Tensor, ...]:
    return tuple(factor.to(matrix.dtype) for factor in svd(matrix.double(), full_matrices=full_matrices))


@torch.inference_mode()
def peft_logprobs(base_dir: str, adapter_dir: str | None, token_ids: list[int], prompt: int | None = None) -> Tensor:
    """Log-probabilities after every token: (len, vocabulary), float32.

    The first ``prompt`` tokens are a prompt and the rest its continuation: PEFT's generate looks for an aLoRA's
    invocation in the former alone. None: all are prompt.
    """
    model = _cached(str(base_dir), adapter_dir and str(adapter_dir), _stamp(adapter_dir))
    ids, offsets = torch.tensor([token_ids]), {}
    if prompt is not None and isinstance(model, PeftModel):
        (found,) = get_alora_offsets_for_generate(model, input_ids=ids[:, :prompt]).get("alora_offsets", [None])
        offsets = {} if found is None else {"alora_offsets": [found + len(token_ids) - prompt]}
    logits = model(input_ids=ids, **offsets).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)


def peft_greedy(base_dir: str, adapter_dir: str | None, prompt_ids: list[int], n: int) -> list[int]:
    """The next n tokens of greedy decoding; end-of-sequence does not stop it."""
    ids = list(prompt_ids)
    for _ in range(n):
        ids.append(int(peft_logprobs(base_dir, adapter_dir, ids, len(prompt_ids))[-1].argmax()))
    return ids[len(prompt_ids) :]


@torch.inference_mode()
def peft_generate(base_dir: str, adapter_dir: str, prompt_ids: list[int], n: int) -> list[int]:
    """The same by PEFT's own generate, with its cache of keys and values."""
    model = _cached(str(base_dir), str(adapter_dir), _stamp(adapter_dir))
    ids, nothing = torch.tensor([prompt_ids]), model.config.vocab_size  # a token that ends a sequence, and never comes
    greedy = transformers.GenerationConfig(max_new_tokens=n, do_sample=False, eos_token_id=nothing, pad_token_id=0)
    return model.generate(input_ids=ids, generation_config=greedy)[0, len(prompt_ids) :].tolist()


@functools.lru_cache(maxsize=64)
def _cached(base_dir: str, adapter_dir: str | None, stamp: int) -> torch.nn.Module:
    return load_peft(base_dir, adapter_dir)


def _stamp(adapter_dir: str | None) -> int:
    """Changes when the adapter is written again, so that a cached model is not used for it."""
    return 0 if adapter_dir is None else (Path(adapter_dir) / "adapter_model.safetensors").stat().st_mtime_ns
