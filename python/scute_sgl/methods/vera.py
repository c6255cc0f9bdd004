"""VeRA: one pair of frozen random matrices for all modules, two vectors per module.

    F(x) = x W + b + ((x A[:, :in]^T) * d) B[:out]^T * e,   d = vera_lambda_d, e = vera_lambda_b

A (r, largest in) and B (largest out, r) over all targeted modules. Without save_projection they are drawn again
from projection_prng_key, bit for bit: A, then B, from one CPU generator, uniform in float32 within
+-sqrt(3) * sqrt(2) / sqrt(columns), then rounded to the base's dtype, as PEFT keeps them in a buffer of the model.

Checked against peft/tuners/vera/{layer,model}.py of PEFT 0.21.2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from scute_sgl import names
from scute_sgl.errors import AdapterError
from scute_sgl.methods import common
from scute_sgl.names import Module
from scute_sgl.slots import Adapter, BaseShape, SharedTerm, Slots

FIELDS = {name: None for name in ("target_modules", "layers_to_transform", "layers_pattern")} | {
    "r": 256,
    "projection_prng_key": 0,
    "save_projection": True,
    "bias": "none",
}
NEUTRAL = frozenset({"vera_dropout", "d_initial"})
PARAMETERS = ("vera_lambda_b", "vera_lambda_d")
SHARED = ("vera_A", "vera_B")
MAX_DRAW = 1 << 28  # elements of a redrawn matrix: r comes from the file, and a vector of r numbers is cheap to send


def read(config: dict, tensors: dict[str, Tensor], base: BaseShape | None) -> Adapter:
    c = common.settings(config, FIELDS, NEUTRAL)
    r = common.rank(c["r"])
    modules, saved = names.group(tensors, base, PARAMETERS, SHARED)
    A, B = projections(c, (r, r), saved, SHARED, modules, base)

    def read_one(module: Module) -> Slots:
        common.refuse_embedding(module, "VeRA")
        e, d = module.need("vera_lambda_b", module.out_features), module.need("vera_lambda_d", r)
        return Slots(shared=term(A, B, d, e, module))

    return common.build("VERA", config, modules, read_one)


def term(A: Tensor, B: Tensor, d: Tensor, e: Tensor, module: Module) -> SharedTerm:
    if A.device.type != "meta" and (A.shape[1] < (module.in_features or 0) or B.shape[0] < len(e)):
        found = f"found an A of {A.shape[1]} inputs and a B of {B.shape[0]} outputs"
        raise module.error("bad_shape", "", f"{found}, want at least {module.in_features} and {len(e)}")
    return SharedTerm(A, B, d=d, e=e)


def projections(
    config: dict, ranks: tuple[int, int], saved: dict[str, Tensor], keys: tuple[str, str], modules: list[Module],
    base: BaseShape | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A (ranks[0], inputs) and B (outputs, ranks[1]) that all modules share, from the file or drawn again."""
    if config["save_projection"]:
        return kept(saved, keys[0], ranks[0], "inputs"), kept(saved, keys[1], "outputs", ranks[1])
    check_unsaved(saved, modules)
    if base is None:
        return torch.empty(ranks[0], 0, device="meta"), torch.empty(0, ranks[1], device="meta")
    inputs, outputs, generator = sizes_and_generator(config, base)
    shapes = check_draw((ranks[0], inputs), (outputs, ranks[1]))
    return tuple(_uniform(shape, generator).to(base.dtype) for shape in shapes)


def kept(saved: dict[str, Tensor], key: str, *want: int | str) -> Tensor:
    """A shared tensor of the file. A word in ``want`` allows any size."""
    if key not in saved:
        raise AdapterError("missing_tensor", "not in the file, but save_projection is true", key=f"base_model.{key}")
    found = saved[key]
    fits = len(found.shape) == len(want) and all(isinstance(w, str) or f == w for f, w in zip(found.shape, want))
    if not fits or not found.is_floating_point():
        hint = f"found {tuple(found.shape)}, want ({', '.join(map(str, want))})"
        raise AdapterError("bad_shape", hint, key=f"base_model.{key}")
    return found


def check_unsaved(saved: dict[str, Tensor], modules: list[Module]) -> None:
    if saved:
        # PEFT draws again and ignores these: the file and its config disagree on which matrices were trained with.
        raise AdapterError("bad_config", f"found false, but the file holds {sorted(saved)}", key="save_projection")
    if any(module.path != module.file_path for module in modules):
        hint = "found false, but the adapter was trained on a wrapped base whose largest layers are unknown"
        raise AdapterError("bad_config", hint, key="save_projection")


def sizes_and_generator(config: dict, base: BaseShape) -> tuple[int, int, torch.Generator]:
    """What PEFT draws for these targets with: their largest inputs, their largest outputs, and the generator."""
    key = config["projection_prng_key"]
    if not 0 <= key < 1 << 63:
        raise AdapterError("bad_config", f"found {key}, want 0 <= key < 2**63", key="projection_prng_key")
    if base.unlisted:
        hint = f"found false, but whether {base.unlisted!r} was targeted too, and widened the matrices, is unknown"
        raise AdapterError("bad_config", f"{hint}; save them with the adapter", key="save_projection")
    if config["target_modules"] is None:
        raise AdapterError("bad_config", "found null, want the targets that decide the draw", key="target_modules")
    # PEFT asks only linear layers; an embedding that the list names is passed over.
    shapes = [base[path] for path in names.targets(config, base) if not names.is_embedding(path)]
    if not shapes:
        raise AdapterError("bad_config", "no module of the base is targeted", key="target_modules")
    return *map(max, zip(*shapes)), torch.Generator("cpu").manual_seed(key)


def check_draw(*shapes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    if math.prod(largest := max(shapes, key=math.prod)) > MAX_DRAW:
        found = " x ".join(map(str, largest))
        raise AdapterError("too_large", f"{found} projections; want at most {MAX_DRAW}", key="r")
    return shapes


def _uniform(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    bound = math.sqrt(3.0) * (math.sqrt(2) / math.sqrt(shape[1]))
    return torch.empty(shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator)
