"""AdaLoRA: a singular value decomposition whose rank the training pruned, module by module.

    F(x) = x W + b + (x A^T) B^T,   A = lora_A * lora_E,   B = lora_B * alpha / (init_r + 1e-5)

A file holds only the ranks that rank_pattern keeps (none at all is possible), but PEFT goes on to divide by init_r.
An alpha of 0 or less means the rank that is left. PEFT ignores r, use_rslora and alpha_pattern here.

Checked against peft/tuners/adalora/{layer,model}.py of PEFT 0.21.2.
"""

from __future__ import annotations

from torch import Tensor

from scute_sgl.errors import AdapterError
from scute_sgl.methods import common, lora
from scute_sgl.names import Module, group
from scute_sgl.slots import Adapter, BaseShape, Slots, Term

FIELDS = common.TARGETING | {"init_r": 12, "lora_alpha": 8.0, "rank_pattern": None, "bias": "none"}
NEUTRAL = lora.NEUTRAL | frozenset(
    "r use_rslora qalora_group_size init_lora_weights alpha_pattern target_r tinit tfinal deltaT beta1 beta2 orth_reg_weight "
    "total_step".split()
)
OFF = lora.OFF | {
    "use_dora": "PEFT defines no AdaLoRA with DoRA",
    "lora_bias": "PEFT defines no AdaLoRA with biases of its own",
    "use_bdlora": "PEFT defines no AdaLoRA with BD-LoRA",
    "use_qalora": "PEFT defines no AdaLoRA with QALoRA",
    "alora_invocation_tokens": "PEFT defines no AdaLoRA with invocation tokens",
    "velora_config": "PEFT defines no AdaLoRA with VeLoRA",
    "monteclora_config": "PEFT defines no AdaLoRA with MonteCLoRA",
    "kasa_config": "PEFT defines no AdaLoRA with KaSA",
    "trainable_token_indices": "own rows of the vocabulary are served beside LoRA and alone, not beside AdaLoRA",
    "ensure_weight_tying": "AdaLoRA has no embedding layer to tie",
}
PARAMETERS = ("lora_A", "lora_B", "lora_E")
KEPT = ".lora_E"  # ends the keys of rank_pattern


def read(config: dict, tensors: dict[str, Tensor], base: BaseShape | None) -> Adapter:
    c = common.settings(config, FIELDS, NEUTRAL, OFF)
    init_r = common.rank(c["init_r"], "init_r")
    alpha = common.number(c["lora_alpha"], "lora_alpha")
    kept = _kept(c["rank_pattern"], init_r)

    def read_one(module: Module) -> Slots:
        common.refuse_embedding(module, "AdaLoRA")
        r = kept.pop(module.file_path, init_r)
        A, E = module.need("lora_A", r, module.in_features), module.need("lora_E", r, 1)
        B = module.need("lora_B", module.out_features, r)
        if r == 0:
            return Slots()
        scale = (alpha if alpha > 0 else r) / (init_r + 1e-5)
        return Slots(terms=(Term(common.wide(A) * common.wide(E), common.scaled(B, scale, module, "lora_B")),))

    modules, _ = group(tensors, base, PARAMETERS)
    adapter = common.build("ADALORA", config, modules, read_one)
    if kept:
        hint = f"found {next(iter(kept)) + KEPT!r}, but the file holds no such module"
        raise AdapterError("bad_config", hint, key="rank_pattern")
    return adapter


def _kept(pattern: object, init_r: int) -> dict[str, int]:
    """Module path -> how many of its init_r ranks are left."""
    kept = {}
    if pattern is not None and not isinstance(pattern, dict):
        raise AdapterError("bad_config", f"found {pattern!r:.80}, want null or an object", key="rank_pattern")
    for name, mask in (pattern or {}).items():
        right_mask = isinstance(mask, list) and len(mask) == init_r and all(isinstance(keep, bool) for keep in mask)
        if not name.endswith(KEPT) or not right_mask:
            want = f"want <module>{KEPT} with {init_r} booleans"
            raise AdapterError("bad_config", f"found {name!r} with {mask!r:.80}, {want}", key="rank_pattern")
        kept[name.removesuffix(KEPT)] = sum(mask)
    return kept
