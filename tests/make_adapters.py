"""Tiny base models, and adapters that PEFT itself writes for them.

    base = make_base("llama", root)                        # any name of BASES -> folder, made once
    adapter = write_adapter(base, root / "a", "dora")      # any name of ADAPTERS, NEAR, WITH_NORMS or REFUSED

Adapters are far from the identity unless their name ends in _near. Everything is seeded and runs on the CPU in
float32. Not a test module; needs peft and transformers, not scute_sgl.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers
from adapters_embed import EMBED, REFUSED_NORMS, UNTIED, WITH_NORMS
from adapters_folded import FOLDED
from adapters_plain import PLAIN
from peft import IA3Config, LilyConfig, LoraConfig, OFTConfig, PeftModel, VeraConfig, get_peft_model
from peft_answers import load_base
from safetensors.torch import load_file, save_file

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
ALL = ATTENTION + MLP

# -------------------------------------------------------------------------------------------------- base models

# initializer_range 0.12: with the usual 0.02 so small a model is nearly deaf to its inputs.
SIZES = dict(
    vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=2048, initializer_range=0.12, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
BASES: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama_tied": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "mistral": lambda: transformers.MistralConfig(**SIZES | {"num_key_value_heads": 1}, sliding_window=None),
    "llama_norms": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama_16bit": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=False),
}


def make_base(name: str, root: str | os.PathLike, seed: int = 0) -> str:
    """Writes base ``name`` to ``root/name`` (``name_seed`` for another seed) unless it is there."""
    folder = Path(root) / (f"{name}_{seed}" if seed else name)
    if not (folder / "model.safetensors").exists():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(BASES[name](), dtype=torch.float32)
        for key, parameter in model.named_parameters():
            if key.endswith(".bias"):  # q, k, v of Qwen2; HF starts them at zero
                torch.nn.init.normal_(parameter, std=0.5)
            if name.endswith("norms") and key.endswith("norm.weight"):  # HF starts them at one
                torch.nn.init.normal_(parameter, mean=1, std=0.3)
            if name.endswith("16bit"):  # weights that 16 bits hold exactly: what they round is then the activations
                parameter.data = parameter.data.bfloat16().float()
        model.save_pretrained(folder)
    return str(folder)


# ----------------------------------------------------------------------------------------------------- adapters


def _lora(near: bool = False, **fields) -> Callable[[str, str], None]:
    fields = {"r": 8, "lora_alpha": 16, "target_modules": ALL} | fields
    return lambda base, out: _write(LoraConfig(task_type="CAUSAL_LM", **fields), near, base, out)


def _dora(near: bool = False, **fields) -> Callable[[str, str], None]:
    return _lora(near, **{"use_dora": True, "r": 4, "lora_alpha": 8} | fields)


def _ia3(targets: list[str], feedforward: list[str] | str, near: bool = False) -> Callable[[str, str], None]:
    fields = {"target_modules": targets, "feedforward_modules": feedforward}
    return lambda base, out: _write(IA3Config(task_type="CAUSAL_LM", **fields), near, base, out)


def _vera(near: bool = False, **fields) -> Callable[[str, str], None]:
    fields = {"r": 8, "target_modules": ["q_proj", "v_proj"]} | fields
    return lambda base, out: _write(VeraConfig(task_type="CAUSAL_LM", **fields), near, base, out)


def _oft(near: bool = False, **fields) -> Callable[[str, str], None]:
    fields = {"oft_block_size": 16, "target_modules": ALL} | fields
    return lambda base, out: _write(OFTConfig(task_type="CAUSAL_LM", **fields), near, base, out)


def _half(writer: Callable[[str, str], None], dtype: torch.dtype) -> Callable[[str, str], None]:
    def write(base_dir, out_dir):
        writer(base_dir, out_dir)
        path = Path(out_dir) / "adapter_model.safetensors"
        save_file({key: tensor.to(dtype) for key, tensor in load_file(path).items()}, path)

    return write


ADAPTERS: dict[str, Callable[[str, str], None]] = {
    # LoRA
    "lora": _lora(),
    "lora_rslora": _lora(use_rslora=True, r=16, lora_alpha=8),
    "lora_rank_pattern": _lora(r=4, rank_pattern={"k_proj": 8, r"layers\.1\.self_attn\.v_proj": 2, "v_proj": 16}),
    "lora_alpha_pattern": _lora(alpha_pattern={r".*\.0\..*q_proj": 32, "q_proj": 4, "down_proj": 1}),
    "lora_rslora_patterns": _lora(use_rslora=True, rank_pattern={"q_proj": 2}, alpha_pattern={"q_proj": 5}),
    "lora_bias_o": _lora(lora_bias=True, target_modules=["o_proj"]),
    "lora_bias_qv": _lora(lora_bias=True, target_modules=["q_proj", "v_proj"]),
    "lora_bias_all": _lora(bias="all", target_modules=["q_proj", "o_proj"]),
    "lora_bias_lora_only": _lora(bias="lora_only", target_modules=["q_proj", "o_proj"]),
    "lora_layers": _lora(layers_to_transform=[1]),
    "lora_layers_pattern": _lora(layers_to_transform=0, layers_pattern="layers"),
    "lora_regex": _lora(target_modules=r"model\.layers\.(0|1)\..*\.(q_proj|down_proj)"),
    "lora_all_linear": _lora(target_modules="all-linear"),
    "lora_exclude": _lora(exclude_modules=["layers.0.self_attn.q_proj", "up_proj"]),
    "lora_full_paths": _lora(target_modules=["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"]),
    "lora_q": _lora(target_modules=["q_proj"]),
    "lora_k": _lora(target_modules=["k_proj"]),
    "lora_v": _lora(target_modules=["v_proj"]),
    "lora_kv": _lora(target_modules=["k_proj", "v_proj"]),
    "lora_qk": _lora(target_modules=["q_proj", "k_proj"]),
    "lora_o": _lora(target_modules=["o_proj"]),
    "lora_up": _lora(target_modules=["up_proj"]),
    "lora_head": _lora(target_modules=["lm_head"]),
    "lora_embed": _lora(target_modules=["embed_tokens"]),
    "lora_embed_head": _lora(target_modules=["embed_tokens", "lm_head", "q_proj"]),
    "lora_ensure_tying": _lora(target_modules=["embed_tokens", "q_proj"], ensure_weight_tying=True),
    "lora_gaussian": _lora(init_lora_weights="gaussian", lora_dropout=0.1),
    "lora_r200": _lora(r=200, lora_alpha=20, target_modules=["q_proj", "down_proj"]),
    "lora_r500": _lora(r=500, lora_alpha=50, target_modules=MLP),
    "lora_r1": _lora(r=1, lora_alpha=4),
    "lora_bf16_file": _half(_lora(), torch.bfloat16),
    "lora_fp16_file": _half(_lora(), torch.float16),
    # DoRA
    "dora": _dora(),
    "dora_near": _dora(near=True),
    "dora_qvdown": _dora(target_modules=["q_proj", "v_proj", "down_proj"]),
    "dora_rslora": _dora(use_rslora=True, r=8),
    "dora_patterns": _dora(rank_pattern={"q_proj": 8}, alpha_pattern={"o_proj": 2}),
    "dora_bias_all": _dora(bias="all", target_modules=["q_proj", "o_proj"]),
    "dora_head": _dora(target_modules=["lm_head", "q_proj"]),
    "dora_embed": _dora(target_modules=["embed_tokens"]),
    "dora_embed_head": _dora(target_modules=["embed_tokens", "lm_head"]),
    # (IA)3
    "ia3": _ia3(["k_proj", "v_proj", "down_proj"], ["down_proj"]),
    "ia3_near": _ia3(["k_proj", "v_proj", "down_proj"], ["down_proj"], near=True),
    "ia3_no_ff": _ia3(ALL, []),
    "ia3_many_ff": _ia3(ALL, ["q_proj", "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]),
    "ia3_regex_ff": _ia3(["q_proj", "up_proj", "down_proj"], r".*\.(down_proj|layers\.0\.mlp\.up_proj)"),
    "ia3_up_down": _ia3(["up_proj", "down_proj"], ["down_proj"]),
    "ia3_head": _ia3(["lm_head", "o_proj"], ["o_proj"]),
    # VeRA
    "vera": _vera(),
    "vera_r16": _vera(r=16),
    "vera_seed": _vera(projection_prng_key=7),
    "vera_all": _vera(target_modules=ALL),
    "vera_all_linear_unsaved": _vera(target_modules="all-linear", save_projection=False, r=16),
    "vera_unsaved": _vera(save_projection=False),
    "vera_unsaved_seed": _vera(save_projection=False, projection_prng_key=7, target_modules=["q_proj", "gate_proj"]),
    "vera_layers_unsaved": _vera(save_projection=False, layers_to_transform=[1], target_modules=["v_proj", "up_proj"]),
    "vera_bias_only": _vera(bias="vera_only"),
    "vera_head": _vera(target_modules=["q_proj", "lm_head"]),
    # OFT
    "oft": _oft(),
    "oft_near": _oft(near=True),
    "oft_exact": _oft(use_cayley_neumann=False),
    "oft_block_share": _oft(block_share=True, oft_block_size=8),
    "oft_coft": _oft(coft=True, eps=0.5),
    "oft_coft_share": _oft(coft=True, eps=1.0, block_share=True, use_cayley_neumann=False),
    "oft_r": _oft(r=4, oft_block_size=0),
    "oft_adjusted": _oft(oft_block_size=20),  # PEFT moves it to a divisor of each layer's inputs
    "oft_one_term": _oft(num_cayley_neumann_terms=1, bias="all", target_modules=["q_proj"]),
    "oft_two_terms": _oft(num_cayley_neumann_terms=2),
    "oft_three_terms": _oft(num_cayley_neumann_terms=3),
    "oft_seven_terms": _oft(num_cayley_neumann_terms=7),
    "oft_o_down": _oft(target_modules=["o_proj", "down_proj"]),
    "oft_head": _oft(target_modules=["q_proj", "lm_head"]),
    "oft_bias_only": _oft(bias="oft_only", target_modules=["q_proj", "k_proj"]),
}  # fmt: skip
ADAPTERS |= PLAIN | FOLDED | EMBED
# One term of the series is the identity: on a base without biases such an adapter does nothing. Nor does glora_none.
WITHOUT_EFFECT = {"oft_one_term", "glora_none"}

# As near the identity as trained adapters are.
NEAR: dict[str, Callable[[str, str], None]] = {
    "lora_near": _lora(near=True),
    "lora_bias_near": _lora(near=True, lora_bias=True, r=3, target_modules=["q_proj", "o_proj", "lm_head"]),
    "dora_near": ADAPTERS["dora_near"],
    "dora_rslora_near": _dora(near=True, use_rslora=True, r=8),
    "ia3_near": ADAPTERS["ia3_near"],
    "ia3_many_ff_near": _ia3(ALL, ["q_proj", "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], near=True),
    "vera_near": _vera(near=True, target_modules=ALL),
    "oft_near": ADAPTERS["oft_near"],
    "oft_block_share_near": _oft(near=True, block_share=True, oft_block_size=8),
}  # fmt: skip

# What PEFT writes and scute refuses.
REFUSED: dict[str, Callable[[str, str], None]] = {
    "lily": lambda base, out: _write(LilyConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]), False, base, out),
    "lora_saves_head": _lora(modules_to_save=["lm_head"]),
} | REFUSED_NORMS


def write_adapter(base_dir: str | os.PathLike, out_dir: str | os.PathLike, name: str) -> str:
    """PEFT's save_pretrained of adapter ``name`` on this base, with random weights; returns the folder."""
    (ADAPTERS | NEAR | UNTIED | WITH_NORMS | REFUSED)[name](str(base_dir), str(out_dir))
    return str(out_dir)


def edit_config(adapter_dir: str | os.PathLike, **fields) -> None:
    """Overwrites fields of an adapter's config; ... (Ellipsis) removes one."""
    path = Path(adapter_dir) / "adapter_config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def _write(config, near: bool, base_dir: str, out_dir: str) -> None:
    torch.manual_seed(_seed(config))
    model = get_peft_model(load_base(base_dir), config)
    _randomise(model, near)
    model.save_pretrained(out_dir)


def _seed(config) -> int:
    fields = {k: sorted(v) if isinstance(v, set) else v for k, v in vars(config).items()}  # sets have no fixed order
    return zlib.crc32(repr(sorted(map(str, fields.items()))).encode())


@torch.no_grad()
def _randomise(model: PeftModel, near: bool) -> None:
    spread = (lambda t, far: torch.randn_like(t) * (0.002 if near else far))  # noqa: E731
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        if "lora_A" in name or "lora_B" in name or "lora_embedding" in name:
            p.copy_(torch.randn_like(p) * (0.02 if near else 0.08))
        elif "ia3_l" in name:
            p.copy_(1 + spread(p, 0.25))
        elif "oft_" in name:
            p.copy_(torch.randn_like(p) * (0.003 if near else 0.04))
        elif "vera_lambda" in name:
            p.copy_(torch.randn_like(p) * (0.05 if near else 0.4))
        elif name.endswith("bias"):
            p.copy_(torch.randn_like(p) * (0.01 if near else 0.3))
    for module in model.modules():  # DoRA last: m is relative to the norms that A and B give
        if not getattr(module, "lora_magnitude_vector", None):
            continue
        weight = module.base_layer.weight + module.get_delta_weight("default")
        norm = weight.norm(dim=0 if isinstance(module.base_layer, torch.nn.Embedding) else 1)
        module.lora_magnitude_vector["default"].weight.copy_(norm * (1 + spread(norm, 0.2)))
