"""TRAINABLE_TOKENS: rows of the vocabulary, of an embedding's output or of an output head's weight.

    embedding:  F(x) = row_t for a token t that the adapter has a row for, else the base's
    head:       F(x)_t = x . row_t for such a token, else the base's

A file holds the rows (n, width) in the order of the config's ids; they replace the base's, and are not differences.
Where the base ties its output head to the embedding, PEFT changes the head too, and stores nothing or a copy for it. As a
low-rank term a row would need a one-hot column as long as the vocabulary, so tenants keep ids and rows alone, those of a
tied pair once. PEFT rounds the rows to the base's dtype, in which they are stored: an embedding's output has PEFT's bits.

LoRA's trainable_token_indices are the same beside its own terms (lora.py); a list means the embedding, an object names
modules by the ends of their paths. PEFT has no layer with both own rows and other changes, but for a head's norm.

Checked against peft/tuners/trainable_tokens/layer.py and utils/other.py of PEFT 0.21.2.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from scute_sgl.errors import AdapterError, NeedsBase
from scute_sgl.methods import common
from scute_sgl.names import Module, group, is_embedding, is_head
from scute_sgl.slots import Adapter, BaseShape, Slots, Tokens

FIELDS = {"target_modules": None, "exclude_modules": None, "token_indices": []}
NEUTRAL: frozenset[str] = frozenset()  # PEFT's init_weights is neutral for all methods
ROWS, WRAPPED_ROWS = "trainable_tokens_delta", "token_adapter.trainable_tokens_delta"


def read(config: dict, tensors: dict[str, Tensor], base: BaseShape | None) -> Adapter:
    c = common.settings(config, FIELDS, NEUTRAL)

    if base is None:
        raise NeedsBase("wrong_base", "whether the base ties its head to the embedding decides what the rows change")
    own: dict[str, Tokens] = {}

    def read_one(module: Module) -> Slots:
        own[module.path] = take(module, ROWS, c["token_indices"], "token_indices")
        return Slots()

    modules, _ = group(tensors, base, (ROWS,))
    if base.tied:
        modules = _without_copy(modules)
    return with_tokens(common.build("TRAINABLE_TOKENS", config, modules, read_one), own, base)


def _without_copy(modules: list[Module]) -> list[Module]:
    """Without the output head of a tied pair, for which PEFT stores the embedding's rows a second time."""
    rows = next((module.tensors.get(ROWS) for module in modules if module.is_embedding), None)
    heads = [module for module in modules if rows is not None and is_head(module.path)]
    for head in heads:
        copy = head.need(ROWS, *rows.shape)
        if head.tensors or not torch.equal(copy, rows):
            raise head.error("wrong_base", ROWS, "found other tensors than the rows of the embedding it is tied to")
    return [module for module in modules if module not in heads]


def take_wrapped(modules: list[Module], indices: object) -> dict[str, Tokens]:
    """The rows that LoRA's ``trainable_token_indices`` are about, by path; no longer listed in ``modules``."""
    named = indices if isinstance(indices, dict) else {"embed_tokens": indices}
    found, used = {}, set()
    for module in modules:
        if WRAPPED_ROWS in module.tensors:
            name = next((name for name in named if module.file_path.endswith(name)), None)
            if name is None:
                hint = f"trainable_token_indices name {list(named)!r:.80}, not this module"
                raise module.error("unknown_key", WRAPPED_ROWS, hint)
            if len(module.tensors) > 1:
                hint = "beside other tensors of the module, which PEFT cannot run"
                raise module.error("unsupported_method", WRAPPED_ROWS, hint)
            found[module.path] = take(module, WRAPPED_ROWS, named[name], "trainable_token_indices")
            module.adapted = False
            used.add(name)
    # Of a tied pair with the same ids PEFT keeps the embedding's rows alone.
    kept = [named[name] for name in used]
    if unread := [name for name in named if name not in used and not (is_head(name) and named[name] in kept)]:
        raise AdapterError("missing_tensor", f"the file holds no rows of {unread[0]!r}", key="trainable_token_indices")
    return found


def take(module: Module, name: str, indices: object, field: str) -> Tokens:
    """The rows of a module for these ids, in the ids' order."""
    if not module.is_embedding and not is_head(module.path):
        raise module.error("unsupported_method", name, "own rows are those of an embedding or output head")
    sizes = module.in_features, module.out_features
    vocabulary, width = sizes if module.is_embedding else sizes[::-1]
    whole = isinstance(indices, list) and all(type(index) is int for index in indices)
    if not whole or not all(0 <= index < common.INDICES for index in indices):
        raise AdapterError("bad_config", f"found {indices!r:.80}, want token ids", key=field)
    if len(set(indices)) != len(indices):
        raise AdapterError("bad_config", "found an id twice", key=field)
    if vocabulary is not None and any(index >= vocabulary for index in indices):
        hint = f"found id {max(indices)}, the base's vocabulary ends at {vocabulary - 1}"
        raise AdapterError("wrong_base", hint, key=field)
    rows, ids = module.need(name, len(indices), width), torch.tensor(indices, dtype=torch.int64)
    order = ids.argsort()
    return Tokens(ids[order], rows[order])


def with_tokens(adapter: Adapter, own: dict[str, Tokens], base: BaseShape | None) -> Adapter:
    """The adapter with these rows, and those of an embedding for the output head too if the base ties it to that."""
    embedding = next((tokens for path, tokens in own.items() if is_embedding(path)), None)
    if embedding is not None and base is not None and base.tied:
        head = next(filter(is_head, base), "")
        if not head:
            raise AdapterError("wrong_base", "the output head is tied to the embedding, and adapters cannot change it")
        own = {head: embedding} | own
    modules = dict(adapter.modules)
    for path, tokens in own.items():
        if replace(modules.get(path, Slots()), base_weight=None) != Slots():
            hint = "own rows beside other changes of the module, which PEFT cannot run"
            raise AdapterError("unsupported_method", hint, module=path)
        modules[path] = replace(modules.get(path, Slots()), tokens=tokens)
    return replace(adapter, modules=modules)
