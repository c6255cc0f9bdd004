"""GLoRA: A, B, C, D and E, each a low-rank matrix, a vector, a constant or nothing, change weight and bias.

    F(x) = (x W) * s + b + (x 1) B^T,   s = 1 + A (out,),   1 = ones (in, 1),   B (out, 1)
    F(x) = x W + b + x S^T + (x Xu_B^T) Xd_B^T,   S = W o (Xd_A Xu_A)   with config_A_B="lora", PEFT's default
    b = b0 + b0 * D + E + W C   with W as (out, in), if the layer has a bias b0

S reads W again in every step. A path that is switched off, and C, D and E of a layer without a bias, are zeros in the
file. In 16 bit PEFT rounds the sum of W and its changes once more; here it stays exact.

Checked against peft/tuners/glora/layer.py of PEFT 0.21.2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from scute_sgl.errors import AdapterError
from scute_sgl.methods import common
from scute_sgl.names import Module, group
from scute_sgl.slots import Adapter, BaseShape, FromWeight, Hadamard, Slots, Term

FIELDS = {"target_modules": None, "r": 8, "bias": "none"}
FIELDS |= {"config_A_B": "lora", "config_C": "lora", "config_D_E": "constant"}
FORMS = {
    "config_A_B": ("lora", "vector", "constant", "none"),
    "config_C": ("lora", "vector", "none"),
    "config_D_E": ("vector", "constant", "none"),
}
NEUTRAL: frozenset[str] = frozenset()
PARAMETERS = tuple(f"glora_{path}.{name}" for path in "ABCDE" for name in ("X", "Xd", "Xu", "zeros"))


def read(config: dict, tensors: dict[str, Tensor], base: BaseShape | None) -> Adapter:
    c = common.settings(config, FIELDS, NEUTRAL)
    r = common.rank(c["r"])
    for name, forms in FORMS.items():
        if c[name] not in forms:
            raise AdapterError("bad_config", f"found {c[name]!r:.80}, want one of {', '.join(forms)}", key=name)

    def read_one(module: Module) -> Slots:
        common.refuse_embedding(module, "GLoRA")
        inputs, outputs = module.in_features, module.out_features
        if matrices := c["config_A_B"] == "lora":
            A, B = (_factors(module, name, r) for name in "AB")
        else:
            A = _path(module, "A", c["config_A_B"], (outputs, 1), (outputs, inputs))
            size = outputs if A is None else len(A)  # which without a base A alone tells
            B = _path(module, "B", c["config_A_B"], (size, 1), (outputs, inputs))
        D, E = (_path(module, name, c["config_D_E"], (outputs,), (outputs,), biased=True) for name in "DE")
        C = _path_c(module, c["config_C"], r)
        scale, terms, structure, from_weight = None, (), None, None
        if matrices:
            terms, structure = (Term(*B),), Hadamard(*A)
        elif A is not None:
            outputs = outputs or 1  # without a base a constant has no known width
            scale = (1 + A.double().flatten()).expand(outputs) if len(A) == 1 else 1 + A.double().flatten()
            terms = (Term(torch.ones(1, len(C)), B.reshape(-1, 1).expand(len(scale), 1)),)

        def finish(WC: Tensor, b0: Tensor | None) -> tuple[tuple, Tensor]:
            if b0 is None:
                hint = "trained on a layer with a bias, and the base layer has none"
                raise module.error("wrong_base", "glora_D", hint)
            change = WC.flatten()
            change = change if D is None else change + b0 * D.double()
            return (), change if E is None else change + E.double()

        if D is not None or E is not None or C.any():
            from_weight = FromWeight(finish, right=C)
        return Slots(terms=terms, scale=scale, from_weight=from_weight, structure=structure)

    modules, _ = group(tensors, base, PARAMETERS)
    return common.build("GLORA", config, modules, read_one)


def _factors(module: Module, name: str, r: int) -> tuple[Tensor, Tensor]:
    """Xu (r, in) and Xd (out, r), whose product Xd Xu is the path's matrix."""
    Xu = module.need(f"glora_{name}.Xu", r, module.in_features)
    return Xu, module.need(f"glora_{name}.Xd", module.out_features, r)


def _path(
    module: Module, name: str, form: str, vector: tuple, zeros: tuple, biased: bool = False
) -> Tensor | None:
    """The vector, or constant (1,), of a path; None if it is off, as all ``biased`` ones are without a bias."""
    if form == "none" or (biased and f"glora_{name}.zeros" in module.tensors):
        _zeros(module, f"glora_{name}.zeros", *zeros)
        return None
    return module.need(f"glora_{name}.X", *(vector if form == "vector" else (1,)))


def _path_c(module: Module, form: str, r: int) -> Tensor:
    """C as (in, 1), zeros where the path is off."""
    inputs = module.in_features
    if form == "none" or "glora_C.zeros" in module.tensors:
        return _zeros(module, "glora_C.zeros", inputs, 1)
    if form == "vector":
        return module.need("glora_C.X", inputs, 1)
    return module.need("glora_C.Xd", inputs, r).double() @ module.need("glora_C.Xu", r, 1).double()


def _zeros(module: Module, name: str, *shape: int | None) -> Tensor:
    """What the file holds of a path that is off. PEFT loads it, so it must be zeros."""
    zeros = module.need(name, *shape)
    if zeros.any():
        raise module.error("bad_config", name, "found other numbers, want the zeros of a path that is off")
    return zeros
