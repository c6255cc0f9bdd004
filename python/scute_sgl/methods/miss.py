"""MiSS, and Bone, its name in older releases of PEFT: inputs that are r apart are summed before a small matrix.

    F(x) = x W + b + (x A^T) B^T,   A[k, j] = 1 where j mod r = k, else 0,   B = miss_block^T

A is fixed. With init_weights "mini" the file's (r, mini_r) is repeated along the outputs. With "bat" the file has a
square matrix M_k for each r outputs, which transforms the weight's blocks of r outputs and r inputs:

    F(x) = x W + b + x S^T,   S_kn = W_kn M_k + M_k   with W as (out, in)

This reads W again in every step. Any other init_weights only starts the training.

Checked against peft/tuners/miss/layer.py of PEFT 0.21.2, and bone/layer.py of 0.17.1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from scute_sgl import layout
from scute_sgl.errors import AdapterError
from scute_sgl.methods import common
from scute_sgl.names import Module, group
from scute_sgl.slots import Adapter, BaseShape, BlockAffine, Slots, Term

FIELDS = common.TARGETING | {"r": 64, "mini_r": 1, "init_weights": None, "bias": "none"}
NEUTRAL = frozenset({"miss_dropout"})
PARAMETERS = {"MISS": "miss_block", "BONE": "bone_block"}


def read(config: dict, tensors: dict[str, Tensor], base: BaseShape | None) -> Adapter:
    c = common.settings(config, FIELDS, NEUTRAL)
    r, mini_r = common.rank(c["r"]), common.rank(c["mini_r"], "mini_r")
    init, name = c["init_weights"], PARAMETERS[config["peft_type"]]
    if init not in (None, True, False, "mini", "bat") or (init == "mini" and name == PARAMETERS["BONE"]):
        raise AdapterError("bad_config", f"found {init!r}, want true, false, 'bat' or 'mini'", key="init_weights")
    mini = init == "mini"

    def read_one(module: Module) -> Slots:
        common.refuse_embedding(module, "MiSS")
        inputs, outputs = module.in_features, module.out_features
        if init == "bat":
            return Slots(structure=_block_affine(module, name, r))
        block = module.need(name, r, mini_r if mini else outputs)
        if inputs is not None and r > inputs:
            raise module.error("bad_config", "r", f"found {r}, want at most the {inputs} inputs")
        if mini and outputs is not None:
            if outputs % mini_r:
                raise module.error("bad_config", "mini_r", f"found {mini_r}, want a divisor of {outputs} outputs")
            block = block.repeat(1, outputs // mini_r)
        return Slots(terms=(Term(_pool(r, inputs, block), block.T),))

    modules, _ = group(tensors, base, (name,))
    return common.build("MISS", config, modules, read_one)


def _block_affine(module: Module, name: str, r: int) -> BlockAffine:
    for size, side in ((module.in_features, "inputs"), (module.out_features, "outputs")):
        if size is not None and size % r:
            raise module.error("bad_config", "r", f"found {r}, want a divisor of the {size} {side}")
    if r > layout.BLOCK_AFFINE_INPUTS:
        raise module.error("too_large", "r", f"found {r}, want at most {layout.BLOCK_AFFINE_INPUTS}")
    return BlockAffine(module.need(name, None if module.out_features is None else module.out_features // r, r, r))


def _pool(r: int, inputs: int | None, like: Tensor) -> Tensor:
    """A (r, in) in the dtype of ``like``; without a base, a placeholder on the meta device."""
    if inputs is None:
        return torch.empty(r, 0, dtype=like.dtype, device="meta")
    pool = like.new_zeros(r, inputs)
    columns = torch.arange(inputs)
    pool[columns % r, columns] = 1
    return pool
