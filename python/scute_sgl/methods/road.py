"""RoAd: turns and scales pairs of outputs.

    F(x) = mix(x W + b),   mix(y) = y * f1 + (-second, first) * f2,   f1 = alpha cos(theta),   f2 = alpha sin(theta)

Output a of a group of ``group_size`` and output a + group_size / 2 are a pair. road_1 has one alpha and theta for a
pair, road_2 one for each output, road_4 has two for each output: of every group, first those of f1, then those of f2.
The base's bias is mixed too.

Checked against peft/tuners/road/{layer,config}.py of PEFT 0.21.2.
"""

from __future__ import annotations

from torch import Tensor

from scute_sgl.errors import AdapterError
from scute_sgl.methods import common
from scute_sgl.names import Module, group
from scute_sgl.slots import Adapter, BaseShape, Mix, Slots

FIELDS = {"target_modules": None, "variant": "road_1", "group_size": 64}
NEUTRAL: frozenset[str] = frozenset()
PARAMETERS = ("road_theta", "road_alpha")
EACH = {"road_1": 0.5, "road_2": 1, "road_4": 2}  # angles for an output


def read(config: dict, tensors: dict[str, Tensor], base: BaseShape | None) -> Adapter:
    c = common.settings(config, FIELDS, NEUTRAL)
    variant, size = c["variant"], common.rank(c["group_size"], "group_size")
    if variant not in EACH:
        raise AdapterError("bad_config", f"found {variant!r:.80}, want one of {', '.join(EACH)}", key="variant")
    if size % 2:
        raise AdapterError("bad_config", f"found {size}, want an even number", key="group_size")

    def read_one(module: Module) -> Slots:
        common.refuse_embedding(module, "RoAd")
        outputs = module.out_features
        theta = module.need("road_theta", None if outputs is None else int(EACH[variant] * outputs))
        alpha = module.need("road_alpha", len(theta))
        if int(len(theta) / EACH[variant]) % size or not len(theta):
            hint = f"found {size}, want a divisor of the {int(len(theta) / EACH[variant])} outputs"
            raise module.error("bad_config", "group_size", hint)
        theta, alpha = theta.double(), alpha.double()
        f1, f2 = alpha * theta.cos(), alpha * theta.sin()
        if variant == "road_4":
            f1, f2 = (f.view(-1, 2, size)[:, i].flatten() for i, f in enumerate((f1, f2)))
        return Slots(structure=Mix(f1, f2, size, one_each=variant == "road_1"))

    modules, _ = group(tensors, base, PARAMETERS)
    return common.build("ROAD", config, modules, read_one)
