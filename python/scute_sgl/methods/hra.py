"""HRA: a chain of Householder reflections of the input, at most r of them.

    F(x) = x H^T W + b,   H = (I - 2 u_1 u_1^T) ... (I - 2 u_r u_r^T) = I - U T U^T,   u_k: columns of hra_u, normalised
         = x W + b + (x A^T) B^T,   A = U^T,   B = -(W U) T   with W as (out, in)

T is upper triangular: T_kk = 2 and T[:k, k] = -2 T[:k, :k] U[:, :k]^T u_k (the compact WY form of Bischof and Van Loan,
"The WY representation for products of Householder matrices"). With apply_GS the columns are made orthogonal first, by
the modified Gram-Schmidt process, and T = 2 I.

Checked against peft/tuners/hra/layer.py of PEFT 0.21.2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from scute_sgl.methods import common
from scute_sgl.names import Module, group
from scute_sgl.slots import Adapter, BaseShape, FromWeight, Slots, Term

FIELDS = common.TARGETING | {"r": 8, "apply_GS": False, "bias": "none"}
NEUTRAL: frozenset[str] = frozenset()
PARAMETERS = ("hra_u",)


def read(config: dict, tensors: dict[str, Tensor], base: BaseShape | None) -> Adapter:
    c = common.settings(config, FIELDS, NEUTRAL)
    r = common.rank(c["r"])

    def read_one(module: Module) -> Slots:
        common.refuse_embedding(module, "HRA")
        U = module.need("hra_u", module.in_features, r).double()
        U = orthogonal(U) if c["apply_GS"] else U / U.norm(dim=0)
        if not U.isfinite().all():
            raise module.error("bad_config", "hra_u", "found a column without a direction, want r that reflect")
        T = 2 * torch.eye(r, dtype=U.dtype) if c["apply_GS"] else compact(U)
        # PEFT starts from pairs of equal columns, which reflect twice: little is left of their terms.
        return Slots(from_weight=FromWeight(lambda WU, b0: ((Term(U.T, -(WU @ T)),), None), right=U, cancels=True))

    modules, _ = group(tensors, base, PARAMETERS)
    return common.build("HRA", config, modules, read_one)


def compact(U: Tensor) -> Tensor:
    """T of I - U T U^T, the product of the reflections along the columns of U, in their order."""
    products, T = U.T @ U, torch.zeros(U.shape[1], U.shape[1], dtype=U.dtype)
    for k in range(len(T)):
        T[:k, k] = -2 * T[:k, :k] @ products[:k, k]
        T[k, k] = 2
    return T


def orthogonal(U: Tensor) -> Tensor:
    """The columns of U, each without its parts along those before it, normalised."""
    Q = U.clone()
    for k in range(Q.shape[1]):
        for j in range(k):
            Q[:, k] -= Q[:, j] @ Q[:, k] * Q[:, j]
        Q[:, k] /= Q[:, k].norm()
    return Q
