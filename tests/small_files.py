"""A base of five modules and the smallest configs and tensors of each method on it, for tests of refusals."""

import re

import pytest
import torch

from scute_sgl.errors import AdapterError
from scute_sgl.methods import METHODS
from scute_sgl.slots import BaseShape, Target

PATH, HEAD, EMBED = "model.layers.0.mlp.up_proj", "lm_head", "model.embed_tokens"
BASE = BaseShape(
    {EMBED: (32, 16), PATH: (16, 8), "model.layers.1.mlp.up_proj": (16, 8), "model.layers.0.mlp.down_proj": (8, 16),
     HEAD: (16, 32)}, dtype=torch.float32, vocab_size=32)  # fmt: skip

BAD_JSON = [
    b"", b"[]", b"3", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a":1,"a":2}', b'{"a":' + b"9" * 5000 + b"}",
]  # fmt: skip


def key(name, path=PATH):
    return f"base_model.model.{path}.{name}"


def refused(code, *fragments):
    """The block raises AdapterError ``code`` whose text has every fragment."""
    pattern = "".join(rf"(?=[\s\S]*{re.escape(str(fragment))})" for fragment in fragments)
    return pytest.raises(AdapterError, match=rf"(?=[\s\S]*\[{code}\]){pattern}")


def read(config, tensors, base=BASE):
    return METHODS[config["peft_type"]].read(config, tensors, base)


def lora_config(**fields):
    return {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["up_proj"]} | fields


def lora_tensors(path=PATH, r=4):
    return {key("lora_A.weight", path): torch.ones(r, 16), key("lora_B.weight", path): torch.ones(8, r)}


def ia3_config(**fields):
    config = {"peft_type": "IA3", "target_modules": ["up_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
    return config | fields


def vera_config(**fields):
    return {"peft_type": "VERA", "r": 4, "target_modules": ["up_proj"], "save_projection": True} | fields


def vera_tensors(**changed):
    tensors = {key("vera_lambda_b"): torch.ones(8), key("vera_lambda_d"): torch.ones(4)}
    tensors |= {"base_model.vera_A": torch.ones(4, 16), "base_model.vera_B": torch.ones(8, 4)}
    return {k: v for k, v in (tensors | changed).items() if v is not None}


def oft_config(drop=None, **fields):
    config = {"peft_type": "OFT", "target_modules": ["up_proj"], "use_cayley_neumann": True, "peft_version": "0.21.2"}
    return {k: v for k, v in (config | fields).items() if k != drop and v is not None}


def weighted(W, b0=None):
    """Targets of a base whose only module is PATH, with this weight (out, in) and bias."""
    outputs, inputs = W.shape
    return {PATH: Target(PATH, 0, "column", inputs, outputs, (0, inputs), (0, outputs), lambda: W, lambda: b0)}
