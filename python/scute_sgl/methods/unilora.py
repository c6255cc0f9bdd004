"""Uni-LoRA: every element of every A and B is one of a few trained numbers, times a fixed scale.

    F(x) = x W + b + (x A^T) B^T,   A = theta[indices_A] * scales_A,   B = theta[indices_B] * scales_B

With save_indices the file holds both. Without, they are drawn again from proj_seed over A, then B, of all targeted
modules in their order: each index equally often, the rest of the division by choice without replacement, shuffled.
A scale is 1 / sqrt(how often its index occurs), rounded to the base's dtype, as PEFT keeps it in a buffer.

Checked against peft/tuners/unilora/{layer,model}.py of PEFT 0.21.2.
"""

from __future__ import annotations

import numpy
import torch
from torch import Tensor

from scute_sgl.errors import AdapterError, NeedsBase
from scute_sgl.methods import common
from scute_sgl.names import Module, counted_targets, group
from scute_sgl.slots import Adapter, BaseShape, Slots, Term

FIELDS = {name: None for name in ("target_modules", "layers_to_transform", "layers_pattern")} | {
    "r": 4,
    "proj_seed": 42,
    "theta_d_length": 256,
    "save_indices": False,
    "bias": "none",
}
NEUTRAL = frozenset({"unilora_dropout", "init_theta_d_bound"})
PARAMETERS = ("unilora_indices_A", "unilora_indices_B", "unilora_scales_A", "unilora_scales_B")
THETA = "unilora_theta_d"
MAX_DRAW = 1 << 28  # indices: r comes from the file, which may be tiny
Drawn = dict[str, tuple[Tensor, Tensor]]  # module path -> indices of A (r, in) and B (out, r)


def read(config: dict, tensors: dict[str, Tensor], base: BaseShape | None) -> Adapter:
    c = common.settings(config, FIELDS, NEUTRAL)
    r, length = common.rank(c["r"]), c["theta_d_length"]
    modules, shared = group(tensors, base, PARAMETERS, (THETA,))
    theta = shared.get(THETA)
    if theta is None:
        raise AdapterError("missing_tensor", "not in the file", key=f"base_model.{THETA}")
    if theta.shape != (length,) or not length or not theta.is_floating_point():
        found = f"found {tuple(theta.shape)} {theta.dtype}, want ({length},) floating point"
        raise AdapterError("bad_shape", found, key=f"base_model.{THETA}")
    theta = common.wide(theta)

    def saved(module: Module, letter: str, *want: int | None) -> Tensor:
        name = f"unilora_indices_{letter}"
        indices = module.need(name, *want, integer=True).long()
        if indices.numel() and not 0 <= indices.min() <= indices.max() < length:
            hint = f"found {indices.min()} to {indices.max()}, want 0 to {length - 1}"
            raise module.error("bad_shape", name, hint)
        return theta[indices] * module.need(f"unilora_scales_{letter}", *indices.shape)

    def read_saved(module: Module) -> Slots:
        common.refuse_embedding(module, "Uni-LoRA")
        A = saved(module, "A", r, module.in_features)
        return Slots(terms=(Term(A, saved(module, "B", module.out_features, r)),))

    if c["save_indices"]:
        return common.build("UNILORA", config, modules, read_saved)
    if base is None:
        raise NeedsBase("bad_config", "found false, want the base, whose layers decide the draw", key="save_indices")
    drawn, counts = draw(c, r, counted_targets(config, base))
    scales = torch.where(counts > 0, counts.float().rsqrt(), 0).to(base.dtype)

    def read_drawn(module: Module) -> Slots:
        common.refuse_embedding(module, "Uni-LoRA")
        A, B = (theta[indices] * scales[indices] for indices in drawn[module.path])
        return Slots(terms=(Term(A, B),))

    return common.build("UNILORA", config, _all_targets(modules, drawn, base), read_drawn)


def draw(config: dict, r: int, layers: dict[str, tuple[int, int]]) -> tuple[Drawn, Tensor]:
    """The indices of all targeted modules, and how often each occurs."""
    seed, length = config["proj_seed"], config["theta_d_length"]
    if not 0 <= seed < 1 << 63:
        raise AdapterError("bad_config", f"found {seed}, want 0 <= seed < 2**63", key="proj_seed")
    size = r * sum(map(sum, layers.values()))
    if max(size, length) > MAX_DRAW:
        raise AdapterError("too_large", f"{size} indices; want at most {MAX_DRAW}", key="r")
    generator = numpy.random.default_rng(seed)
    indices = numpy.repeat(numpy.arange(length), size // length)
    if size % length:
        indices = numpy.concatenate([indices, generator.choice(length, size=size % length, replace=False)])
    generator.shuffle(indices)
    indices = torch.from_numpy(indices)
    parts = iter(indices.split([r * features for sizes in layers.values() for features in sizes]))
    drawn = {path: (next(parts).view(r, -1), next(parts).view(-1, r)) for path in layers}
    return drawn, indices.bincount(minlength=length)


def _all_targets(modules: list[Module], drawn: Drawn, base: BaseShape) -> list[Module]:
    """Every targeted module, with what the file holds of the base there; the file names no other."""
    by_path = {path: Module(path, path, *base[path]) for path in drawn} | {module.path: module for module in modules}
    if any(module.path != module.file_path for module in modules):
        hint = "found false, but the adapter was trained on a wrapped base whose layers are unknown"
        raise AdapterError("bad_config", hint, key="save_indices")
    for path in drawn:
        by_path[path].adapted = True
    return list(by_path.values())
