"""Checkpoint keys and config patterns, in PEFT's rules: which module of the base a tensor belongs to.

PEFT writes ``base_model.model.<module path>.<parameter>`` and, for tensors that all modules of an adapter share,
``base_model.<name>``. A key belongs to a module only by its whole path: substrings never match.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from scute_sgl.errors import AdapterError
from scute_sgl.slots import BaseShape

MODULE_PREFIX, SHARED_PREFIX = "base_model.model.", "base_model."

# What an adapter may store of the base model itself, beside its own tensors. PEFT wraps an adapted module, so
# there the base's parameters sit under base_layer.
BASE_PARAMETERS = ("base_layer.weight", "base_layer.bias", "weight", "bias")

# A norm's own weight: as LN_TUNING's, or as one of modules_to_save. Elsewhere "weight" has two dimensions.
NORM_WEIGHTS = ("ln_tuning_layers.weight", "weight")

# Module paths depend on how the base was wrapped when the adapter was trained: (start in the file, start in the
# base). One rewrite holds for a whole file, and only if every key then names a module of the base.
REWRITES = (
    ("", "model."),
    ("language_model.", ""),
    ("model.language_model.", "model."),
    ("model.", "model.language_model."),
    ("", "language_model."),
)


@dataclass
class Module:
    """The tensors of one module. Readers take them out; what is left at the end is an error."""

    path: str  # in the base model
    file_path: str  # in the file: what the config's patterns were written for
    in_features: int | None  # None: no base given, any size
    out_features: int | None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    adapted: bool = False  # holds tensors of the method, not only copies of base parameters
    is_norm: bool = False  # a norm with a weight of the adapter's own; both sizes are its width

    @property
    def is_embedding(self) -> bool:
        return is_embedding(self.path)

    def take(self, name: str, *want: int | None, integer: bool = False) -> Tensor | None:
        """The tensor, no longer listed; None if the file lacks it. None in ``want`` allows any size but 0."""
        if name not in self.tensors:
            return None
        found = self.tensors.pop(name)
        if found.is_floating_point() == integer:
            raise self.error("bad_shape", name, f"found {found.dtype}, want {'integers' if integer else 'floating point'}")
        good = (f > 0 if w is None else f == w for f, w in zip(found.shape, want))
        if len(found.shape) != len(want) or not all(good):
            sizes = ", ".join("any" if w is None else str(w) for w in want)
            raise self.error("bad_shape", name, f"found {tuple(found.shape)}, want ({sizes})")
        return found

    def need(self, name: str, *want: int | None, integer: bool = False) -> Tensor:
        tensor = self.take(name, *want, integer=integer)
        if tensor is None:
            raise self.error("missing_tensor", name, "not in the file")
        return tensor

    def error(self, code: str, name: str, hint: str) -> AdapterError:
        return AdapterError(code, hint, module=self.path, key=name)


def is_embedding(path: str) -> bool:
    """An embedding: its (in, out) is (vocabulary, hidden), and PEFT stores its weight as (in, out)."""
    return path.rpartition(".")[2] == "embed_tokens"


def is_head(path: str) -> bool:
    return path.rpartition(".")[2] == "lm_head"


def group(
    tensors: dict[str, Tensor], base: BaseShape | None, own: tuple[str, ...], shared: tuple[str, ...] = ()
) -> tuple[list[Module], dict[str, Tensor]]:
    """Tensors by module, and the shared ones by name. ``own`` and ``shared`` are the method's parameter names."""
    names = "|".join(re.escape(name) for name in own + BASE_PARAMETERS)
    # The path is matched lazily, so that of two names that both end a key the longer one is its parameter.
    pattern = re.compile(rf"{re.escape(MODULE_PREFIX)}(?P<path>.+?)\.(?P<name>{names})")
    in_common, by_path = {}, {}
    for key, tensor in tensors.items():
        if (name := key.removeprefix(SHARED_PREFIX)) in shared and key != name:
            in_common[name] = tensor
        elif match := pattern.fullmatch(key):
            by_path.setdefault(match["path"], {})[match["name"]] = tensor
        else:
            want = ", ".join([f"{MODULE_PREFIX}<module>.<{' | '.join(own)}>", *(SHARED_PREFIX + s for s in shared)])
            raise AdapterError("unknown_key", f"not a tensor of this method; want {want}", key=key)
    known = {} if base is None else base | {path: (width, width) for path, width in base.norms.items()}
    rewrite = ("", "") if base is None else _rewrite(by_path, known)
    modules = []
    for file_path, parts in by_path.items():
        path = rewrite[1] + file_path.removeprefix(rewrite[0])
        if base is not None and path not in known:
            key = MODULE_PREFIX + file_path + "." + next(iter(parts))
            of_norms = "; of norms, a plain RMSNorm that adaptable layers alone read" if "norm" in path else ""
            raise AdapterError("unknown_key", f"the base has no adaptable module {file_path!r}{of_norms}", key=key)
        alone = any(parts[name].dim() == 1 for name in NORM_WEIGHTS if name in parts)
        is_norm = path in base.norms if base is not None else alone
        adapted = any(name in parts for name in own)
        modules.append(Module(path, file_path, *known.get(path, (None, None)), parts, adapted, is_norm))
    return modules, in_common


def _rewrite(paths: Iterable[str], known: Mapping[str, tuple[int, int]]) -> tuple[str, str]:
    if all(path in known for path in paths):
        return "", ""
    fits = [
        (old, new)
        for old, new in REWRITES
        if all(path.startswith(old) and new + path.removeprefix(old) in known for path in paths)
    ]
    return fits[0] if len(fits) == 1 else ("", "")  # none or several: the caller names the first unmatched key


MAX_PATTERNS, PATTERN_SECONDS = 4096, 2.0


def compile_pattern(pattern: object, field_name: str, frame: str = "{}") -> re.Pattern:
    """A regex of an adapter's config, in PEFT's frame. It runs in the server: slow backtracking is refused."""
    if not isinstance(pattern, str):
        raise AdapterError("bad_config", f"found {pattern!r}, want text", key=field_name)
    if len(pattern) > 4096 or re.search(r"\)[*+{]", pattern) or len(re.findall(r"[*+]|,\}", pattern)) > 6:
        raise AdapterError(
            "bad_config", "found a regex with repeated groups or over 6 open repeats; list module names", key=field_name
        )
    try:
        re.compile(pattern)  # by itself: the frame must not complete it
        return re.compile(frame.replace("{}", pattern))
    except (re.error, OverflowError, RecursionError) as error:
        raise AdapterError("bad_config", f"found {pattern!r}, not a regex: {error}", key=field_name) from None


class Patterns:
    """rank_pattern and its kind: regex -> value; the first that matches the end of a module path wins."""

    def __init__(self, table: dict, field_name: str):
        if len(table) > MAX_PATTERNS:
            raise AdapterError("bad_config", f"found {len(table)} patterns, want up to {MAX_PATTERNS}", key=field_name)
        self.rules = [(compile_pattern(key, field_name, r"(.*\.)?({})$"), value) for key, value in table.items()]
        self.field_name, self.deadline = field_name, time.monotonic() + PATTERN_SECONDS

    def get(self, path: str, default):
        for rule, value in self.rules:
            if time.monotonic() > self.deadline:
                raise AdapterError("bad_config", "found regexes too slow to match", key=self.field_name)
            if rule.match(path):
                return value
        return default


def targets(config: dict, paths: Iterable[str]) -> set[str]:
    """The paths that PEFT adapts for this config (``check_target_module_exists``), all if it names none.

    ``all-linear`` is every module but the output head; embeddings are not linear.
    """
    wanted, excluded = config.get("target_modules"), config.get("exclude_modules")
    layers, stacks = config.get("layers_to_transform"), config.get("layers_pattern") or []
    for name, value in (("target_modules", wanted), ("exclude_modules", excluded), ("layers_pattern", stacks)):
        if value is not None and not _is_text_or_list(value, str):
            raise AdapterError("bad_config", f"found {value!r}, want a list of names or a regex", key=name)
    layers = [layers] if isinstance(layers, int) else layers
    if isinstance(layers, str) or (layers is not None and not _is_text_or_list(layers, int)):
        raise AdapterError("bad_config", f"found {layers!r}, want layer numbers", key="layers_to_transform")
    if isinstance(wanted, str) and (layers is not None or stacks):
        raise AdapterError("bad_config", "found beside a regex, want a list of targets", key="layers_to_transform")
    stacks = [stacks] if isinstance(stacks, str) else stacks
    layer_rules = [compile_pattern(stack, "layers_pattern", r"(?:^|.*?\.){}\.(?P<idx>\d+)\.") for stack in stacks]
    layer_rules = layer_rules or [re.compile(r".*?\.[^.]*\.(?P<idx>\d+)\.")]
    is_wanted, is_excluded = _matcher(wanted, "target_modules"), _matcher(excluded or [], "exclude_modules")
    found, deadline = set(), time.monotonic() + PATTERN_SECONDS
    for path in paths:
        if time.monotonic() > deadline:
            raise AdapterError("bad_config", "found a regex too slow to match", key="target_modules")
        if not is_wanted(path) or is_excluded(path):
            continue
        # A list's suffix obeys layers_to_transform; a full path in the list does not, nor does a regex.
        if layers and isinstance(wanted, list) and path not in wanted:
            match = next(filter(None, (rule.match(path) for rule in layer_rules)), None)
            if match is None or len(match["idx"]) > 9 or int(match["idx"]) not in layers:  # Python reads 4300 digits at most
                continue
        found.add(path)
    return found


def counted_targets(config: dict, base: BaseShape) -> dict[str, tuple[int, int]]:
    """The (in, out) of every module that PEFT adapts for this config, in the order in which PEFT numbers them."""
    if config.get("target_modules") is None:
        raise AdapterError("bad_config", "found null, want the targets that decide the draw", key="target_modules")
    layers = base.counted()
    wanted = targets(config, layers)
    if not wanted:
        raise AdapterError("bad_config", "no module of the base is targeted", key="target_modules")
    if unknown := sorted(path for path in wanted if base.get(path) != layers[path]):
        raise AdapterError("unknown_key", "targeted, but not an adaptable module of the base", module=unknown[0])
    return {path: sizes for path, sizes in layers.items() if path in wanted}


def _is_text_or_list(value, kind: type) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, kind) for item in value))


def _matcher(wanted: list | str | None, field_name: str):
    if wanted is None:
        return lambda path: True
    if isinstance(wanted, list):
        names = set(wanted)
        # ".a.b" ends a path exactly if the path's last parts are a.b
        return lambda path: any(tail in names for tail in _tails(path))
    if wanted.lower() == "all-linear":
        return lambda path: not is_embedding(path) and not is_head(path)
    rule = compile_pattern(wanted, field_name)
    return lambda path: rule.fullmatch(path) is not None


def _tails(path: str):
    parts = path.split(".")
    return (".".join(parts[i:]) for i in range(len(parts)))
