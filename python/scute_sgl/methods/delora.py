"""DeLoRA: LoRA whose directions have unit length, with one strength per module.

    F(x) = x W + b + (x A^T) B^T,   A = delora_A * delora_w_norm,   B = lambda / r * delora_B / (|A_k| |B_k|)

|A_k| is the norm of a row of delora_A, |B_k| of a column of delora_B, each at least 1e-4. delora_w_norm (in,) holds
the norms of the base weight's columns that the adapter was trained with. The config's delora_lambda and
lambda_pattern only start the training; the file holds the trained lambda.

Checked against peft/tuners/delora/layer.py of PEFT 0.21.2.
"""

from __future__ import annotations

from torch import Tensor

from scute_sgl.methods import common
from scute_sgl.names import Module, Patterns, group
from scute_sgl.slots import Adapter, BaseShape, Slots, Term

FIELDS = common.TARGETING | {"r": 8, "rank_pattern": {}, "bias": "none"}
NEUTRAL = frozenset({"delora_lambda", "lambda_pattern", "module_dropout"})
PARAMETERS = ("delora_A", "delora_B", "delora_lambda", "delora_w_norm")
LEAST_NORM = 1e-4


def read(config: dict, tensors: dict[str, Tensor], base: BaseShape | None) -> Adapter:
    c = common.settings(config, FIELDS, NEUTRAL)
    ranks = Patterns(c["rank_pattern"], "rank_pattern")

    def read_one(module: Module) -> Slots:
        common.refuse_embedding(module, "DeLoRA")
        r = common.rank(ranks.get(module.file_path, c["r"]), "rank_pattern")
        A = common.wide(module.need("delora_A", r, module.in_features))
        B = common.wide(module.need("delora_B", module.out_features, r))
        strength = common.wide(module.need("delora_lambda", 1)) / r
        w_norm = module.need("delora_w_norm", A.shape[1])
        norms = A.norm(dim=1).clamp(min=LEAST_NORM) * B.norm(dim=0).clamp(min=LEAST_NORM)
        return Slots(terms=(Term(A * w_norm, B * (strength / norms)),))

    modules, _ = group(tensors, base, PARAMETERS)
    return common.build("DELORA", config, modules, read_one)
