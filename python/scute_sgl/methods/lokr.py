"""LoKr: the Kronecker product of two small matrices, either of which may be a low-rank product.

    F(x) = x W + b + x S^T,   S = alpha / r * kron(w1, w2),   w = w_a w_b where the file splits it

w1 is kept whole, w2 whole or split, whichever has fewer values: no more than the file, but for a w1 that it splits.
What decompose_both and decompose_factor decide shows in the tensors' names and shapes; the scale alpha / r holds even
where nothing has rank r. A w1 of more columns than the op has room for, and a product whose blocks straddle
tensor-parallel shards, is a low-rank term: with w1 = B1 A1 and w2 = B2 A2, A = kron(A1, A2) and B = kron(B1, B2).

Checked against peft/tuners/lokr/layer.py of PEFT 0.21.2.
"""

from __future__ import annotations

from torch import Tensor

from scute_sgl import layout, structured
from scute_sgl.linalg import dense, kronecker_term
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
        if first.A.shape[1] <= layout.KRONECKER_ROWS:
            values = sum(len(factor.B) * factor.A.shape[1] for factor in (first, second))
            common.check_expanded(values, module, "lokr_w1")
            return Slots(structure=structured.kronecker(first, second))
        rank = min(len(first.A) * len(second.A), inputs, outputs)
        if rank > common.MAX_RANK:
            hint = f"folded it has rank {rank}, want at most {common.MAX_RANK}"
            raise module.error("too_large", "lokr_w1", hint)
        common.check_expanded(rank * (inputs + outputs), module, "lokr_w1")
        return Slots(terms=(kronecker_term(first, second),))

    modules, _ = group(tensors, base, PARAMETERS)
    return common.build("LOKR", config, modules, read_one)


def _factor(module: Module, name: str, r: int) -> Term:
    """One of the two matrices as a term of the least rank that shapes allow, in at least float32."""
    whole = module.take(name, None, None)
    if whole is None:
        B, A = common.alike(module.need(f"{name}_a", None, r), module.need(f"{name}_b", r, None))
        if r < min(len(B), A.shape[1]):
            return Term(A, B)
        whole = B @ A
    return dense(common.wide(whole))
