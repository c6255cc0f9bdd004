"""OFT: a block-diagonal rotation of the input.

    F(x) = (x R) W + b,   R = diag(R_1 ... R_n), each (b, b); one block for all with block_share

A block comes from its skew matrix Q, whose strict upper triangle the file holds row by row. With t terms:
    exact Cayley (use_cayley_neumann false)   R = (I - Q) (I + Q)^-1
    Cayley-Neumann since PEFT 0.18            R = I + 2Q + ... + 2Q^(t-2) + Q^(t-1); 3 terms count as 4,
                                              2 terms are I + 2Q, one is I
    Cayley-Neumann of 0.16 and 0.17           R = I + 2Q + ... + 2Q^(t-1)
The two Neumann series approximate the transpose of the exact form; that is how PEFT defines them. coft first
shrinks Q to a Frobenius norm of eps / sqrt(n).

Checked against peft/tuners/oft/layer.py of PEFT 0.21.2, and of 0.17.1 for the older series. The layouts before
0.16 (oft_r, oft_s) are refused; today's PEFT loads them as the identity.
"""

from __future__ import annotations

import math
import re

import torch
from torch import Tensor

from scute_sgl.errors import AdapterError
from scute_sgl.methods import common
from scute_sgl.names import Module, group
from scute_sgl.slots import Adapter, BaseShape, Slots

FIELDS = common.TARGETING | {
    "r": 0,  # r and oft_block_size are read from the tensors: PEFT adjusts them to each layer
    "oft_block_size": 32,
    "coft": False,
    "eps": 6e-5,
    "block_share": False,
    "use_cayley_neumann": True,
    "num_cayley_neumann_terms": 5,
    "bias": "none",
}
NEUTRAL = frozenset({"module_dropout"})
PARAMETERS = ("oft_R.weight", "oft_embedding_R.weight", "oft_r", "oft_s")


def read(config: dict, tensors: dict[str, Tensor], base: BaseShape | None) -> Adapter:
    c = common.settings(config, FIELDS, NEUTRAL)
    terms = c["num_cayley_neumann_terms"]
    if not 1 <= terms <= 100:
        raise AdapterError("bad_config", f"found {terms}, want 1 to 100", key="num_cayley_neumann_terms")
    if c["eps"] < 0:
        raise AdapterError("bad_config", f"found {c['eps']}, want at least 0", key="eps")
    old = any(key.endswith((".oft_r", ".oft_s")) for key in tensors)
    if not old and c["use_cayley_neumann"]:
        series = _series(config, terms)

    def read_one(module: Module) -> Slots:
        if "oft_embedding_R.weight" in module.tensors or module.is_embedding:
            hint = "OFT rotates an embedding's output, which is not served"
            raise module.error("unsupported_method", "oft_embedding_R.weight", hint)
        if old:
            hint = "written by PEFT 0.15 or older; train again with 0.18 or newer"
            raise module.error("unsupported_method", next(iter(module.tensors)), hint)
        packed = module.need("oft_R.weight", None, None)
        Q = skew(packed.double(), _block_size(module, packed, c["block_share"]))
        if c["coft"]:
            norm, limit = torch.linalg.matrix_norm(Q)[:, None, None], c["eps"] / math.sqrt(len(Q))
            Q = torch.where(norm <= limit, Q, Q * (limit / norm))
        R = neumann(Q, series) if c["use_cayley_neumann"] else cayley(Q)
        return Slots(rotation=R.to(torch.promote_types(packed.dtype, torch.float32)))

    modules, _ = group(tensors, base, PARAMETERS)
    return common.build("OFT", config, modules, read_one)


def skew(packed: Tensor, size: int) -> Tensor:
    rows, columns = torch.triu_indices(size, size, 1)
    Q = packed.new_zeros(len(packed), size, size)
    Q[:, rows, columns] = packed
    return Q - Q.mT


def cayley(Q: Tensor) -> Tensor:
    identity = torch.eye(Q.shape[-1], dtype=Q.dtype)
    return torch.linalg.solve(identity + Q, identity - Q, left=False)


def neumann(Q: Tensor, coefficients: list[float]) -> Tensor:
    R = power = torch.eye(Q.shape[-1], dtype=Q.dtype).expand_as(Q)
    for coefficient in coefficients[1:]:
        power = power @ Q
        R = R + coefficient * power
    return R


def _series(config: dict, terms: int) -> list[float]:
    """Coefficients of Q^0, Q^1 ... The config field peft_version exists since 0.18."""
    if "use_cayley_neumann" not in config:
        raise AdapterError("bad_config", "not in the config; want it stated", key="use_cayley_neumann")
    version = str(config.get("peft_version") or "0.17")
    match = re.match(r"(\d+)\.(\d+)", version)
    known = match and not ("dev" in version and match[0] in ("0.17", "0.18"))  # between the two series
    if not known:
        raise AdapterError("bad_config", f"found {version!r}, want a release of PEFT", key="peft_version")
    if (int(match[1]), int(match[2])) < (0, 18):
        return [1.0] + [2.0] * (terms - 1)
    if terms <= 2:
        return [1.0, 2.0][:terms]
    return [1.0] + [2.0] * (max(terms, 4) - 2) + [1.0]


def _block_size(module: Module, packed: Tensor, share: bool) -> int:
    blocks, triangle = packed.shape
    size = (1 + math.isqrt(1 + 8 * triangle)) // 2
    width = module.in_features or (0 if share else blocks * size)
    fits = size > 1 and size * (size - 1) // 2 == triangle
    if not fits or (blocks != 1 or width % size if share else blocks * size != width):
        want = f"({1 if share else 'n'}, b (b - 1) / 2) with blocks of b that fill {module.in_features or 'the'} inputs"
        raise module.error("bad_shape", "oft_R.weight", f"found {tuple(packed.shape)}, want {want}")
    return size
