"""PVeRA: VeRA whose middle is a normal variable in training; when it serves, its mean.

    F(x) = x W + b + ((x A[:r, :in]^T) * d) B[:out]^T * e,   d = pvera_lambda_d[:r], e = pvera_lambda_b

A (2 r, largest in): its second half, and d's, give the variance, which only sampling needs. With sample_at_inference
PEFT adds noise to every answer: refused. A and B are drawn like VeRA's, A with its 2 r rows.

Checked against peft/tuners/pvera/{layer,model}.py of PEFT 0.21.2.
"""

from __future__ import annotations

from torch import Tensor

from scute_sgl import names
from scute_sgl.methods import common, vera
from scute_sgl.names import Module
from scute_sgl.slots import Adapter, BaseShape, Slots

FIELDS = vera.FIELDS
NEUTRAL = frozenset({"pvera_dropout", "d_initial", "generator_seed"})
OFF = common.OFF | {"sample_at_inference": "PVeRA's noise would make every answer another; set it to false"}
PARAMETERS = ("pvera_lambda_b", "pvera_lambda_d")
SHARED = ("pvera_A", "pvera_B")


def read(config: dict, tensors: dict[str, Tensor], base: BaseShape | None) -> Adapter:
    c = common.settings(config, FIELDS, NEUTRAL, OFF)
    r = common.rank(c["r"])
    modules, saved = names.group(tensors, base, PARAMETERS, SHARED)
    A, B = vera.projections(c, (2 * r, r), saved, SHARED, modules, base)
    A = A[:r]

    def read_one(module: Module) -> Slots:
        common.refuse_embedding(module, "PVeRA")
        e, d = module.need("pvera_lambda_b", module.out_features), module.need("pvera_lambda_d", 2 * r)
        return Slots(shared=vera.term(A, B, d[:r], e, module))

    return common.build("PVERA", config, modules, read_one)
