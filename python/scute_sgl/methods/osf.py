"""OSF: trains the smallest singular triplets of W and keeps the others.

    F(x) = x W + b + (x A^T) B^T - x L^T,   A = V_low (k, in),   B = U_low * S_low (out, k)

L (out, in) is the part of W that its own k smallest triplets make, a second term of rank k; k is the smaller side of W
less ``effective_rank`` (half of it by default). So an adapter is about as large as W itself, in each module.

Checked against peft/tuners/osf/{layer,model,utils}.py of PEFT 0.21.2.
"""

from __future__ import annotations

from torch import Tensor

from scute_sgl.errors import AdapterError
from scute_sgl.linalg import product, without_singular
from scute_sgl.methods import common
from scute_sgl.names import MAX_PATTERNS, Module, compile_pattern, group
from scute_sgl.slots import Adapter, BaseShape, FromWeight, Slots, Term

FIELDS = {"target_modules": None, "effective_rank": None, "rank_pattern": None}
NEUTRAL = frozenset({"target_svd_config"})
PARAMETERS = ("osf_svd_params.U_low", "osf_svd_params.S_low", "osf_svd_params.V_low")


def read(config: dict, tensors: dict[str, Tensor], base: BaseShape | None) -> Adapter:
    c = common.settings(config, FIELDS, NEUTRAL)
    pattern = {} if c["rank_pattern"] is None else c["rank_pattern"]
    if not isinstance(pattern, dict) or len(pattern) > MAX_PATTERNS:
        found = f"found {pattern!r:.80}, want up to {MAX_PATTERNS} patterns with their ranks"
        raise AdapterError("bad_config", found, key="rank_pattern")
    patterns = [(compile_pattern(key, "rank_pattern"), value) for key, value in pattern.items()]

    def read_one(module: Module) -> Slots:
        common.refuse_embedding(module, "OSF")
        kept = next((value for rule, value in patterns if rule.search(module.file_path)), c["effective_rank"])
        k = None
        if module.in_features is not None:
            side = min(module.in_features, module.out_features)
            k = side - _kept(kept, side)
        S = module.need("osf_svd_params.S_low", k)
        if not len(S):
            raise module.error("bad_config", "effective_rank", "keeps all of the weight, want something to train")
        U = module.need("osf_svd_params.U_low", module.out_features, len(S))
        V = module.need("osf_svd_params.V_low", len(S), module.in_features)
        lowest = slice(0, len(S))
        less = FromWeight(lambda W, b0: ((without_singular(W, lowest),), None), cancels=True)
        return Slots(terms=(Term(V, product(U, S)),), from_weight=less)

    modules, _ = group(tensors, base, PARAMETERS)
    return common.build("OSF", config, modules, read_one)


def _kept(value: object, side: int) -> int:
    """How many triplets stay: half if it is not said, a float up to 1 as a share, else a number."""
    if value is None:
        return side // 2
    number = common.number(value, "effective_rank")
    number = int(side * number) if isinstance(value, float) and 0 < value <= 1 else int(number)
    return max(0, min(side, number))
