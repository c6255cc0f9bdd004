"""LoRA on a base less a part of its weight (PiSSA, OLoRA, KaSA): what is refused, and loads that would stall a server."""

import pytest
import torch
from small_files import EMBED, PATH, key, lora_config, lora_tensors, read, refused, weighted

from scute_sgl import linalg, resolve
from scute_sgl.errors import AdapterError
from scute_sgl.fold import fold_adapter


@pytest.mark.parametrize("fields, code, fragments", [
    ({"init_lora_weights": "pissa_niter_4"}, "bad_config", ["init_lora_weights", "pissa_niter_4", "convert"]),
    ({"init_lora_weights": "pissa", "kasa_config": {"beta": 1}}, "bad_config", ["init_lora_weights", "pissa"]),
    ({"use_dora": True, "kasa_config": {"beta": 1}}, "bad_config", ["kasa_config", "use_dora"]),
    ({"lora_bias": True, "kasa_config": {"beta": 1}}, "bad_config", ["kasa_config", "lora_bias"]),
    ({"kasa_config": True}, "bad_config", ["kasa_config", "found True"]),
    ({"init_lora_weights": ["pissa"]}, "bad_config", ["init_lora_weights", "found ['pissa']"]),
    ({"kasa_config": {"beta": 1}}, "missing_tensor", [PATH, "lora_diag"]),
])  # fmt: skip
def test_lora_on_less_of_the_base(fields, code, fragments):
    with refused(code, *fragments):
        read(lora_config(**fields), lora_tensors())


def test_lora_on_less_of_an_embedding():
    embedding = {key("lora_embedding_A", EMBED): torch.ones(4, 32), key("lora_embedding_B", EMBED): torch.ones(16, 4)}
    with refused("unsupported_method", EMBED, "pissa of an embedding"):
        read(lora_config(init_lora_weights="pissa", target_modules=["embed_tokens"]), embedding)


def test_lora_diag_without_kasa():
    with refused("unknown_key", PATH, "lora_diag"):
        read(lora_config(), lora_tensors() | {key("lora_diag"): torch.ones(4)})


def test_a_load_that_would_stall_the_server_is_given_up(monkeypatch):
    adapter = read(lora_config(init_lora_weights="pissa"), lora_tensors())
    monkeypatch.setattr(resolve, "MAX_SECONDS", -1)
    with refused("too_large", PATH, "terms of the base weight", "target fewer modules"):
        fold_adapter(adapter, weighted(torch.eye(8, 16)))


def test_singular_vectors_of_a_huge_weight_are_refused(monkeypatch):
    """They would stall the server."""
    adapter = read(lora_config(init_lora_weights="pissa"), lora_tensors())
    fold_adapter(adapter, weighted(torch.eye(8, 16)))
    monkeypatch.setattr(linalg, "MAX_SIDE", 7)
    with pytest.raises(AdapterError, match=r"too_large.*\(8, 16\).*up to 7"):
        fold_adapter(adapter, weighted(torch.eye(8, 16)))
