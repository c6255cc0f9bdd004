"""QALoRA, a LoRA with use_qalora: A reads means of groups of g = qalora_group_size inputs.

    x A^T = (i / g) mean_g(x) A_file^T,   A = (i / g) / g * repeat(A_file, g),   A_file (r, i / g)

PEFT builds it on layers of GPTQ bases. On any other layer it ignores use_qalora, and A in the file is (r, i), that of a
plain LoRA. The term is the same whatever W it stands beside; here that is the served base's, which is not quantised.

Checked against QALoraLinearVariant in peft/tuners/lora/variants.py of PEFT 0.21.2.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from scute_sgl.errors import NeedsBase
from scute_sgl.methods import common
from scute_sgl.names import Module


def reader(group: int) -> Callable[[Module, int], tuple[Tensor, Tensor]]:
    """(module, r) -> lora_A (r, in) and lora_B (out, r) of a linear layer, for ``qalora_group_size``."""
    g, name = common.rank(group, "qalora_group_size"), "lora_A.weight"

    def read(module: Module, r: int) -> tuple[Tensor, Tensor]:
        inputs = module.in_features
        if inputs is None:
            hint = "found true, want the base: its widths tell whether A is pooled"
            raise NeedsBase("bad_config", hint, key="use_qalora")
        A, B = module.need(name, r, None), module.need("lora_B.weight", module.out_features, r)
        if A.shape[1] != inputs:
            if A.shape[1] * g != inputs:
                hint = (
                    f"found {tuple(A.shape)}, want ({r}, {inputs}), or ({r}, {inputs} / {g}) with use_qalora; "
                    "the file may belong to a quantised base of other widths, which is not served"
                )
                raise module.error("bad_shape", name, hint)
            A = common.scaled(A, inputs / g / g, module, name).repeat_interleave(g, 1)
        return A, B

    return read
