"""BOFT: a rotation of the input from one or more stages of small blocks, and a scale of the outputs.

    F(x) = ((x R) W) * s + b,   R = M_m ... M_1, M_n = P_n diag(Q_1 ... Q_k) P_n^T,   s = boft_s, which leaves b alone

boft_R (m, in / b, b, b); a block is Q = (I - S) (I + S)^-1, S = (boft_R - boft_R^T) / 2. P_n permutes inputs within
groups of b 2^(n-1): it moves the even half blocks of each group before the odd ones. So R is block-diagonal with blocks
of b 2^(m-1). m is the config's boft_n_butterfly_factor, or 1: PEFT trains one stage where its extension is missing.

Checked against peft/tuners/boft/layer.py of PEFT 0.21.2, whose CUDA extension only makes diag(Q_1 ... Q_k).
"""

from __future__ import annotations

import torch
from torch import Tensor

from scute_sgl.errors import AdapterError
from scute_sgl.methods import common
from scute_sgl.methods.oft import cayley
from scute_sgl.names import Module, group
from scute_sgl.slots import Adapter, BaseShape, Slots

FIELDS = common.TARGETING | {
    "boft_block_size": 4,  # PEFT takes this or the number of blocks and sets the other to 0
    "boft_block_num": 0,
    "boft_n_butterfly_factor": 1,
    "bias": "none",
}
NEUTRAL = frozenset({"boft_dropout"})
PARAMETERS = ("boft_R", "boft_s")
MAX_BLOCK = 1 << 10  # of several stages: R is made whole and has far more values than they


def read(config: dict, tensors: dict[str, Tensor], base: BaseShape | None) -> Adapter:
    c = common.settings(config, FIELDS, NEUTRAL)
    size, number, factor = c["boft_block_size"], c["boft_block_num"], c["boft_n_butterfly_factor"]
    if min(size, number) < 0 or (size == 0) == (number == 0):
        hint = f"found {size} beside boft_block_num={number}, want one of them"
        raise AdapterError("bad_config", hint, key="boft_block_size")
    if not 1 <= factor <= 32:
        raise AdapterError("bad_config", f"found {factor}, want 1 to 32", key="boft_n_butterfly_factor")

    def read_one(module: Module) -> Slots:
        common.refuse_embedding(module, "BOFT")
        packed = module.need("boft_R", None, number or None, size or None, size or None)
        s = module.need("boft_s", module.out_features, 1).flatten()
        stages, blocks, b, b2 = packed.shape
        whole, inputs = b << max(0, stages - 1), module.in_features or blocks * b
        fits = stages in (1, factor) and b == b2 and blocks * b == inputs
        if not fits or inputs % whole or (stages > 1 and b % 2):
            want = f"({factor} or 1, n, b, b) with n b = {inputs}, a multiple of b 2^(stages - 1), and b even"
            raise module.error("bad_shape", "boft_R", f"found {tuple(packed.shape)}, want {want}")
        if stages > 1 and whole > MAX_BLOCK:
            hint = f"{stages} stages make blocks of {whole}, want at most {MAX_BLOCK}"
            raise module.error("too_large", "boft_R", hint)
        R = None
        for n, stage in enumerate(packed.double()):
            M = _stage(cayley((stage - stage.mT) / 2), b << n, whole)
            R = M if R is None else M @ R
        return Slots(rotation=R.to(torch.promote_types(packed.dtype, torch.float32)), scale=s)

    modules, _ = group(tensors, base, PARAMETERS)
    return common.build("BOFT", config, modules, read_one)


def _stage(Q: Tensor, span: int, whole: int) -> Tensor:
    """P diag(Q) P^T as blocks of ``whole``: (n, whole, whole). P permutes within ``span``."""
    b = Q.shape[-1]
    M = torch.stack([torch.block_diag(*blocks) for blocks in Q.view(-1, whole // b, b, b)])
    if span == b:
        return M
    halves = torch.arange(whole).view(-1, span // b, 2, b // 2)  # of every block in every span
    order = halves.transpose(1, 2).flatten()
    return M[:, order][:, :, order]
