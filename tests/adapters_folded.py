"""Adapters of the methods whose terms depend on the base weight, or that share matrices. PEFT writes them.

``FOLDED``: name -> writer(base folder, adapter folder), for ADAPTERS in make_adapters.py. Not a test module.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import peft
import torch
from peft_answers import load_base

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = ATTENTION + ["gate_proj", "up_proj", "down_proj"]
Writer = Callable[[str, str], None]

# The start of a parameter's own name, or of its module's -> (what is left of its initial value, deviation of what is added).
DRAWS = {
    "lora_": (0, 0.08),
    "lora_diag": (0, 1),
    "lora_magnitude_vector": (1, 0.1),
    "hra_u": (0, 1),
    "deft_P": (0, 0.15),
    "deft_R": (1, 0.2),  # it starts where DEFT does nothing
    "peanut_": (0, 0.25),
    "glora_": (0, 0.2),
    "glora_B": (0, 0.03),
    "adamss_": (0, 0.4),
    "osf_svd_params": (1, 0.1),  # U, S and V of the base weight
    "pvera_lambda": (0, 0.4),
    "fourierft_spectrum": (0, 1),
    "waveft_spectrum": (0, 0.02),
    "road_theta": (0, 0.4),
    "road_alpha": (1, 0.2),
    "shira_weight": (0, 0.1),
    "supertuning_values": (0, 0.15),
    "supertuning_lora": (0, 0.1),
    "bias": (0, 0.3),
    "ia3_l": (1, 0.25),
    "oft_R": (0, 0.04),
    "vera_lambda": (0, 0.4),
    "ln_tuning_layers": (1, 0.3),
    "modules_to_save": (1, 0.3),
    "trainable_tokens_delta": (1, 0.2),
}


def writer(make: Callable, near: bool = False, **fields) -> Writer:
    """``near``: the initial values stay, and a hundredth of the usual is added."""

    def write(base_dir: str, out_dir: str) -> None:
        torch.manual_seed(zlib.crc32(repr((make.__name__, near, sorted(fields.items()))).encode()))
        model = peft.get_peft_model(load_base(base_dir), make(task_type="CAUSAL_LM", **fields))
        _draw(model, near)
        model.save_pretrained(out_dir)

    return write


@torch.no_grad()
def _draw(model: peft.PeftModel, near: bool) -> None:
    """Every trained parameter anew. ValueError for one that no draw is for."""
    for path, parameter in model.named_parameters():
        if parameter.requires_grad:
            starts = [start for start in DRAWS if any(part.startswith(start) for part in path.split("."))]
            kept, deviation = DRAWS[max(starts, key=len)]
            kept, deviation = (1, 0.01 * deviation) if near else (kept, deviation)
            parameter.mul_(kept).add_(deviation * torch.randn_like(parameter))


def _write(make: Callable, near: bool = False, **fields) -> Writer:
    return writer(make, near, **{"target_modules": ["q_proj", "v_proj", "o_proj", "down_proj"]} | fields)


def _lora(near: bool = False, **fields) -> Writer:
    return _write(peft.LoraConfig, near, **{"r": 4, "lora_alpha": 6} | fields)


FOLDED: dict[str, Writer] = {
    "hra": _write(peft.HRAConfig, r=5, target_modules=ALL),
    "hra_gs": _write(peft.HRAConfig, apply_GS=True, bias="hra_only"),
    "hra_near": _write(peft.HRAConfig, near=True, r=4),
    "deft": _write(peft.DeftConfig, target_modules=ALL),
    "deft_near": _write(peft.DeftConfig, near=True, decomposition_method="qr"),
    "deft_qr": _write(peft.DeftConfig, decomposition_method="qr", alpha=12, bias="deft_only"),
    "deft_para": _write(
        peft.DeftConfig, para=True, r=4, decomposition_method="qr", target_modules=["q_proj", "lm_head"]
    ),
    "peanut": _write(peft.PeanutConfig, r=6, target_modules=ALL),
    "peanut_deep": _write(peft.PeanutConfig, r=6, depth=2, act_fn="tanh", scaling=0.5),
    "glora": _write(peft.GloraConfig, config_A_B="vector", config_C="vector", config_D_E="vector"),
    "glora_constant": _write(peft.GloraConfig, config_A_B="constant", config_C="lora", bias="glora_only"),
    "glora_none": _write(peft.GloraConfig, config_A_B="none", config_C="none", target_modules=["q_proj", "lm_head"]),
    "glora_lora": _write(peft.GloraConfig, target_modules=[*ALL, "lm_head"]),
    "glora_lora_near": _write(peft.GloraConfig, near=True, r=24),
    "glora_lora_vector": _write(peft.GloraConfig, r=3, config_C="vector", config_D_E="vector", bias="all"),
    "pissa": _lora(init_lora_weights="pissa", target_modules=ALL, bias="lora_only"),
    "pissa_near": _lora(near=True, init_lora_weights="pissa"),
    "pissa_dora": _lora(init_lora_weights="pissa", use_dora=True, bias="all"),
    "olora": _lora(init_lora_weights="olora", use_rslora=True, rank_pattern={"v_proj": 7}, bias="all"),
    "kasa": _lora(kasa_config=peft.KasaConfig(), bias="all"),
    "adamss": _write(peft.AdamssConfig, r=20, target_modules=ALL),
    "adamss_ranks": _write(peft.AdamssConfig, r=9, num_subspaces=3, subspace_rank=2, random_seed=4),
    "osf": _write(peft.OSFConfig),
    "osf_near": _write(peft.OSFConfig, near=True),
    "osf_ranks": _write(peft.OSFConfig, effective_rank=0.9, rank_pattern={r"layers\.1\..*v_proj": 20}),
    "pvera": _write(peft.PveraConfig, r=8, bias="pvera_only"),
    "pvera_unsaved": _write(peft.PveraConfig, r=12, save_projection=False, projection_prng_key=7, target_modules=ALL),
    "fourierft": _write(peft.FourierFTConfig, n_frequency=40, scaling=30, target_modules=ALL),
    "fourierft_patterns": _write(
        peft.FourierFTConfig, n_frequency=60, n_frequency_pattern={"v_proj": 25, r"0\.self_attn\.q_proj": 90},
        scaling=30, random_loc_seed=5, bias="all",
    ),
    "waveft": _write(peft.WaveFTConfig, n_frequency=200, target_modules=ALL),
    "waveft_proportional": _write(peft.WaveFTConfig, n_frequency=150, proportional_parameters=True, bias="waveft_only"),
    "road": _write(peft.RoadConfig, group_size=16, target_modules=ALL),
    "road_2": _write(peft.RoadConfig, variant="road_2", group_size=8, target_modules=["q_proj", "down_proj", "lm_head"]),
    "road_4": _write(peft.RoadConfig, variant="road_4", group_size=32),
    "road_near": _write(peft.RoadConfig, near=True, group_size=2),
    "shira": _write(peft.ShiraConfig, r=4, target_modules=ALL),
    "shira_seed": _write(peft.ShiraConfig, r=9, random_seed=3, target_modules=["q_proj", "o_proj", "lm_head"]),
    "shira_near": _write(peft.ShiraConfig, near=True, r=4),
    "supertuning": _write(peft.SupertuningConfig, sparsity=0.9, target_modules=ALL),
    "supertuning_bottom": _write(peft.SupertuningConfig, sparsity=0.8, select_top=False, target_modules=["v_proj", "lm_head"]),
    "supertuning_supra": _write(peft.SupertuningConfig, sparsity=0.95, r=3, lora_alpha=4),
    "supertuning_supra_alpha": _write(peft.SupertuningConfig, sparsity=0.97, r=2, target_modules=["q_proj", "up_proj"]),
    "waveft_places": _write(peft.WaveFTConfig, n_frequency=120, n_frequency_pattern={"o_proj": 30}, use_idwt=False),
}  # fmt: skip
# PEFT keeps factors of W, DEFT's projections and FourierFT's transform in float32 whatever it computes in.
IN_FLOAT32 = dict.fromkeys(("deft", "pissa", "olora", "kasa", "osf", "fourierft"), 1e-6)
