"""PEANuT: a small network of the weight gives one side of a low-rank term. Linear in x.

    F(x) = x W + b + (x A^T) B^T,   A^T = h,   B = scaling * peanut_B
    h = f(W^T peanut_A^T) with W as (out, in); then ``depth`` encoders h = f(h E_k^T), each keeping the h it was given,
    then as many decoders h = f(h D_k^T) + kept, the last kept first

f acts on elements. W^T peanut_A^T must be whole before f sees it: it is summed over the ranks first.

Checked against peft/tuners/peanut/layer.py of PEFT 0.21.2; f is torch's function where ACT2FN of transformers 5.12
has it under that name.
"""

from __future__ import annotations

import torch
from torch import Tensor

from scute_sgl.errors import AdapterError
from scute_sgl.methods import common
from scute_sgl.names import Module, group
from scute_sgl.slots import Adapter, BaseShape, FromWeight, Slots, Term

FIELDS = common.TARGETING | {"r": 32, "depth": 0, "act_fn": "relu", "scaling": 1.0}
NEUTRAL: frozenset[str] = frozenset()
ACTIVATIONS = {
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
    "swish": torch.nn.functional.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "leaky_relu": torch.nn.functional.leaky_relu,
    "linear": lambda h: h,
}
MAX_DEPTH = 64


def read(config: dict, tensors: dict[str, Tensor], base: BaseShape | None) -> Adapter:
    c = common.settings(config, FIELDS, NEUTRAL)
    r, depth, scaling = common.rank(c["r"]), c["depth"], common.number(c["scaling"], "scaling")
    if not 0 <= depth <= MAX_DEPTH:
        raise AdapterError("bad_config", f"found {depth}, want 0 to {MAX_DEPTH}", key="depth")
    if c["act_fn"] not in ACTIVATIONS:
        found = f"found {c['act_fn']!r:.80}, want one of {', '.join(ACTIVATIONS)}"
        raise AdapterError("bad_config", found, key="act_fn")
    f = ACTIVATIONS[c["act_fn"]]
    encoders, decoders = ([f"peanut_{side}coders.{k}.weight" for k in range(depth)] for side in ("en", "de"))

    def read_one(module: Module) -> Slots:
        common.refuse_embedding(module, "PEANuT")
        A = module.need("peanut_A.weight", r, module.out_features)
        B = common.scaled(module.need("peanut_B.weight", module.out_features, r), scaling, module, "peanut_B.weight")
        down, up = ([module.need(name, r, r).double() for name in names] for names in (encoders, decoders))

        def finish(AW: Tensor, b0: Tensor | None) -> tuple[tuple[Term, ...], None]:
            h, kept = f(AW.T), []
            for E in down:
                kept.append(h)
                h = f(h @ E.T)
            for D in up:
                h = f(h @ D.T) + kept.pop()
            return (Term(h.T, B),), None

        return Slots(from_weight=FromWeight(finish, left=A))

    modules, _ = group(tensors, base, ("peanut_A.weight", "peanut_B.weight", *encoders, *decoders))
    return common.build("PEANUT", config, modules, read_one)
