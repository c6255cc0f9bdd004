"""LoKr: the Kronecker product of two small matrices, either of which may be a low-rank product.

    F(x) = x W + b + (x A^T) B^T,   B A = alpha / r * kron(w1, w2),   w = w_a w_b where the file splits it

Folded: with w1 = B1 A1 and w2 = B2 A2, A = kron(A1, A2) and B = kron(B1, B2) of rank(w1) * rank(w2); a matrix that is
not split is itself times an identity. Where that is more than the layer's own rank, the product itself is kept. The
folded form is exact but has far more values than the file. What decompose_both and decompose_factor decide shows in
the tensors' names and shapes; the scale alpha / r holds even where nothing has rank r.

Checked against peft/tuners/lokr/layer.py of PEFT 0.21.2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from scute_sgl.methods import common
from scute_sgl.names import Module, group
from scute_sgl.slots import Adapter, BaseShape, Slots, Term

FIELDS = common.TARGETING | {"r": 8, "alpha": 8.0, "rank_pattern": {}, "alpha_pattern": {}}
NEUTRAL = frozenset(
    "rank_dropout rank_dropout_scale module_dropout use_effective_conv2d decompose_both decompose_factor".split()
)
PARAMETERS = ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b")


def read(config: dict, tensors: dict[str, Tensor], base: BaseShape | None) -> Adapter:
    c = common.settings(config, FIELDS, NEUTRAL)
    rank_and_scale = common.ranks_and_scales(c)

    def read_one(module: Module) -> Slots:
        common.refuse_embedding(module, "LoKr")
        r, scale = rank_and_scale(module)
        first, second = _factor(module, "lokr_w1", r), _factor(module, "lokr_w2", r)
        inputs = first.A.shape[1] * second.A.shape[1]
        outputs = len(first.B) * len(second.B)
        if (inputs, outputs) != (module.in_features or inputs, module.out_features or outputs):
            want = f"{module.in_features} and {module.out_features}"
            hint = f"found a product of {inputs} inputs and {outputs} outputs, want {want}"
            raise module.error("bad_shape", "lokr_w1", hint)
        first = Term(first.A, common.scaled(first.B, scale, module, "lokr_w1"))
        rank = len(first.A) * len(second.A)
        if min(rank, inputs, outputs) > common.MAX_RANK:
            hint = f"folded it has rank {min(rank, inputs, outputs)}, want at most {common.MAX_RANK}"
            raise module.error("too_large", "lokr_w1", hint)
        if rank > min(inputs, outputs):
            return Slots(terms=(common.dense(torch.kron(first.B @ first.A, second.B @ second.A)),))
        return Slots(terms=(Term(torch.kron(first.A, second.A), torch.kron(first.B, second.B)),))

    modules, _ = group(tensors, base, PARAMETERS)
    return common.build("LOKR", config, modules, read_one)


def _factor(module: Module, name: str, r: int) -> Term:
    """One of the two matrices as a term of the least rank that shapes allow, in at least float32."""
    whole = module.take(name, None, None)
    if whole is None:
        B, A = common.wide(module.need(f"{name}_a", None, r)), common.wide(module.need(f"{name}_b", r, None))
        if r < min(len(B), A.shape[1]):
            return Term(A, B)
        whole = B @ A
    return common.dense(common.wide(whole))
