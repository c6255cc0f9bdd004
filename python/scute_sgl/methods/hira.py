"""HiRA: every element of the base weight times one of a low-rank matrix, added to it.

    F(x) = x W + b + x S^T,   S = W o (B A)   with W as (out, in), A = hira_A, B = hira_B

S has no low rank, so W is read again in every step. PEFT makes S in float32; here the sums over ranks and inputs are
float32 as well. There is no alpha: the scale is 1.

Checked against peft/tuners/hira/layer.py of PEFT 0.21.2.
"""

from __future__ import annotations

from torch import Tensor

from scute_sgl.methods import common
from scute_sgl.names import Module, Patterns, group
from scute_sgl.slots import Adapter, BaseShape, Hadamard, Slots

FIELDS = common.TARGETING | {"r": 32, "rank_pattern": {}}
NEUTRAL = frozenset({"hira_dropout"})
PARAMETERS = ("hira_A", "hira_B", "hira_embedding_A", "hira_embedding_B")


def read(config: dict, tensors: dict[str, Tensor], base: BaseShape | None) -> Adapter:
    c = common.settings(config, FIELDS, NEUTRAL)
    ranks = Patterns(c["rank_pattern"], "rank_pattern")

    def read_one(module: Module) -> Slots:
        common.refuse_embedding(module, "HiRA")
        r = common.rank(ranks.get(module.file_path, c["r"]), "rank_pattern")
        A = module.need("hira_A", r, module.in_features)
        return Slots(structure=Hadamard(A, module.need("hira_B", module.out_features, r)))

    modules, _ = group(tensors, base, PARAMETERS)
    return common.build("HIRA", config, modules, read_one)
