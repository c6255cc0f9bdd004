"""SHiRA: trained values at few places of the weight.

    F(x) = x W + b + x S^T,   S = round(W + values) - W at the places of shira_indices (output, input), zero elsewhere

PEFT adds the values to W in W's own dtype, so in 16 bit that rounding is a part of what it applies; in float32 it is
the values themselves. The file holds the places, whatever mask chose them, and nothing scales the values.

Checked against peft/tuners/shira/{layer,model}.py of PEFT 0.21.2.
"""

from __future__ import annotations

from torch import Tensor

from scute_sgl.methods import common
from scute_sgl.names import Module, group
from scute_sgl.slots import Adapter, BaseShape, Slots

FIELDS = {"target_modules": None, "r": 32}
NEUTRAL = frozenset({"mask_type", "random_seed"})
PARAMETERS = ("shira_weight", "shira_indices")


def read(config: dict, tensors: dict[str, Tensor], base: BaseShape | None) -> Adapter:
    c = common.settings(config, FIELDS, NEUTRAL)
    r = common.rank(c["r"])

    def read_one(module: Module) -> Slots:
        common.refuse_embedding(module, "SHiRA")
        inputs, outputs = module.in_features, module.out_features
        values = module.need("shira_weight", None if inputs is None else r * (inputs + outputs))
        places = module.tensors.get("shira_indices")
        whole = places is None or not places.is_floating_point()  # PEFT on Windows writes them as float32
        rows, columns = module.need("shira_indices", 2, len(values), integer=whole).long()
        return Slots(structure=common.added_to_weight(module, "shira_indices", rows, columns, values))

    modules, _ = group(tensors, base, PARAMETERS)
    return common.build("SHIRA", config, modules, read_one)
