"""What all readers share: config fields, the walk over a file's modules, and the base's own parameters in it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import reduce

import torch
from torch import Tensor

from scute_sgl import names, structured
from scute_sgl.errors import AdapterError, NeedsBase
from scute_sgl.linalg import all_finite
from scute_sgl.slots import Adapter, Slots, Sparse, Structure, Term

INDICES = 1 << 31  # ids and places have 32 bits on the device
MAX_RANK = 1 << 15  # the device table keeps a rank in 16 bits
MAX_VALUES = 1 << 32  # of an adapter's terms and structures: some methods expand a small file to far more than it holds
MOST_UNBOUNDED = 1 << 28  # of one module's without a base, whose sizes would bound them

# Fields of any PEFT config that cannot change what a served adapter computes.
NEUTRAL = frozenset(
    "task_type peft_type auto_mapping peft_version base_model_name_or_path revision inference_mode fan_in_fan_out "
    "init_weights runtime_config".split()
)
# fan_in_fan_out is neutral because it describes GPT-2's Conv1D; PEFT resets it on every nn.Linear.

TARGETING = {"target_modules": None, "exclude_modules": None, "layers_to_transform": None, "layers_pattern": None}

SAVED = "modules_to_save"
DENSE = "of an adapter's own whole modules only norms are served; train without others"
OFF = {SAVED: DENSE}


def settings(config: dict, fields: dict, neutral: frozenset = frozenset(), off: dict = OFF) -> dict:
    """The method's fields with PEFT's defaults filled in; refuses what it does not understand.

    ``off`` lists fields that must not be used, with advice. Any other field, which a newer PEFT may have added,
    is accepted only if it is switched off (null, false or empty).
    """
    for name, value in config.items():
        if name in fields or name in NEUTRAL or name in neutral or _is_off(value):
            continue
        if name == SAVED and isinstance(value, list) and all(str(saved).endswith("norm") for saved in value):
            continue  # build finds them in the file
        advice = off.get(name, "this field is unknown here and may change the result")
        raise AdapterError("bad_config", f"found {_short(value)}, want null or the default; {advice}", key=name)
    result = {}
    for name, default in fields.items():
        value = config.get(name)
        result[name] = default if value is None else value
        if value is not None and default is not None:
            _check_kind(name, value, default)
    bias = result.get("bias", "none")
    if bias not in ("none", "all") and not bias.endswith("_only"):
        raise AdapterError("bad_config", f"found {_short(bias)}, want none, all or <method>_only", key="bias")
    return result


def rank(value: object, name: str = "r") -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_RANK:
        raise AdapterError("bad_config", f"found {_short(value)}, want a whole number from 1 to {MAX_RANK}", key=name)
    return value


def number(value: object, name: str) -> float:
    try:
        if not isinstance(value, bool) and isinstance(value, (int, float)) and math.isfinite(value):
            return float(value)
    except OverflowError:  # JSON's integers have no limit
        pass
    raise AdapterError("bad_config", f"found {_short(value)}, want a finite number", key=name)


def wide(tensor: Tensor) -> Tensor:
    """In at least float32, for arithmetic: a 16-bit file must not be rounded a second time."""
    return alike(tensor)[0]


def alike(*tensors: Tensor) -> tuple[Tensor, ...]:
    """In one dtype of at least float32: a file may mix dtypes, a matrix product may not."""
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)
    return tuple(tensor.to(dtype) for tensor in tensors)


def check_expanded(values: int, module: names.Module, name: str) -> None:
    """Before a module's tensors become so many values. NeedsBase where a base of these sizes may or may not exist."""
    if values > MAX_VALUES:
        raise module.error("too_large", name, f"it stands for {values} values, want up to {MAX_VALUES}")
    if module.in_features is None and values > MOST_UNBOUNDED:
        raise NeedsBase("too_large", f"it stands for {values} values", module=module.path, key=name)


def check_all_expanded(modules: list[names.Module], rank: Callable[[names.Module], int], name: str) -> None:
    """The terms of all modules together, of this rank or their whole one, before work on the first; with a base."""
    values = 0
    for module in modules:
        if module.adapted and module.in_features is not None:
            sizes = module.in_features, module.out_features
            values += min(rank(module), *sizes) * sum(sizes)
            if values > MAX_VALUES:
                hint = f"the modules up to it stand for {values} values, want up to {MAX_VALUES}"
                raise module.error("too_large", name, hint)


def ranks_and_scales(c: dict) -> Callable[[names.Module], tuple[int, float]]:
    """Rank and alpha / rank of a module, by the settings r, alpha, rank_pattern and alpha_pattern."""
    ranks = names.Patterns(c["rank_pattern"], "rank_pattern")
    alphas = names.Patterns(c["alpha_pattern"], "alpha_pattern")

    def of(module: names.Module) -> tuple[int, float]:
        r = rank(ranks.get(module.file_path, c["r"]), "rank_pattern")
        return r, number(alphas.get(module.file_path, c["alpha"]), "alpha_pattern") / r

    return of


def scaled(tensor: Tensor, scale: float, module: names.Module, name: str) -> Tensor:
    """scale * tensor in at least float32."""
    if scale == 1:
        return tensor
    result = wide(tensor) * scale
    if not all_finite(result):
        raise module.error("bad_config", name, f"overflows when multiplied by the adapter's scale {scale}")
    return result


def added_to_weight(module: names.Module, name: str, rows: Tensor, columns: Tensor, values: Tensor) -> Sparse:
    """Values that PEFT adds to W, in W's dtype, at places that the file's tensor ``name`` gives."""
    shape = []
    for at, size, side in ((rows, module.out_features, "outputs"), (columns, module.in_features, "inputs")):
        low, high = (int(at.min()), int(at.max())) if len(at) else (0, 0)
        if low < 0 or high >= (size or INDICES):
            want = f"0 to {(size or INDICES) - 1}"
            raise module.error("bad_shape", name, f"found {side} {low} to {high}, want {want}")
        shape.append(high + 1 if size is None else size)
    S = structured.sparse(rows, columns, wide(values), (shape[0], shape[1]), rounded=True)
    if len(S.values) < len(values):
        raise module.error("bad_config", name, "found a place of the weight twice, want each once")
    return S


def refuse_embedding(module: names.Module, method: str) -> None:
    if module.is_embedding:
        raise module.error("unsupported_method", next(iter(module.tensors), ""), f"{method} has no embedding layer")


def build(
    method: str, config: dict, modules: list[names.Module], read_one: Callable[[names.Module], Slots]
) -> Adapter:
    """Calls ``read_one`` for every adapted module and adds the base parameters and norms that the file holds."""
    adapted = [module.file_path for module in modules if module.adapted]
    if not adapted:
        raise AdapterError("missing_tensor", f"the file holds no tensor of {method} for any module")
    wanted = names.targets(config, adapted)
    for saved in config.get(SAVED) or ():
        # As PEFT matches: the plain end of a path.
        if not any(module.is_norm and module.file_path.endswith(saved) for module in modules):
            raise AdapterError("missing_tensor", f"the file holds no norm {saved!r}", key=SAVED)
    slots, norms, values = {}, {}, 0
    for module in modules:
        if module.adapted and module.file_path not in wanted and not _is_tied(config, module):
            # PEFT would build no adapter there and drop these tensors.
            name = next(iter(module.tensors), "")  # a reader may have taken them before
            raise module.error("unknown_key", name, "the config's target_modules (or layers, exclusions) leave it out")
        if module.is_norm:
            norms[module.path] = _norm(module)
        else:
            entry = read_one(module) if module.adapted else Slots()
            slots[module.path] = entry = dataclasses.replace(entry, **_base_parameters(module))
            values += sum(map(_values, (*entry.terms, entry.structure)))
        if module.tensors:
            name = next(iter(module.tensors))
            raise module.error("unknown_key", name, f"this {method} config has no use for it")
        if values > MAX_VALUES:
            raise module.error("too_large", "", f"the adapter's matrices have over {MAX_VALUES} values")
    return Adapter(method, slots, norms)


def _values(part: Term | Structure | None) -> int:
    return 0 if part is None else sum(value.numel() for value in vars(part).values() if isinstance(value, Tensor))


def _norm(module: names.Module) -> Tensor:
    own, saved = names.NORM_WEIGHTS
    weight = module.take(own, module.out_features)
    return module.need(saved, module.out_features) if weight is None else weight


def _base_parameters(module: names.Module) -> dict[str, Tensor]:
    """PEFT's load copies these over the base: a bias takes the base's place; a weight must be the base's own."""
    where = "base_layer." if module.adapted else ""
    inputs, outputs = module.in_features, module.out_features
    found = {}
    if (bias := module.take(where + "bias", outputs)) is not None:
        found["base_bias"] = bias
    stored = (inputs, outputs) if module.is_embedding else (outputs, inputs)
    if (weight := module.take(where + "weight", *stored)) is not None:
        found["base_weight"] = weight
    return found


def _is_tied(config: dict, module: names.Module) -> bool:
    """PEFT adapts the other one of a tied embedding and head too, and saves both."""
    return config.get("ensure_weight_tying") is True and (module.is_embedding or names.is_head(module.path))


def _is_off(value: object) -> bool:
    return value is None or value is False or (isinstance(value, (str, list, dict)) and not value)


def _check_kind(name: str, value: object, default: object) -> None:
    if isinstance(default, float):
        number(value, name)
    elif type(value) is not type(default):
        raise AdapterError("bad_config", f"found {_short(value)}, want {type(default).__name__}", key=name)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
