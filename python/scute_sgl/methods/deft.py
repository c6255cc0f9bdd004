"""DEFT: takes a subspace of outputs out of W and puts a trained matrix there.

    F(x) = x W + b + (x A^T) B^T,   A = kappa R - P^T W   with W as (out, in),   B = Q
    relu: Q = deft_P, P = relu(deft_P)     qr: Q = P = the orthogonal factor of deft_P

kappa = alpha / r with an alpha, else 1. With para there is no R: the subspace is only removed. R starts as
P^T W / kappa, so A is a small difference of large numbers: it is formed in float64. PEFT factors deft_P in float32
on every call, and R belongs to the signs that Householder's method gives; the same call is made here.

Checked against peft/tuners/deft/layer.py of PEFT 0.21.2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from scute_sgl.errors import AdapterError
from scute_sgl.methods import common
from scute_sgl.names import Module, group
from scute_sgl.slots import Adapter, BaseShape, FromWeight, Slots, Term

FIELDS = common.TARGETING | {"r": 8, "decomposition_method": "relu", "alpha": None, "para": False, "bias": "none"}
NEUTRAL = frozenset({"init_scale", "deft_dropout"})
PARAMETERS = ("deft_P", "deft_R")


def read(config: dict, tensors: dict[str, Tensor], base: BaseShape | None) -> Adapter:
    c = common.settings(config, FIELDS, NEUTRAL)
    r, method = common.rank(c["r"]), c["decomposition_method"]
    alpha = None if c["alpha"] is None else common.number(c["alpha"], "alpha")
    if method not in ("relu", "qr"):
        raise AdapterError("bad_config", f"found {method!r:.80}, want relu or qr", key="decomposition_method")

    def read_one(module: Module) -> Slots:
        common.refuse_embedding(module, "DEFT")
        rank = min(r, module.out_features or r)
        Q = module.need("deft_P", module.out_features, rank)
        P = Q.relu()
        if method == "qr":
            Q = P = torch.linalg.qr(Q.float()).Q
        R = None if c["para"] else module.need("deft_R", rank, module.in_features).double()
        kappa = alpha / rank if alpha else 1.0  # PEFT takes 0 for none

        def finish(removed: Tensor, b0: Tensor | None) -> tuple[tuple[Term, ...], None]:
            return (Term(-removed if R is None else kappa * R - removed, Q),), None

        return Slots(from_weight=FromWeight(finish, left=P.T))

    modules, _ = group(tensors, base, PARAMETERS)
    return common.build("DEFT", config, modules, read_one)
