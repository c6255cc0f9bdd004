"""VB-LoRA: A and B are put together from the vectors of one bank that all modules share.

    F(x) = x W + b + (x A^T) B^T,   each row of A and each column of B is a row of tiles; a tile = sum_k w_k bank[i_k]

vblora_vector_bank (num_vectors, vector_length). vblora_logits_A (r, in / vector_length, num_vectors) and _B
(out / vector_length, r, num_vectors): the topk largest logits choose i, and w is their softmax. With
save_only_topk_weights the file holds i, and w without its last element, which makes their sum 1.

Checked against peft/tuners/vblora/{layer,model}.py of PEFT 0.21.2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from scute_sgl.errors import AdapterError
from scute_sgl.methods import common
from scute_sgl.names import Module, group
from scute_sgl.slots import Adapter, BaseShape, Slots, Term

FIELDS = common.TARGETING | {
    "r": 4,
    "num_vectors": 256,
    "vector_length": 256,
    "topk": 2,
    "save_only_topk_weights": False,
    "bias": "none",
}
NEUTRAL = frozenset({"vblora_dropout", "init_vector_bank_bound", "init_logits_std"})
PARAMETERS = tuple(f"vblora_logits_{m}{form}" for m in "AB" for form in ("", "_topk_indices", "_topk_weights"))
BANK = "vblora_vector_bank"


def read(config: dict, tensors: dict[str, Tensor], base: BaseShape | None) -> Adapter:
    c = common.settings(config, FIELDS, NEUTRAL)
    r, topk = common.rank(c["r"]), common.rank(c["topk"], "topk")
    modules, shared = group(tensors, base, PARAMETERS, (BANK,))
    bank, want = shared.get(BANK), (c["num_vectors"], c["vector_length"])
    if bank is None:
        raise AdapterError("missing_tensor", "not in the file", key=f"base_model.{BANK}")
    if bank.shape != want or not bank.is_floating_point() or 0 in want:
        found = f"found {tuple(bank.shape)} {bank.dtype}, want {want} floating point"
        raise AdapterError("bad_shape", found, key=f"base_model.{BANK}")
    if topk > len(bank):
        raise AdapterError("bad_config", f"found {topk}, want at most the {len(bank)} vectors", key="topk")

    def tiles(module: Module, size: int | None, side: str) -> int | None:
        if size is not None and size % bank.shape[1]:
            hint = f"found {bank.shape[1]}, want a divisor of {size} {side}"
            raise module.error("bad_config", "vector_length", hint)
        return size and size // bank.shape[1]

    def matrix(module: Module, letter: str, *lead: int | None) -> Tensor:
        """lead -> (*lead, vector_length), in at least float32."""
        name = f"vblora_logits_{letter}"
        if c["save_only_topk_weights"]:
            indices = module.need(f"{name}_topk_indices", *lead, topk, integer=True).long()
            weights = common.wide(module.need(f"{name}_topk_weights", *indices.shape[:2], topk - 1))
            weights = torch.cat([weights, 1 - weights.sum(-1, keepdim=True)], -1)
            if indices.numel() and not 0 <= indices.min() <= indices.max() < len(bank):
                hint = f"found {indices.min()} to {indices.max()}, want 0 to {len(bank) - 1}"
                raise module.error("bad_shape", f"{name}_topk_indices", hint)
        else:
            logits, indices = common.wide(module.need(name, *lead, len(bank))).topk(topk)
            weights = logits.softmax(-1)
        if indices.numel() * bank.shape[1] > common.MAX_VALUES:
            raise module.error("too_large", name, f"puts together over {common.MAX_VALUES} values")
        return sum(weights[..., k, None] * bank[indices[..., k]] for k in range(topk))

    def read_one(module: Module) -> Slots:
        common.refuse_embedding(module, "VB-LoRA")
        A = matrix(module, "A", r, tiles(module, module.in_features, "inputs"))
        B = matrix(module, "B", tiles(module, module.out_features, "outputs"), r)
        return Slots(terms=(Term(A.flatten(1), B.mT.flatten(0, 1)),))

    return common.build("VBLORA", config, modules, read_one)
