"""Adapters of the benchmark's tenants, written straight into PEFT's file format.

The values are random and differ from tenant to tenant; only the two matrices that all VeRA tenants share are the
same in every file. Nothing here needs a base model: DoRA's magnitudes are drawn around the norm that a row of a
``load_format="dummy"`` base has.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from workloads import LLAMA_8B, Kind, Shape

BLOCKS = {"q_proj": "self_attn", "k_proj": "self_attn", "v_proj": "self_attn", "o_proj": "self_attn"}
IA3_TARGETS, IA3_FEEDFORWARD = ["k_proj", "v_proj", "down_proj"], ["down_proj"]
DUMMY_ROW_NORM = 0.05


class Draw:
    """Reproducible 16-bit normal numbers, drawn on ``device`` and handed over on the host."""

    def __init__(self, seed: int, device: str):
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, *shape: int, std: float, mean: float = 0.0) -> Tensor:
        numbers = torch.randn(*shape, generator=self.generator, device=self.device)
        return (mean + std * numbers).half().cpu()


def _lora(kind: Kind, draw: Draw, name: str, inputs: int, outputs: int) -> dict[str, Tensor]:
    return {
        "lora_A.weight": draw(kind.size, inputs, std=0.01),
        "lora_B.weight": draw(outputs, kind.size, std=0.01),
    }


def _dora(kind: Kind, draw: Draw, name: str, inputs: int, outputs: int) -> dict[str, Tensor]:
    magnitude = draw(outputs, std=0.1 * DUMMY_ROW_NORM, mean=DUMMY_ROW_NORM)
    return _lora(kind, draw, name, inputs, outputs) | {"lora_magnitude_vector": magnitude}


def _ia3(kind: Kind, draw: Draw, name: str, inputs: int, outputs: int) -> dict[str, Tensor]:
    if name not in IA3_TARGETS:
        return {}
    shape = (1, inputs) if name in IA3_FEEDFORWARD else (outputs, 1)
    return {"ia3_l": draw(*shape, std=0.3, mean=1.0)}


def _vera(kind: Kind, draw: Draw, name: str, inputs: int, outputs: int) -> dict[str, Tensor]:
    return {"vera_lambda_d": draw(kind.size, std=0.1), "vera_lambda_b": draw(outputs, std=0.1)}


def _oft(kind: Kind, draw: Draw, name: str, inputs: int, outputs: int) -> dict[str, Tensor]:
    return {"oft_R.weight": draw(inputs // kind.size, kind.size * (kind.size - 1) // 2, std=0.02)}


TENSORS = {"lora": _lora, "dora": _dora, "ia3": _ia3, "vera": _vera, "oft": _oft}


def config_of(kind: Kind, shape: Shape = LLAMA_8B) -> dict:
    """adapter_config.json as PEFT writes it, without the fields that keep their defaults."""
    common = {"peft_version": "0.21.2", "task_type": "CAUSAL_LM", "target_modules": list(shape.linears)}
    lora = {"peft_type": "LORA", "r": kind.size, "lora_alpha": kind.size, "lora_dropout": 0.0, "bias": "none"}
    return common | {
        "lora": lora | {"use_dora": False},
        "dora": lora | {"use_dora": True},
        "ia3": {"peft_type": "IA3", "target_modules": IA3_TARGETS, "feedforward_modules": IA3_FEEDFORWARD},
        "vera": {"peft_type": "VERA", "r": kind.size, "projection_prng_key": 0, "save_projection": True},
        "oft": {
            "peft_type": "OFT",
            "r": 0,
            "oft_block_size": kind.size,
            "use_cayley_neumann": True,
            "num_cayley_neumann_terms": 5,
        },
    }[kind.method]


def write_adapter(folder: Path, kind: Kind, name: str, shape: Shape = LLAMA_8B, device: str = "cpu") -> Path:
    """Write the tenant ``name`` to ``folder/name`` and return that path. Equal names give equal files."""
    draw = Draw(zlib.crc32(name.encode()), device)
    tensors = {}
    for layer in range(shape.layers):
        for linear, (inputs, outputs) in shape.linears.items():
            path = f"base_model.model.model.layers.{layer}.{BLOCKS.get(linear, 'mlp')}.{linear}."
            for key, tensor in TENSORS[kind.method](kind, draw, linear, inputs, outputs).items():
                tensors[path + key] = tensor
    if kind.method == "vera":
        shared = Draw(0, device)
        width = max(inputs for inputs, _ in shape.linears.values())
        height = max(outputs for _, outputs in shape.linears.values())
        tensors["base_model.vera_A"] = shared(kind.size, width, std=(2 / width) ** 0.5)
        tensors["base_model.vera_B"] = shared(height, kind.size, std=(2 / kind.size) ** 0.5)
    target = folder / name
    target.mkdir(parents=True, exist_ok=True)
    save_file(tensors, target / "adapter_model.safetensors")
    (target / "adapter_config.json").write_text(json.dumps(config_of(kind, shape)))
    return target
