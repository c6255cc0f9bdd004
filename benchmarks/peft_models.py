"""What the exactness test serves: a random base, and adapters of a chosen effect.

Every adapter is written by PEFT itself. Its trainable parameters depart from the identity by noise times a scale,
and the scale is searched until the adapter moves the log-probabilities by the wanted amount: an adapter that
changes little would hide errors, one that changes everything would hide them as well.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import IA3Config, LoraConfig, OFTConfig, VeraConfig, get_peft_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from scute_sgl.judge import logprobs

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LLAMA_1B = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
}
TINY = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,
}


@dataclass(frozen=True)
class Recipe:
    """One adapter: its method, PEFT's config, and the first scale that the search tries."""

    method: str
    config: object
    scale: float


def recipes() -> dict[str, Recipe]:
    """The nine adapters: all five methods, different ranks, VeRA from two different pairs of shared matrices."""

    def lora(**fields):
        return LoraConfig(target_modules=LINEARS, lora_alpha=2 * fields["r"], **fields)

    def ia3():
        return IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"])

    return {
        "lora_r8": Recipe("LORA", lora(r=8), 0.5),
        "lora_r64": Recipe("LORA", lora(r=64), 0.3),
        "dora_r16": Recipe("DORA", lora(r=16, use_dora=True), 0.3),
        "dora_r32": Recipe("DORA", lora(r=32, use_dora=True), 0.3),
        "ia3_a": Recipe("IA3", ia3(), 0.3),
        "ia3_b": Recipe("IA3", ia3(), 0.3),
        "vera_a": Recipe("VERA", VeraConfig(r=256, target_modules=LINEARS), 0.1),
        "vera_b": Recipe("VERA", VeraConfig(r=256, target_modules=LINEARS, projection_prng_key=1), 0.1),
        "oft": Recipe("OFT", OFTConfig(oft_block_size=32, target_modules=LINEARS), 0.03),
    }


def write_base(folder: Path, config: dict, dtype: torch.dtype, device: str) -> None:
    """A Llama with random weights, saved in the dtype that it will be served in: the reference reads the same bits."""
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**config))
    model.to(dtype).save_pretrained(folder)


def write_adapters(base, folder: Path, effects: tuple[float, float], top: int, device: str) -> dict[str, float]:
    """PEFT's save_pretrained of every recipe, scaled to an effect inside the range; returns the scales.

    The effect is the mean change of the log-probabilities of the ``top`` tokens that are likeliest with the adapter.
    """
    vocabulary = base.config.vocab_size
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(3, vocabulary, (4, 64), generator=generator).to(device)
    tokens = torch.arange(vocabulary, device=device).expand(4, 32, vocabulary)
    bare = logprobs(base, ids, tokens, rows=1)
    scales = {}
    for name, recipe in recipes().items():
        model = get_peft_model(base, recipe.config).eval()
        start, seed = parameters(model), zlib.crc32(name.encode())

        def effect_of(scale: float) -> float:
            depart(start, scale, seed)  # noqa: B023 - called within this turn of the loop
            adapted, likeliest = logprobs(model, ids, tokens, rows=1).topk(top)  # noqa: B023
            return (adapted - bare.gather(-1, likeliest)).abs().mean().item()

        scales[name] = search_scale(effect_of, recipe.scale, *effects)
        model.save_pretrained(folder / name)
        model.unload()
    return scales


def search_scale(effect_of, scale: float, low: float, high: float) -> float:
    """A scale whose effect lies well between ``low`` and ``high``. The effect grows with the scale."""
    aim, too_small, too_large = (low * high) ** 0.5, 0.0, float("inf")
    for _ in range(20):
        effect = effect_of(scale)
        if 1.5 * low <= effect <= high / 1.5:
            return scale
        if effect < aim:
            too_small = scale
        else:
            too_large = scale
        scale *= min(max(aim / max(effect, 1e-9), 0.2), 5.0)
        if not too_small < scale < too_large:
            scale = (too_small + too_large) / 2
    raise RuntimeError(f"no scale gives an effect of {low} to {high} nat; {scale:.3g} gives {effect:.3g}")


def parameters(model) -> dict[str, tuple[Tensor, Tensor]]:
    """Trainable parameters by name, each with its values before any noise."""
    return {name: (p, p.detach().clone()) for name, p in model.named_parameters() if p.requires_grad}


@torch.no_grad()
def depart(start: dict[str, tuple[Tensor, Tensor]], scale: float, seed: int) -> None:
    """Set the parameters to identity plus ``scale`` times noise; the same seed gives the same noise."""
    generator = torch.Generator().manual_seed(seed)
    for name, (parameter, before) in start.items():
        noise = torch.randn(parameter.shape, generator=generator).to(parameter)
        if "lora_A" in name:
            continue  # PEFT starts it at random already
        if "ia3_l" in name or "magnitude" in name:
            parameter.copy_(before * (1 + scale * noise))
        elif "vera_lambda_d" in name:
            parameter.copy_(noise)  # the term is d's product with e, which gets the scale
        elif "lora_B" in name:
            parameter.copy_(0.1 * scale * noise)  # of the order of W's own share, as the other methods at this scale
        else:
            parameter.copy_(scale * noise)
