"""What the exactness test serves: a random base, and adapters of a chosen effect.

Every adapter is written by PEFT itself. Its trainable parameters depart from the identity by noise times a scale,
and the scale is searched until the adapter moves the log-probabilities by the wanted amount: an adapter that
changes little would hide errors, one that changes everything would hide them as well.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from peft import (
    IA3Config,
    LoraConfig,
    OFTConfig,
    PeftConfig,
    PeftModel,
    TrainableTokensConfig,
    VeraConfig,
    get_peft_model,
)
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from scute_sgl.judge import TOP, Peft, logprobs, set_task

EFFECTS = (0.3, 1.0)  # of an adapter, in nat
INVOCATION = [17, 18, 19]  # what an activated LoRA of the test waits for; it is in every probe's prompt
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


# A parameter's value from PEFT's initial one, normal noise and the scale that is searched.
Draw = Callable[[Tensor, Tensor, float], Tensor]


def kept(start: Tensor, noise: Tensor, scale: float) -> Tensor:
    return start


def drawn(start: Tensor, noise: Tensor, scale: float) -> Tensor:
    """Of a product whose other factor has the scale."""
    return noise


def scaled(start: Tensor, noise: Tensor, scale: float) -> Tensor:
    return scale * noise


def tenth(start: Tensor, noise: Tensor, scale: float) -> Tensor:
    """Beside vectors around one at the same scale: of the order of W's own share, as they are."""
    return 0.1 * scale * noise


def around(start: Tensor, noise: Tensor, scale: float) -> Tensor:
    return start * (1 + scale * noise)


@dataclass(frozen=True)
class Recipe:
    """One adapter: its label in supported.py, PEFT's config, the first scale that the search tries, how parameters are
    drawn (by the start of their own name, the longest that fits), and the task of a Poly adapter."""

    method: str
    config: Callable[[], PeftConfig]
    scale: float
    draws: dict[str, Draw]
    task: int | None = None


def recipes() -> dict[str, Recipe]:
    """The nine adapters: all five methods, different ranks, VeRA from two different pairs of shared matrices."""

    def lora(r: int) -> Recipe:
        config = partial(LoraConfig, target_modules=LINEARS, r=r, lora_alpha=2 * r)
        return Recipe("LORA", config, {8: 0.25, 64: 0.06}[r], {"lora_A": kept, "lora_B": tenth})

    def dora(r: int) -> Recipe:
        config = partial(LoraConfig, target_modules=LINEARS, r=r, lora_alpha=2 * r, use_dora=True)
        draws = {"lora_A": kept, "lora_B": tenth, "lora_magnitude_vector": around}
        return Recipe("DORA", config, 0.06, draws)

    def ia3() -> Recipe:
        config = partial(IA3Config, target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"])
        return Recipe("IA3", config, 0.11, {"ia3_l": around})

    def vera(key: int) -> Recipe:
        config = partial(VeraConfig, r=256, target_modules=LINEARS, projection_prng_key=key)
        return Recipe("VERA", config, 0.065, {"vera_lambda_d": drawn, "vera_lambda_b": scaled})

    oft = partial(OFTConfig, oft_block_size=32, target_modules=LINEARS)
    return {
        "lora_r8": lora(8),
        "lora_r64": lora(64),
        "dora_r16": dora(16),
        "dora_r32": dora(32),
        "ia3_a": ia3(),
        "ia3_b": ia3(),
        "vera_a": vera(0),
        "vera_b": vera(1),
        "oft": Recipe("OFT", oft, 0.006, {"oft_R": scaled}),
    }


def write_base(folder: Path, config: dict, dtype: torch.dtype, device: str) -> None:
    """A Llama with random weights, saved in the dtype that it will be served in: the reference reads the same bits."""
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**config))
    model.to(dtype).save_pretrained(folder)


def write_adapters(
    base: Peft, recipes: dict[str, Recipe], folder: Path, scales: dict[str, float], prompt: int, new_tokens: int
) -> dict[str, str]:
    """PEFT's save_pretrained of every recipe, in ``folder`` under its name; returns what fails, with the reason.

    ``scales`` by name are taken where they are, else searched for an effect within EFFECTS and put there. The effect
    is the mean change of the log-probabilities of the tokens that are likeliest with the adapter, after the first
    ``prompt`` of random tokens: that of a layer of attention shrinks with the length.
    """
    with base.lent() as model:
        probe = Probe(model, prompt, new_tokens)
    errors = {}
    for name, recipe in recipes.items():
        begun = time.perf_counter()
        try:
            with base.lent() as model:
                scales[name] = write_adapter(model, recipe, folder / name, probe, scales.get(name))
            done = f"scale {scales[name]:.4g}"
        except Exception as error:  # noqa: BLE001 - the other adapters are wanted all the same
            errors[name] = done = f"PEFT does not write it: {type(error).__name__}: {error}"
        print(f"  {name}: {done}, {probe.taken()} probes, {time.perf_counter() - begun:.1f} s", flush=True)
    return errors


def write_adapter(base, recipe: Recipe, folder: Path, probe: Probe, scale: float | None) -> float:
    """One of them, at this scale if one is given; returns its scale."""
    seed = zlib.crc32(folder.name.encode())
    torch.manual_seed(seed)
    config = recipe.config()
    if isinstance(config, TrainableTokensConfig):  # a small base has not all of the recipe's
        config.token_indices = [token for token in config.token_indices if token < base.config.vocab_size]
    model = get_peft_model(base, config).eval()
    if recipe.task is not None:
        set_task(model, recipe.task)
    start = parameters(model, recipe.draws)

    def effect_of(scale: float) -> float:
        depart(start, scale, seed)
        return probe.effect(model)

    if scale is None:
        scale = search_scale(effect_of, recipe.scale, *EFFECTS)
    else:
        depart(start, scale, seed)
    model.save_pretrained(folder)
    if recipe.task is not None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"task_id": recipe.task}))
    model.unload()
    return scale


class Probe:
    """Random tokens, and what the base makes of them."""

    def __init__(self, base, prompt: int, new_tokens: int):
        vocabulary = base.config.vocab_size
        generator = torch.Generator().manual_seed(7)
        self.ids = torch.randint(3, vocabulary, (2, prompt + new_tokens), generator=generator).to(base.device)
        self.ids[:, 1 : 1 + len(INVOCATION)] = torch.tensor(INVOCATION)
        self.tokens = torch.arange(vocabulary, device=base.device).expand(2, new_tokens, vocabulary)
        self.bare, self.count = logprobs(base, self.ids, self.tokens, rows=1), 0

    def effect(self, model: PeftModel) -> float:
        self.count += 1
        adapted, likeliest = logprobs(model, self.ids, self.tokens, rows=1).topk(TOP)
        return (adapted - self.bare.gather(-1, likeliest)).abs().mean().item()

    def taken(self) -> int:
        """How often since it was last asked."""
        count, self.count = self.count, 0
        return count


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
        if 0 < too_small and too_large < float("inf"):
            scale = (too_small * too_large) ** 0.5
        else:
            scale *= min(max(aim / max(effect, 1e-9), 0.2), 5.0)
    raise RuntimeError(f"no scale gives an effect of {low} to {high} nat; {scale:.3g} gives {effect:.3g}")


def parameters(model: PeftModel, draws: dict[str, Draw]) -> list[tuple[Tensor, Tensor, Draw]]:
    """Every trainable parameter with its values before any noise and its draw. ValueError for one that has none."""
    found = []
    for path, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        fitting = [start for start in draws if any(part.startswith(start) for part in path.split("."))]
        if not fitting:
            raise ValueError(f"the recipe does not say how to draw {path}; it has {', '.join(draws)}")
        found.append((parameter, parameter.detach().clone(), draws[max(fitting, key=len)]))
    return found


@torch.no_grad()
def depart(start: list[tuple[Tensor, Tensor, Draw]], scale: float, seed: int) -> None:
    """Draw the parameters at this scale; the same seed gives the same noise."""
    generator = torch.Generator().manual_seed(seed)
    for parameter, before, draw in start:
        noise = torch.randn(parameter.shape, generator=generator).to(parameter)
        parameter.copy_(draw(before, noise, scale))
