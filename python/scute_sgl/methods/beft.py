"""BEFT: a bias.

    F(x) = x W + b,   b = base bias + beft_bias; a base layer without a bias gets one

Checked against peft/tuners/beft/layer.py of PEFT 0.21.2.
"""

from __future__ import annotations

from torch import Tensor

from scute_sgl.methods import common
from scute_sgl.names import Module, group
from scute_sgl.slots import Adapter, BaseShape, Slots

FIELDS = {"target_modules": None}
NEUTRAL: frozenset[str] = frozenset()
PARAMETERS = ("beft_bias",)


def read(config: dict, tensors: dict[str, Tensor], base: BaseShape | None) -> Adapter:
    common.settings(config, FIELDS, NEUTRAL)

    def read_one(module: Module) -> Slots:
        common.refuse_embedding(module, "BEFT")
        return Slots(bias=module.need("beft_bias", 1, module.out_features).flatten())

    modules, _ = group(tensors, base, PARAMETERS)
    return common.build("BEFT", config, modules, read_one)
