"""What loading an adapter would do, found without a GPU, a server or base weights.

The adapter is read, folded and packed by the code that a server runs; only what W gives is replaced by zeros of its
size (resolve.without_weight). So a refusal here is the server's, and bytes are those of the server's arena.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from scute_sgl import image, structured
from scute_sgl.checkpoint import CONFIG, read_adapter, read_config
from scute_sgl.config import Base
from scute_sgl.errors import AdapterError, NeedsBase
from scute_sgl.fold import fold_adapter, live_slots, needs_base_weight
from scute_sgl.image import Image
from scute_sgl.resolve import without_weight
from scute_sgl.slots import Adapter, Folded, Hadamard, Kronecker, Slots, Target

CONVERTED_RANK = 64  # of the plain LoRA that an adapter is compared with
DTYPES = {"float16": torch.float16, "half": torch.float16, "bfloat16": torch.bfloat16}
DTYPES |= {"float32": torch.float32, "float": torch.float32}  # SGLang's names

Modules = Mapping[int, tuple[Target, Folded]]


@dataclass(frozen=True)
class Found:
    """One adapter: a ``refusal``, or what is known of it; None where only the base could tell. ``modules`` and
    ``packed`` are those of the largest rank."""

    name: str
    method: str | None
    refusal: AdapterError | None = None
    adapter: Adapter | None = None
    modules: Modules | None = None
    packed: Image | None = None


def folders(paths: Iterable[str]) -> list[Path]:
    """Adapter folders: each path itself, or those of its sub-folders that are adapters. ValueError for no folder, and
    for one that is given twice."""
    found: list[Path] = []
    for given in paths:
        path = Path(given)
        if not given or not path.is_dir():
            raise ValueError(f"no folder {given!r}; want adapter folders, or one that holds some")
        inside = [] if (path / CONFIG).exists() else sorted(config.parent for config in path.glob(f"*/{CONFIG}"))
        found += inside or [path]
    places: set[str] = set()
    for path in found:
        if (place := os.path.abspath(path)) in places:
            raise ValueError(f"{str(path)!r} is given twice")
        places.add(place)
    return found


@torch.no_grad()
def look(folder: Path, base: Base | None, dtype: torch.dtype) -> Found:
    """Read an adapter and, as far as the base is known, fold and pack it."""
    name, method = os.path.basename(os.path.abspath(folder)), _peft_type(folder)
    try:
        adapter = read_adapter(folder, None if base is None else base.shape)
        method = adapter.method
        if base is None:
            targets = _targets_of(adapter)
            modules = None if targets is None else fold_adapter(adapter, targets)
            packed = None if modules is None else image.pack(modules, dtype)
        else:
            parts = [_folded(adapter, base, rank) for rank in range(len(base.targets))]
            images = [image.pack(part, dtype) for part in parts]
            modules, packed = max(zip(parts, images), key=lambda pair: pair[1].nbytes)
    except NeedsBase:
        return Found(name, method)
    except Exception as error:  # as a server takes it
        return Found(name, method, AdapterError.of(error))
    return Found(name, method, None, adapter, modules, packed)


def row(found: Found, base: Base | None, dtype: torch.dtype) -> dict:
    """The JSON object of ``scute inspect``; None for what only the base could tell, and of a refused adapter."""
    values = dict.fromkeys(
        "live folded modules rank_max bytes shared_bytes bytes_as_lora64 needs_base_weight invocation_tokens".split()
    )
    named = {"name": found.name, "method": found.method}
    if found.refusal is not None:
        return named | {"servable": False, "reason": f"[{found.refusal.code}] {found.refusal.reason}"} | values
    named |= {"servable": None if base is None else True, "reason": None}
    if found.adapter is None:
        return named | values
    adapter, packed = found.adapter, found.packed
    rows = any(slots.tokens is not None for slots in adapter.modules.values())
    if base is not None or not rows:  # which may be those of a tied output head too
        values["modules"] = len(adapter.modules) + len(adapter.norms)
    values["invocation_tokens"] = [*adapter.invocation]
    values["needs_base_weight"] = any(map(needs_base_weight, adapter.modules.values())) or bool(adapter.norms)
    if packed is not None:
        pieces = [folded for _, folded in found.modules.values()]
        values["live"] = live_slots(pieces)
        values["rank_max"] = max(map(_rank, pieces), default=0)
        values["bytes"] = packed.nbytes
        values["shared_bytes"] = packed.shared.nbytes if packed.shared else 0
    if base is not None:
        values["bytes_as_lora64"] = lora_bytes(changed(adapter, base.targets[0]), base.targets, dtype)
    elif packed is not None and all(s.terms or s.structure for s in adapter.modules.values()):  # which have both widths
        values["bytes_as_lora64"] = lora_bytes(adapter.modules, [_targets_of(adapter)], dtype)
    if base is not None or all(slots.input_scale is None for slots in adapter.modules.values()):
        values["folded"] = folded_slots(adapter.modules.values(), values["live"] or ())
        values["folded"] += ["norm"] if adapter.norms else []
    return named | values


def changed(adapter: Adapter, targets: Mapping[str, Target]) -> list[str]:
    """Paths of the layers that an adapter changes, those behind its norms included."""
    behind = (path for path, t in targets.items() if t.norm in adapter.norms and path not in adapter.modules)
    return [*adapter.modules, *behind]


def folded_slots(modules: Collection[Slots], live: Collection[str]) -> list[str]:
    """What is folded into the live slots when the adapter loads: DoRA's m, gains, terms of W, biases that replace the
    base's, and an (IA)3 vector that a gate takes up."""
    found = {
        "m": any(slots.magnitude is not None for slots in modules),
        "gain": any(slots.gain is not None for slots in modules),
        "W": any(slots.from_weight is not None or getattr(slots.structure, "rounded", False) for slots in modules),
        "base bias": any(slots.base_bias is not None for slots in modules),
        "R": "R" not in live and any(slots.input_scale is not None for slots in modules),
    }
    return [name for name, is_there in found.items() if is_there]


def lora_modules(paths: Iterable[str], targets: Mapping[str, Target]) -> Modules:
    """A plain LoRA of CONVERTED_RANK on these modules, on the meta device: sizes without memory."""
    made = {}
    for path in paths:
        t = targets[path]
        inputs, outputs = t.inputs[1] - t.inputs[0], t.outputs[1] - t.outputs[0]
        A = torch.empty(CONVERTED_RANK, inputs, device="meta")
        made[t.module] = t, Folded(A=A, B=torch.empty(outputs, CONVERTED_RANK, device="meta"))
    return made


def lora_bytes(paths: Collection[str], ranks: Iterable[Mapping[str, Target]], dtype: torch.dtype) -> int:
    return max(image.pack(lora_modules(paths, targets), dtype).nbytes for targets in ranks)


def _folded(adapter: Adapter, base: Base, rank: int) -> Modules:
    targets, whole = base.targets[rank], base.targets[0]
    known = {path: without_weight(slots, targets[path]) for path, slots in adapter.modules.items() if path in whole}
    return fold_adapter(replace(adapter, modules=adapter.modules | known), targets, adds_bias=rank == 0)


def _targets_of(adapter: Adapter) -> dict[str, Target] | None:
    """Targets as wide as the adapter's own tensors; None if its slots depend on more of the base than widths."""
    if adapter.norms or any(slots.tokens is not None for slots in adapter.modules.values()):
        return None
    targets = {}
    for number, (path, s) in enumerate(adapter.modules.items()):
        product = s.structure if isinstance(s.structure, (Kronecker, Hadamard)) else None  # what has both widths
        more = s.shared, s.from_weight, s.magnitude, s.base_weight, s.scale, s.gain, s.input_scale
        more += (None if product else s.structure,)
        if any(slot is not None for slot in more) or any(M.is_meta for term in s.terms for M in (term.A, term.B)):
            return None
        blocks = (1, 1, 1) if s.rotation is None else s.rotation.shape
        inputs = s.terms[0].A.shape[1] if s.terms else blocks[0] * blocks[1]
        vector = next((v for v in (s.bias, s.base_bias) if v is not None), None)
        outputs = s.terms[0].B.shape[0] if s.terms else 1 if vector is None else len(vector)
        if product:
            outputs, inputs = structured.sizes(product)
        targets[path] = Target(
            path, number, "column", inputs, outputs, (0, inputs), (0, outputs), lambda: None,
            lambda outputs=outputs: torch.zeros(outputs),
        )  # fmt: skip
    return targets


def _rank(folded: Folded) -> int:
    own, shared = folded.A, folded.shared
    return max(0 if own is None else own.shape[0], 0 if shared is None else shared.A.shape[0])


def _peft_type(folder: Path) -> str | None:
    """What the config says, also of an adapter that is refused."""
    try:
        method = read_config(folder).get("peft_type")
    except (AdapterError, OSError):
        return None
    return method[:80].encode(errors="backslashreplace").decode() if isinstance(method, str) else None
