"""Adapters of the methods that are low-rank terms, biases or rotations whatever the base weight is. PEFT writes them.

``PLAIN``: name -> writer(base folder, adapter folder), for ADAPTERS in make_adapters.py. A method's parameters are
drawn by its table: the start of a parameter's own name -> (mean, deviation). Not a test module.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path

import peft
import torch
from peft_answers import load_base

INVOCATION = [5, 6]  # of the activated LoRAs; servers.prompt has these tokens
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = ATTENTION + ["gate_proj", "up_proj", "down_proj"]
Writer = Callable[[str, str], None]
Draws = dict[str, tuple[float, float]]


def _writer(make: Callable, draws: Draws, prepare: Callable[[peft.PeftModel], None] = lambda model: None):
    """A function of the config's fields that gives a Writer; ``prepare`` runs between the draws and the saving."""

    def with_fields(**fields) -> Writer:
        fields = {"target_modules": ALL} | fields

        def write(base_dir: str, out_dir: str) -> None:
            torch.manual_seed(zlib.crc32(repr((make.__name__, sorted(fields.items()))).encode()))
            model = peft.get_peft_model(load_base(base_dir), make(task_type="CAUSAL_LM", **fields))
            draw(model, draws | {"bias": (0, 0.3)})
            prepare(model)
            model.save_pretrained(out_dir)

        return write

    return with_fields


@torch.no_grad()
def draw(model: peft.PeftModel, draws: Draws) -> None:
    """Every trained parameter anew. KeyError for one that no draw is for."""
    for path, parameter in model.named_parameters():
        if parameter.requires_grad:
            name = next((n for n in draws if any(part.startswith(n) for part in path.split("."))), path)
            mean, deviation = draws[name]
            parameter.copy_(mean + deviation * torch.randn_like(parameter))


def _prune(model: peft.PeftModel) -> None:
    """A rank pattern as AdaLoRA's training leaves it: some ranks of every module, none of one module."""
    masks = {}
    for path, module in model.base_model.model.named_modules():
        if hasattr(module, "lora_E"):
            kept = 0 if path.endswith("layers.1.self_attn.k_proj") else 1 + len(masks) % 6
            masks[f"{path}.lora_E.default"] = [i < kept for i in torch.randperm(module.r["default"]).tolist()]
    model.peft_config["default"].rank_pattern = masks


_adalora_draws = {"lora_A": (0, 0.2), "lora_B": (0, 0.2), "lora_E": (0, 1)}
_adalora = _writer(peft.AdaLoraConfig, _adalora_draws)
_adalora_pruned = _writer(peft.AdaLoraConfig, _adalora_draws, _prune)
_beft = _writer(peft.BeftConfig, {"beft_bias": (0, 0.3)})
_boft = _writer(peft.BOFTConfig, {"boft_R": (0, 0.3), "boft_s": (1, 0.2)})
_boft_near = _writer(peft.BOFTConfig, {"boft_R": (0, 0.01), "boft_s": (1, 0.002)})
_delora = _writer(peft.DeloraConfig, {"delora_lambda": (6, 2), "delora_A": (0, 0.3), "delora_B": (0, 0.3)})
_gralora = _writer(peft.GraloraConfig, {"gralora_": (0, 0.1)})
_hira = _writer(peft.HiraConfig, {"hira_": (0, 0.4)})
_hira_near = _writer(peft.HiraConfig, {"hira_": (0, 0.08)})
_loha = _writer(peft.LoHaConfig, {"hada_": (0, 0.3)})
_lokr = _writer(peft.LoKrConfig, {"lokr_": (0, 0.3)})
_miss = _writer(peft.MissConfig, {"miss_block": (0, 0.05)})
_lora = _writer(peft.LoraConfig, {"lora_A": (0, 0.1), "lora_B": (0, 0.1), "lora_monteclora": (1, 0.1)})
_poly = _writer(peft.PolyConfig, {"poly_router": (0, 1), "poly_lora": (0, 0.2)})
_randlora = _writer(peft.RandLoraConfig, {"randlora_lambda": (0, 0.05), "randlora_gamma": (0, 0.05)})
_randlora_near = _writer(peft.RandLoraConfig, {"randlora_lambda": (0, 0.003), "randlora_gamma": (0, 0.003)})
_tinylora = _writer(peft.TinyLoraConfig, {"tinylora_v": (0, 0.04)})
_unilora = _writer(peft.UniLoraConfig, {"unilora_theta_d": (0, 0.6)})
_vblora = _writer(peft.VBLoRAConfig, {"vblora_vector_bank": (0, 0.2), "vblora_logits": (0, 1)})


def _task(task_id: int, writer: Writer) -> Writer:
    def write(base_dir: str, out_dir: str) -> None:
        writer(base_dir, out_dir)
        path = Path(out_dir) / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"task_id": task_id}))

    return write


PLAIN: dict[str, Writer] = {
    "adalora": _adalora_pruned(total_step=10, lora_alpha=16),
    "adalora_unpruned": _adalora(total_step=9, init_r=4, lora_alpha=6, target_modules=["q_proj", "up_proj", "lm_head"]),
    "adalora_no_alpha": _adalora_pruned(total_step=10, lora_alpha=0, bias="all", target_modules=ATTENTION),
    "alora": _lora(alora_invocation_tokens=INVOCATION, rank_pattern={"v_proj": 3}),
    "alora_head": _lora(
        alora_invocation_tokens=INVOCATION, lora_bias=True, use_rslora=True,
        target_modules=["q_proj", "o_proj", "lm_head"],
    ),
    "beft": _beft(),
    "beft_head": _beft(target_modules=["v_proj", "lm_head"]),
    "boft": _boft(boft_block_size=8),
    "boft_near": _boft_near(),
    "boft_factors": _boft(boft_n_butterfly_factor=4, bias="all", target_modules=[*ATTENTION, "down_proj"]),
    "boft_block_num": _boft(
        boft_block_size=0, boft_block_num=4, boft_n_butterfly_factor=2, target_modules=["q_proj", "lm_head"]
    ),
    "delora": _delora(),
    "delora_patterns": _delora(r=4, rank_pattern={"q_proj": 8, r"layers\.1\.mlp\.up_proj": 2}, bias="delora_only"),
    "gralora": _gralora(r=8, alpha=8),
    "gralora_hybrid": _gralora(r=8, gralora_k=4, hybrid_r=3, alpha=6, bias="all"),
    "hira": _hira(r=6),
    "hira_near": _hira_near(),
    "hira_patterns": _hira(r=4, rank_pattern={"k_proj": 9}, target_modules=[*ALL, "lm_head"]),  # PEFT gives it 4 too
    "hira_layers": _hira(layers_to_transform=[1], init_weights="gaussian", target_modules=["q_proj", "down_proj"]),
    "loha": _loha(r=4, alpha=6),
    "loha_patterns": _loha(r=8, rank_pattern={"q_proj": 2, "gate_proj": 16}, alpha_pattern={"k_proj": 4}),
    "loha_head": _loha(r=3, alpha=6, target_modules=["k_proj", "lm_head"]),
    "lokr": _lokr(r=2, alpha=2),
    "lokr_both": _lokr(r=2, alpha=1, decompose_both=True, decompose_factor=8, target_modules=[*ALL, "lm_head"]),
    "lokr_whole": _lokr(alpha=2, rank_pattern={"v_proj": 2}, alpha_pattern={"down_proj": 5}, init_weights="lycoris"),
    "lora_bd": _lora(
        use_bdlora=peft.BdLoraConfig(["o_proj", "down_proj"], ["self_attn.q", "0.mlp.up", "v_"], 4, match_strict=False),
        lora_alpha=12,
    ),
    "lora_bd_strict": _lora(
        use_bdlora=peft.BdLoraConfig(target_modules_bd_b=["q_proj", "lm_head"], nblocks=2),
        rank_pattern={"q_proj": 16}, bias="lora_only", target_modules=["q_proj", "lm_head"],
    ),
    "lora_monteclora": _lora(monteclora_config=peft.MontecloraConfig(buffer_size=1), use_rslora=True),
    "lora_qalora": _lora(use_qalora=True),
    "lora_qalora_head": _lora(
        use_qalora=True, qalora_group_size=32, use_rslora=True, bias="all",
        target_modules=["q_proj", "down_proj", "lm_head"],
    ),
    "lora_velora": _lora(velora_config=peft.VeloraConfig(8), lora_bias=True, target_modules=["q_proj", "up_proj"]),
    "miss": _miss(r=16),
    "miss_remainder": _miss(r=20, init_weights=False, bias="all"),  # does not divide the inputs
    "miss_bat": _miss(r=16, init_weights="bat"),
    "miss_bat_head": _miss(r=4, init_weights="bat", bias="all", target_modules=["q_proj", "v_proj", "lm_head"]),
    "miss_mini": _miss(r=16, init_weights="mini", mini_r=8, target_modules=["q_proj", "up_proj", "lm_head"]),
    "poly": _task(2, _poly(r=4, n_tasks=3)),
    "poly_splits": _task(0, _poly(r=3, n_tasks=2, n_skills=5, n_splits=4, target_modules=["q_proj", "lm_head"])),
    "poly_one_task": _poly(r=4, n_skills=2, target_modules=["k_proj", "up_proj"]),
    "randlora": _randlora(r=8, randlora_alpha=16),
    "randlora_near": _randlora_near(r=16, randlora_alpha=320),
    "randlora_bias": _randlora(r=10, randlora_alpha=25, bias="all"),  # does not divide the inputs
    "randlora_wide": _randlora(r=100, randlora_alpha=100, target_modules=["q_proj", "down_proj", "lm_head"]),
    "randlora_drawn": _randlora(r=8, randlora_alpha=24, save_projection=False, projection_prng_key=7),
    "randlora_sparse": _randlora(
        r=4, randlora_alpha=12, save_projection=False, sparse=True, layers_to_transform=[1],
        target_modules=["v_proj", "up_proj"],
    ),
    "randlora_very_sparse": _randlora(
        r=16, randlora_alpha=32, save_projection=False, very_sparse=True, sparse=True, target_modules="all-linear"
    ),
    "randlora_sparse_saved": _randlora(r=8, randlora_alpha=16, sparse=True, target_modules=["k_proj", "lm_head"]),
    "tinylora": _tinylora(r=3, u=40, weight_tying=0.4, bias="all"),
    "tinylora_drawn": _tinylora(save_projection=False, projection_seed=7, layers_to_transform=[1]),
    "tinylora_embed_head": _tinylora(weight_tying=1.0, target_modules=["embed_tokens", "v_proj", "lm_head"]),
    "unilora": _unilora(theta_d_length=200),
    "unilora_seed": _unilora(r=3, proj_seed=7, bias="unilora_only", target_modules=["v_proj", "up_proj", "lm_head"]),
    "unilora_saved": _unilora(save_indices=True, layers_to_transform=[1], target_modules=["q_proj", "down_proj"]),
    "vblora": _vblora(num_vectors=40, vector_length=16),
    "vblora_topk": _vblora(num_vectors=300, vector_length=8, topk=3, save_only_topk_weights=True, bias="all"),
    "vblora_top1": _vblora(
        num_vectors=20, vector_length=32, topk=1, save_only_topk_weights=True, target_modules=["q_proj", "lm_head"]
    ),
}  # fmt: skip
