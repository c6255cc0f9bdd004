"""TinyLoRA: singular vectors of the base, fixed, with a small trained mixture of random matrices between them.

    F(x) = x W + b + (x A^T) B^T,   A = tinylora_A,   B = tinylora_B R,   R = sum_i v[i] P[i]

An embedding multiplies from the other side: its A is tinylora_B^T and its B is tinylora_A^T R^T. The file holds A and
B, v for each group of modules, and P (u, r, r) with save_projection; without, P is drawn from N(0, 1 / r), with
projection_seed plus the module's number, and rounded to the base's dtype. Groups take equally many modules in order;
weight_tying 0 makes one of each module, 1 one of all.

Checked against peft/tuners/tinylora/{layer,model}.py of PEFT 0.21.2.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from scute_sgl.errors import AdapterError
from scute_sgl.methods import common
from scute_sgl.names import Module, counted_targets, group
from scute_sgl.slots import Adapter, BaseShape, Slots, Term

FIELDS = {name: None for name in ("target_modules", "layers_to_transform", "layers_pattern")} | {
    "r": 2,
    "u": 64,
    "weight_tying": 0.0,
    "projection_seed": 42,
    "save_projection": True,
    "bias": "none",
}
NEUTRAL = frozenset({"init_v_bound", "tinylora_dropout"})
PARAMETERS = ("tinylora_A", "tinylora_B", "tinylora_P")
VECTOR = re.compile(r"base_model\.tinylora_v\.\d+")
MAX_DRAW = 1 << 28  # elements of one drawn P: u and r come from the file


def read(config: dict, tensors: dict[str, Tensor], base: BaseShape | None) -> Adapter:
    c = common.settings(config, FIELDS, NEUTRAL)
    r, u, tying = common.rank(c["r"]), common.rank(c["u"], "u"), c["weight_tying"]
    if not 0 <= tying <= 1:
        raise AdapterError("bad_config", f"found {tying}, want 0 to 1", key="weight_tying")
    vectors = tuple(key.removeprefix("base_model.") for key in tensors if VECTOR.fullmatch(key))
    modules, shared = group(tensors, base, PARAMETERS, vectors)
    numbers = {path: i for i, path in enumerate(counted_targets(config, base) if base else ())}
    groups = max(1, round(len(numbers) * (1.0 - tying)))
    if base is not None:
        if extra := shared.keys() - {f"tinylora_v.{g}" for g in range(groups)}:
            raise AdapterError("unknown_key", f"want vectors of {groups} groups", key=f"base_model.{min(extra)}")
        if odd := numbers.keys() ^ {module.path for module in modules if module.adapted}:
            # For a module that a file lacks, PEFT would take the singular vectors of the base that it loads on.
            hint = "found only one of the config's targets and the file naming this module"
            raise AdapterError("bad_config", hint, module=min(odd), key="target_modules")

    def vector(number: int) -> Tensor:
        name = f"tinylora_v.{min(number // max(1, len(numbers) // groups), groups - 1)}"
        v = shared.get(name)
        if v is None:
            raise AdapterError("missing_tensor", "not in the file", key=f"base_model.{name}")
        if v.shape != (u,) or not v.is_floating_point():
            found = f"found {tuple(v.shape)} {v.dtype}, want ({u},) floating point"
            raise AdapterError("bad_shape", found, key=f"base_model.{name}")
        return common.wide(v)

    def read_one(module: Module) -> Slots:
        inputs, outputs = module.in_features, module.out_features
        r_here = min(r, inputs or r, outputs or r)
        sizes = (outputs, inputs) if module.is_embedding else (inputs, outputs)
        A, B = module.need("tinylora_A", r_here, sizes[0]), module.need("tinylora_B", sizes[1], r_here)
        P = module.need("tinylora_P", u, r_here, r_here) if c["save_projection"] else None
        if base is None:  # which vector is this module's is not known: placeholders
            return Slots(terms=(Term(A.to("meta"), B.to("meta")),))
        number = numbers[module.path]
        P = draw(c["projection_seed"] + number, u, r_here).to(base.dtype) if P is None else P
        R = torch.einsum("i,ijk->jk", *common.alike(vector(number), P))
        if module.is_embedding:
            return Slots(terms=(Term(B.T, A.T.to(R) @ R.T),))
        return Slots(terms=(Term(A, B.to(R) @ R),))

    return common.build("TINYLORA", config, modules, read_one)


def draw(seed: int, u: int, r: int) -> Tensor:
    """P (u, r, r) as PEFT draws it, float32."""
    if not 0 <= seed < 1 << 63:
        raise AdapterError("bad_config", f"found {seed} for a module, want 0 <= seed < 2**63", key="projection_seed")
    if u * r * r > MAX_DRAW:
        raise AdapterError("too_large", f"{u} projections of rank {r}; want at most {MAX_DRAW} values", key="u")
    return torch.normal(0.0, 1.0 / r**0.5, (u, r, r), generator=torch.Generator().manual_seed(seed))
