"""LN_TUNING: the weights of norms.

    F(x) = G(x * norm),   norm = w' / w

on every layer behind the norm: w is the base's weight, w' the trained one, x = w * n(h) the base norm's output and G
what the layer does otherwise. Exact, because an RMSNorm multiplies by its weight last. It is served where adaptable
layers alone read the norm (config.py): q, k and v behind input_layernorm, gate and up behind post_attention_layernorm,
the output head behind the last norm. A w of 0 has no ratio, unless it stayed 0.

modules_to_save of any method may name such norms too (common.py). There the method's own terms and rotations read
x * norm as well: A' = A diag(norm), R' = diag(norm) R. Shared matrices cannot be scaled for one tenant and are refused.

PEFT keeps w' in the base's dtype, and so does the fold. In 16 bits Hugging Face rounds twice, n(h) and then w' * n(h),
each by up to half an ulp, u. Here the base's kernel rounds x, and x + x (R - I) is rounded again: two as well. Rounding
R - I to 16 bits errs by up to u |R - 1| |x|, which is u |R - 1| / R of the result: nothing near R = 1, where trained
norms lie, and less than one more such rounding while R > 1/2. Below, it grows as 1 / R while the input shrinks as R.

Checked against peft/tuners/ln_tuning/layer.py and utils/other.py (ModulesToSaveWrapper) of PEFT 0.21.2.
"""

from __future__ import annotations

from torch import Tensor

from scute_sgl.methods import common
from scute_sgl.names import Module, group
from scute_sgl.slots import Adapter, BaseShape, Slots

FIELDS = {"target_modules": None, "exclude_modules": None}
NEUTRAL: frozenset[str] = frozenset()
PARAMETERS = ("ln_tuning_layers.weight", "ln_tuning_layers.bias")


def read(config: dict, tensors: dict[str, Tensor], base: BaseShape | None) -> Adapter:
    common.settings(config, FIELDS, NEUTRAL)

    def read_one(module: Module) -> Slots:
        name = next(iter(module.tensors))
        raise module.error("unsupported_method", name, f"not a norm; {common.DENSE}")

    modules, _ = group(tensors, base, PARAMETERS)
    return common.build("LN_TUNING", config, modules, read_one)
