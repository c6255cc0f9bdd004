"""Adapter folder -> config and tensors -> Adapter. The only code that reads an adapter's files.

A folder is adapter_config.json and adapter_model.safetensors; nothing else is opened, but for added_tokens.json,
and nothing is ever unpickled or downloaded. Sizes are checked before memory is spent on them.
"""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path

import torch
from torch import Tensor

from scute_sgl.errors import AdapterError
from scute_sgl.linalg import all_finite
from scute_sgl.methods import METHODS, NOT_SERVED
from scute_sgl.names import is_embedding, is_head
from scute_sgl.slots import Adapter, BaseShape

CONFIG, WEIGHTS, ADDED_TOKENS = "adapter_config.json", "adapter_model.safetensors", "added_tokens.json"

MAX_JSON = 4 << 20
MAX_HEADER = 16 << 20
MAX_KEYS = 100_000
MAX_BYTES = 16 << 30

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "U8": torch.uint8,
}
NOT_READ = ("BOOL", "I8", "U16", "U32", "U64", "C64", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4")  # safetensors' others


def max_file_bytes(values: int, base: BaseShape) -> int:
    """Of a file whose adapter may fit in arenas of ``values`` values: in float64, and with the whole embedding and
    output head, which PEFT saves too when it adapts them."""
    copies = sum(math.prod(shape) for path, shape in base.items() if is_embedding(path) or is_head(path))
    return min(MAX_BYTES, MAX_HEADER + 8 * (values + copies))


def load(path: str | os.PathLike, max_bytes: int = MAX_BYTES) -> tuple[dict, dict[str, Tensor]]:
    """Config and tensors of an adapter folder, in the file's dtypes, on the host."""
    folder = Path(path)
    try:
        if not folder.is_dir():
            hint = f"no folder {str(path)!r}; want a local adapter folder (nothing is downloaded)"
            raise AdapterError("not_found", hint)
        if not os.path.lexists(folder / CONFIG):  # a link to nowhere is said to be one
            inside = [config.parent.name for config in sorted(folder.glob(f"*/{CONFIG}"))[:3]]
            hint = f"; sub-folders that have one: {', '.join(inside)}" if inside else ""
            raise AdapterError("not_found", f"no {CONFIG} in {str(path)!r}{hint}", key=CONFIG)
        config = read_config(folder)
        if not os.path.lexists(folder / WEIGHTS):
            raise _no_weights(folder)
        return config, _read_safetensors(folder / WEIGHTS, max_bytes)
    except OSError as error:
        raise AdapterError("not_found", f"cannot read {error.filename}: {error.strerror}") from None


def read_config(folder: Path) -> dict:
    return _read_json(folder / CONFIG)


def read_adapter(
    path: str | os.PathLike, base: BaseShape | None = None, max_bytes: int = MAX_BYTES
) -> Adapter:
    """The adapter as slots, validated against the base's shapes; without a base only against itself."""
    config, tensors = load(path, max_bytes)
    method = config.get("peft_type")
    if not isinstance(method, str) or method not in METHODS:
        known = isinstance(method, str) and method in NOT_SERVED
        reason = f": {NOT_SERVED[method]}" if known else ""
        hint = f"peft_type={str(method)[:80]}{reason}; supported: {', '.join(METHODS)}"
        raise AdapterError("unsupported_method", hint, key="peft_type")
    if base is not None:
        _check_added_tokens(Path(path) / ADDED_TOKENS, base.vocab_size)
    for key, tensor in tensors.items():
        if tensor.is_floating_point() and not all_finite(tensor):
            raise AdapterError("bad_shape", "found NaN or infinity, want finite numbers", key=key)
    return METHODS[method].read(config, tensors, base)


def _no_weights(folder: Path) -> AdapterError:
    names = sorted(entry.name for entry in folder.iterdir())
    if any(name.startswith("adapter_model") and "safetensors" in name for name in names):
        return AdapterError("not_found", f"the weights are sharded; save them as one {WEIGHTS}", key=WEIGHTS)
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt", ".pkl"))]
    if pickles:
        hint = f"a pickle can run code when opened; save as {WEIGHTS} (safe_serialization=True)"
        return AdapterError("unsafe_file", hint, key=pickles[0])
    return AdapterError("not_found", f"no {WEIGHTS} in {str(folder)!r}", key=WEIGHTS)


def _open(path: Path):
    # A FIFO or a device in an adapter's folder would block or never end.
    if not stat.S_ISREG(path.stat().st_mode):
        raise AdapterError("unsafe_file", "not a regular file", key=path.name)
    return open(path, "rb")


def read_base_config(folder: str | os.PathLike) -> dict:
    """A base model's config.json. ValueError, in words, for none, for one that is no JSON object or over MAX_JSON."""
    path = Path(folder, "config.json")
    if not path.is_file():
        hint = "; it is an adapter's" if Path(folder, CONFIG).is_file() else ""
        raise ValueError(f"no config.json in {str(folder)!r}; want the folder of the base model{hint}")
    try:
        return _read_json(path)
    except AdapterError as error:
        raise ValueError(f"{path}: {error.hint}") from None


def _read_json(path: Path) -> dict:
    with _open(path) as file:
        text = file.read(MAX_JSON + 1)
    if len(text) > MAX_JSON:
        raise AdapterError("too_large", f"over {MAX_JSON} bytes", key=path.name)
    return _parse(text, "bad_config", path.name)


def _parse(text: bytes, code: str, name: str) -> dict:
    try:
        value = json.loads(text, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise AdapterError(code, f"not valid JSON: {str(error)[:120]}", key=name) from None
    if not isinstance(value, dict):
        raise AdapterError(code, f"found a JSON {type(value).__name__}, want an object", key=name)
    return value


def _no_duplicates(pairs: list) -> dict:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key occurs twice")
    return result


def _read_safetensors(path: Path, max_bytes: int) -> dict[str, Tensor]:
    """Format: u64 header length, JSON header {key: {dtype, shape, data_offsets}}, then the tensors without gaps.

    Read, not mapped: a mapped file that its owner overwrites or truncates would kill the server with a bus error.
    """

    def bad(hint: str, key: str = WEIGHTS) -> AdapterError:
        return AdapterError("unsafe_file", f"not a well-formed safetensors file: {hint}", key=key)

    with _open(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise AdapterError("too_large", f"found {size} bytes, want at most {max_bytes}", key=WEIGHTS)
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise bad(f"a header of {length} bytes in a file of {size}")
        if length > MAX_HEADER:
            raise AdapterError("too_large", f"found a header of {length} bytes, want at most {MAX_HEADER}", key=WEIGHTS)
        header = _parse(file.read(length), "unsafe_file", WEIGHTS)
        header.pop("__metadata__", None)
        if len(header) > MAX_KEYS:
            raise AdapterError("too_large", f"found {len(header)} tensors, want at most {MAX_KEYS}", key=WEIGHTS)
        extents = []
        for key, entry in header.items():
            named = entry.get("dtype") if isinstance(entry, dict) else None
            if named in NOT_READ:
                hint = f"found numbers of type {named}, want {', '.join(DTYPES)}"
                raise AdapterError("bad_config", hint, key=key[:200])
            try:
                dtype, shape, (begin, end) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
                if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
                    raise ValueError
                if len(shape) > 8 or end - begin != math.prod(shape) * dtype.itemsize:
                    raise ValueError
                if math.prod(max(n, 1) for n in shape) > MAX_BYTES:  # no elements, but strides that overflow
                    raise ValueError
            except (KeyError, TypeError, ValueError):
                raise bad(f"found entry {str(entry)[:120]}", key[:200]) from None
            extents.append((begin, end, key, dtype, shape))
        extents.sort(key=lambda extent: extent[:2])
        position = 0
        for begin, end, key, *_ in extents:
            if begin != position:
                raise bad(f"tensor data begins at {begin}, want {position}", key[:200])
            position = end
        if position != size - 8 - length:
            raise bad(f"found {size - 8 - length} bytes of tensor data, want {position} (truncated?)")
        return {key: _read_tensor(file, dtype, shape, end - begin) for begin, end, key, dtype, shape in extents}


def _read_tensor(file, dtype: torch.dtype, shape: list[int], size: int) -> Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    if size and file.readinto(tensor.flatten().view(torch.uint8).numpy()) != size:
        raise AdapterError("unsafe_file", "the file shrank while it was read", key=WEIGHTS)
    return tensor


def _check_added_tokens(path: Path, vocab_size: int) -> None:
    """A copy of the base tokenizer's list is harmless; ids that the base has no rows for are not."""
    if not path.exists():
        return
    beyond = {t: i for t, i in _read_json(path).items() if not isinstance(i, int) or not 0 <= i < vocab_size}
    if beyond:
        token, index = next(iter(beyond.items()))
        hint = f"token {token[:40]!r} has id {index}, the base's vocabulary ends at {vocab_size - 1}"
        raise AdapterError("wrong_base", hint, key=ADDED_TOKENS)
