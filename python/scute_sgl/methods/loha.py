"""LoHa: the elementwise product of two low-rank matrices.

    F(x) = x W + b + (x A^T) B^T,   B A = alpha / r * (w1_a w1_b) o (w2_a w2_b)

Folded to rank r^2: row (p, q) of A is w1_b[p] o w2_b[q], column (p, q) of B is w1_a[:, p] o w2_a[:, q]. Where that
is more than the layer's own rank, the product itself is kept. The file's four matrices have a quarter of the values
at r = 8: a LoHa costs as much as a LoRA of rank r^2.

Checked against peft/tuners/loha/layer.py of PEFT 0.21.2.
"""

from __future__ import annotations

from torch import Tensor

from scute_sgl.linalg import dense
from scute_sgl.methods import common
from scute_sgl.names import Module, group
from scute_sgl.slots import Adapter, BaseShape, Slots, Term

FIELDS = common.TARGETING | {"r": 8, "alpha": 8.0, "rank_pattern": {}, "alpha_pattern": {}}
NEUTRAL = frozenset({"rank_dropout", "module_dropout", "use_effective_conv2d"})
PARAMETERS = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")


def read(config: dict, tensors: dict[str, Tensor], base: BaseShape | None) -> Adapter:
    c = common.settings(config, FIELDS, NEUTRAL)
    rank_and_scale = common.ranks_and_scales(c)

    def read_one(module: Module) -> Slots:
        common.refuse_embedding(module, "LoHa")
        r, scale = rank_and_scale(module)
        a1, a2 = (module.need(f"hada_{w}_a", module.out_features, r) for w in ("w1", "w2"))
        b1, b2 = (module.need(f"hada_{w}_b", r, module.in_features) for w in ("w1", "w2"))
        a1, a2, b1, b2 = common.alike(a1, a2, b1, b2)
        a1 = common.scaled(a1, scale, module, "hada_w1_a")
        if len(a1) != len(a2) or b1.shape != b2.shape:  # possible without a base
            raise module.error("bad_shape", "hada_w2_a", "the two products differ in shape, want equal ones")
        common.check_expanded(min(r * r, len(a1), b1.shape[1]) * (len(a1) + b1.shape[1]), module, "hada_w1_a")
        if r * r > min(len(a1), b1.shape[1]):
            return Slots(terms=(dense((a1 @ b1) * (a2 @ b2)),))
        A = (b1[:, None] * b2).flatten(0, 1)
        B = (a1[:, :, None] * a2[:, None]).flatten(1)
        return Slots(terms=(Term(A, B),))

    modules, _ = group(tensors, base, PARAMETERS)
    common.check_all_expanded(modules, lambda module: rank_and_scale(module)[0] ** 2, "hada_w1_a")
    return common.build("LOHA", config, modules, read_one)
