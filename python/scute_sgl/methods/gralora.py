"""GraLoRA: k x k blocks of the weight, each with a low-rank term of its own, and a plain LoRA beside them if wanted.

    F(x) = x W + b + (x A^T) B^T,   rank k r (+ hybrid_r), scale alpha / (r + hybrid_r) in B

gralora_A (k, in / k, r) and gralora_B (k, r, out / k): block n of the inputs reaches block j of the outputs through
the r / k columns j of A[n] and the r / k rows n of B[j]. A and B above hold zeros where blocks do not meet.

Checked against peft/tuners/gralora/layer.py of PEFT 0.21.2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from scute_sgl.errors import AdapterError
from scute_sgl.methods import common
from scute_sgl.names import Module, group
from scute_sgl.slots import Adapter, BaseShape, Slots, Term

FIELDS = {name: None for name in ("target_modules", "layers_to_transform", "layers_pattern")} | {
    "r": 32,
    "gralora_k": 2,
    "hybrid_r": 0,
    "alpha": 64.0,
    "bias": "none",
}
NEUTRAL = frozenset({"gralora_dropout"})
PARAMETERS = ("gralora_A", "gralora_B", "gralora_A_general.weight", "gralora_B_general.weight")


def read(config: dict, tensors: dict[str, Tensor], base: BaseShape | None) -> Adapter:
    c = common.settings(config, FIELDS, NEUTRAL)
    r, k, hybrid_r = common.rank(c["r"]), common.rank(c["gralora_k"], "gralora_k"), c["hybrid_r"]
    if r % k:
        raise AdapterError("bad_config", f"found {r}, want a multiple of gralora_k={k}", key="r")
    if hybrid_r:
        common.rank(hybrid_r, "hybrid_r")
    common.rank(k * r + hybrid_r, "gralora_k * r + hybrid_r")
    scale = common.number(c["alpha"], "alpha") / (r + hybrid_r)

    def read_one(module: Module) -> Slots:
        common.refuse_embedding(module, "GraLoRA")
        inputs, outputs = module.in_features, module.out_features
        for size, side in ((inputs, "inputs"), (outputs, "outputs")):
            if size is not None and size % k:
                raise module.error("bad_config", "gralora_k", f"found {k}, want a divisor of {size} {side}")
        A = module.need("gralora_A", k, inputs and inputs // k, r)
        B = common.scaled(module.need("gralora_B", k, r, outputs and outputs // k), scale, module, "gralora_B")
        B = torch.block_diag(*B.mT)  # its columns run over (j, n, r / k), the rows of A over (n, j, r / k)
        B = B.view(len(B), k, k, r // k).transpose(1, 2).reshape(len(B), k * r)
        terms = (Term(torch.block_diag(*A.mT), B),)
        if hybrid_r:
            name = "gralora_B_general.weight"
            A = module.need("gralora_A_general.weight", hybrid_r, inputs)
            terms += (Term(A, common.scaled(module.need(name, outputs, hybrid_r), scale, module, name)),)
        return Slots(terms=terms)

    modules, _ = group(tensors, base, PARAMETERS)
    return common.build("GRALORA", config, modules, read_one)
