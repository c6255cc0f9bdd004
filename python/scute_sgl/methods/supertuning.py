"""Super-Tuning, and Supra: trained values at the largest or smallest elements of the weight, and a LoRA beside them.

    F(x) = x W + b + x S^T + (x A^T) B^T,   S = round(W + values) - W at supertuning_indices, zero elsewhere
    with r: A = supertuning_lora_A,   B = lora_alpha / r * supertuning_lora_B

An index counts the elements of W (out, in) row by row. PEFT rounds the values to W's dtype and adds them to W in it, so
in 16 bit that rounding is a part of what it applies. Without save_precomputed_indices the file leaves the places out
and PEFT sorts |W| anew; elements of equal size, of which a 16-bit weight has many, then change places with the machine,
so that such a file is refused.

Checked against peft/tuners/supertuning/{layer,config}.py of PEFT 0.21.2.
"""

from __future__ import annotations

from torch import Tensor

from scute_sgl.errors import AdapterError
from scute_sgl.methods import common
from scute_sgl.names import Module, group
from scute_sgl.slots import Adapter, BaseShape, Slots, Term

FIELDS = {"target_modules": None, "sparsity": 0.99, "r": None, "lora_alpha": None, "save_precomputed_indices": True}
NEUTRAL = frozenset({"select_top", "lora_dropout"})  # which elements they are is in the file
PARAMETERS = (
    *("supertuning_values", "supertuning_indices"),
    *("supertuning_lora_A.weight", "supertuning_lora_B.weight"),
)


def read(config: dict, tensors: dict[str, Tensor], base: BaseShape | None) -> Adapter:
    c = common.settings(config, FIELDS, NEUTRAL)
    if not c["save_precomputed_indices"]:
        advice = "the order of equal elements of W depends on the machine; save with save_precomputed_indices=True"
        raise AdapterError("unsupported_method", f"found false; {advice}", key="save_precomputed_indices")
    if not 0 <= c["sparsity"] < 1:
        raise AdapterError("bad_config", f"found {c['sparsity']}, want 0 up to 1", key="sparsity")
    if c["r"] is None and c["lora_alpha"] is not None:
        raise AdapterError("bad_config", f"found {c['lora_alpha']!r:.80} without r, want null", key="lora_alpha")
    r = None if c["r"] is None else common.rank(c["r"])
    scale = None if r is None else (2 * r if c["lora_alpha"] is None else common.number(c["lora_alpha"], "lora_alpha")) / r

    def read_one(module: Module) -> Slots:
        common.refuse_embedding(module, "Super-Tuning")
        inputs, outputs = module.in_features, module.out_features
        count = None if inputs is None else int(outputs * inputs * (1 - c["sparsity"]))  # PEFT's own truncation
        values = module.need("supertuning_values", count)
        index = module.need("supertuning_indices", len(values), integer=True).long()
        width = inputs or common.INDICES  # without a base only the values' number is known
        values = values if base is None else values.to(base.dtype)
        S = common.added_to_weight(module, "supertuning_indices", index // width, index % width, values)
        if r is None:
            return Slots(structure=S)
        A = module.need("supertuning_lora_A.weight", r, inputs)
        B = module.need("supertuning_lora_B.weight", outputs, r)
        return Slots(structure=S, terms=(Term(A, common.scaled(B, scale, module, "supertuning_lora_B.weight")),))

    modules, _ = group(tensors, base, PARAMETERS)
    return common.build("SUPERTUNING", config, modules, read_one)
