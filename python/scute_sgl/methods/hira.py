"""HiRA: every element of the base weight times one of a low-rank matrix, added to it.

    F(x) = x W + b + x S^T,   S = W o (B A)   with W as (out, in), A = hira_A, B = hira_B

S has no low rank, so W is read again in every step. PEFT makes S in float32; here the sums over ranks and inputs are
float32 as well. There is no alpha: the scale is 1, whatever the rank. So either rank that a config names is taken: PEFT
gives a layer's first adapter the rank r even where rank_pattern names another, and later ones that.

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
    r = common.rank(c["r"])
    ranks = Patterns(c["rank_pattern"], "rank_pattern")

    def read_one(module: Module) -> Slots:
        if module.is_embedding:
            hint = "HiRA of an embedding is not served; train linear layers only"
            raise module.error("unsupported_method", next(iter(module.tensors), ""), hint)
        named = r, common.rank(ranks.get(module.file_path, r), "rank_pattern")
        A = module.need("hira_A", None, module.in_features)
        if len(A) not in named:
            raise module.error("bad_shape", "hira_A", f"found rank {len(A)}, want {' or '.join(map(str, {*named}))}")
        return Slots(structure=Hadamard(A, module.need("hira_B", module.out_features, len(A))))

    modules, _ = group(tensors, base, PARAMETERS)
    return common.build("HIRA", config, modules, read_one)
