"""Folded tensors of all modules -> one contiguous host buffer in the kernels' own layout, and back.

An image is what a tenant costs: layout.py's tensors, each aligned to ALIGN bytes, one after the other in the
order of modules, padded at the end to whole BLOCKs. Its offsets count from its own start, so that loading it
is one copy and an addition. Matrices that other tenants may share (VeRA's A and B) are kept beside it, named by
their content.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from scute_sgl import layout, structured
from scute_sgl.errors import AdapterError
from scute_sgl.packer import Packer, check_width, view
from scute_sgl.slots import Folded, SharedTerm, Structure, Target, Tokens

MAX_FIELD = 0xFFFF  # rank8 and the rotation block have 16 bits each in META


@dataclass(frozen=True)
class SharedSet:
    """A and B of a shared term, packed one after the other. Equal ``key`` means equal bytes and shapes."""

    key: str  # sha256
    data: Tensor  # uint8 on the host
    b: int  # offset of B; A is at 0
    rank8: int
    inputs: int  # of the packed A: rounded up to a multiple of 8
    outputs: int

    @property
    def nbytes(self) -> int:
        return self.data.numel()


@dataclass(frozen=True)
class Image:
    """One tenant on this rank. ``entries``: int64 (highest module + 1, FIELDS), offsets from the start of ``data``."""

    data: Tensor  # uint8 on the host, a multiple of BLOCK
    entries: Tensor
    dtype: torch.dtype
    live: int  # DELTA | SHARED | ROTATED | STRUCTURED: the ops that have work for it
    rank_max: int  # highest rank8 of its own A, B and of its shared set: the columns of v that it needs
    shared: SharedSet | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its own; the shared set is not counted."""
        return self.data.numel()


def pack(folded: Mapping[int, tuple[Target, Folded]], dtype: torch.dtype, pin: bool = False) -> Image:
    """{row of the device table: (target, folded)} -> Image in the serving dtype; ``pin`` page-locks its buffers.

    Tensors on the meta device give an image of the right sizes without data. AdapterError: ``bad_config`` where a value
    is not finite in ``dtype``, or where modules share different matrices; ``bad_shape`` where a size does not fit the
    layout.
    """
    packer = Packer(dtype)
    entries = torch.full((max(folded, default=-1) + 1, layout.FIELDS), -1, dtype=torch.int64)
    entries[:, layout.META] = 0
    live, rank_max, shared, rotation, tokens = 0, 0, None, None, None
    for module, (t, f) in sorted(folded.items()):
        offsets, rank8, block, one_block = {}, 0, 0, False
        if f.A is not None:
            rank8 = _fits(layout.round_up(f.A.shape[0], layout.RANK_STEP), t, "rank")
            pack_a = layout.pack_embedding_a if t.kind == "embedding" else _checked_pack_a(t)
            offsets[layout.A] = packer.add(f.A, t, "A", pack_a)
            offsets[layout.B] = packer.add(f.B, t, "B", layout.pack_b)
        if f.scale is not None:
            offsets[layout.SCALE] = packer.add(f.scale, t, "scale")
        if f.bias is not None:
            offsets[layout.BIAS] = packer.add(f.bias, t, "bias")
        if f.tokens is not None:
            rows = packer.pack_tokens(f.tokens, t)
            again = tokens is not None and torch.equal(tokens[0], rows)  # a tied pair has the same
            tokens = rows, tokens[1] if again else packer.append(rows)
            offsets[layout.TOKENS] = tokens[1]
        live |= layout.DELTA if offsets else 0
        if f.shared is not None:
            shared = _one_set(shared, f.shared, t)
            offsets[layout.D] = packer.add(f.shared.d, t, "d", _pad_rank)
            offsets[layout.E] = packer.add(f.shared.e, t, "e")
            live |= layout.SHARED
        if f.rotation is not None:
            block = _fits(1 if f.rotation.dim() == 1 else f.rotation.shape[-1], t, "rotation block")
            one_block = f.rotation.dim() == 3 and f.rotation.shape[0] == 1
            # Layers behind one norm have the same diagonal, next to each other.
            again = rotation is not None and not f.rotation.is_meta and _same(rotation[0], f.rotation)
            rotation = f.rotation, rotation[1] if again else packer.add(f.rotation, t, "rotation")
            offsets[layout.ROTATION] = rotation[1]
            live |= layout.ROTATED
        if f.structure is not None:
            offsets[layout.STRUCTURE] = packer.add_structure(f.structure, t)
            live |= layout.STRUCTURED
        for field, offset in offsets.items():
            entries[module, field] = offset
        entries[module, layout.META] = layout.pack_meta(rank8, block, one_block)
        rank_max = max(rank_max, rank8)
    packed_set = None
    if shared is not None:
        if (entries[:, layout.A] >= 0).any():  # a plan lists a row for its own factors or for shared ones
            raise AdapterError("unsupported_method", "has low-rank terms of its own beside ones with shared matrices")
        packed_set = _pack_set(*shared, dtype, pin)
        rank_max = max(rank_max, packed_set.rank8)
    return Image(packer.bytes(pin), entries, dtype, live, rank_max, packed_set)


def unpack(image: Image, targets: Mapping[int, Target]) -> dict[int, Folded]:
    """What the kernels see of an image: float32, ranks padded with zeros to a multiple of 8. For tests and tools."""
    return {module: _unpack(image, module, t) for module, t in sorted(targets.items()) if module < len(image.entries)}


def _unpack(image: Image, module: int, t: Target) -> Folded:
    entry = image.entries[module].tolist()
    meta = entry[layout.META]
    rank8, block, one_block = meta & MAX_FIELD, meta >> 16 & MAX_FIELD, bool(meta >> 32 & 1)
    inputs, outputs = t.inputs[1] - t.inputs[0], t.outputs[1] - t.outputs[0]

    def get(field: int, *shape: int) -> Tensor | None:
        return None if entry[field] < 0 else view(image.data, entry[field], shape, image.dtype).float()

    if t.kind == "embedding":
        A = get(layout.A, inputs, rank8)
        A = None if A is None else A.T
    else:
        A = get(layout.A, rank8 // 8, inputs // 8, 8, 8)
        A = None if A is None else layout.unpack_a(A)
    B = get(layout.B, rank8 // 8, outputs, 8)
    blocks = (1 if one_block else inputs // max(block, 1), block, block)
    shared = None
    if entry[layout.D] >= 0:
        s = image.shared
        shared_a = view(s.data, 0, (s.rank8 // 8, s.inputs // 8, 8, 8), image.dtype).float()
        shared_b = view(s.data, s.b, (s.rank8 // 8, s.outputs, 8), image.dtype).float()
        d, e = get(layout.D, s.rank8), get(layout.E, outputs)
        shared = SharedTerm(layout.unpack_a(shared_a), layout.unpack_b(shared_b), d, e)
    return Folded(
        A=A,
        B=None if B is None else layout.unpack_b(B),
        scale=get(layout.SCALE, outputs),
        bias=get(layout.BIAS, outputs),
        rotation=get(layout.ROTATION, *((inputs,) if block == 1 else blocks)),
        shared=shared,
        structure=None if entry[layout.STRUCTURE] < 0 else _unpack_structure(image, entry[layout.STRUCTURE]),
        tokens=None if entry[layout.TOKENS] < 0 else _unpack_tokens(image, entry[layout.TOKENS], t),
    )


def _unpack_structure(image: Image, offset: int) -> Structure:
    found = structured.unpack(image.data, offset, image.dtype)
    wide = {f.name: value.float() for f in fields(found) if _is_number(value := getattr(found, f.name))}
    return replace(found, **wide)


def _is_number(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _unpack_tokens(image: Image, offset: int, t: Target) -> Tokens:
    width = t.out_features if t.kind == "embedding" else t.in_features
    ids, rows = layout.unpack_rows(image.data, offset, width, image.dtype)
    return Tokens(ids.long(), rows.float())


def _checked_pack_a(t: Target) -> Callable[[Tensor], Tensor]:
    check_width(t)
    return layout.pack_a


def _fits(value: int, t: Target, what: str) -> int:
    if value > MAX_FIELD:
        raise AdapterError("bad_shape", f"{what} {value} exceeds {MAX_FIELD}", module=t.path)
    return value


def _pad_rank(d: Tensor) -> Tensor:
    return torch.nn.functional.pad(d, (0, -len(d) % layout.RANK_STEP))


def _one_set(seen: tuple[SharedTerm, Target] | None, term: SharedTerm, t: Target) -> tuple[SharedTerm, Target]:
    """The set that all modules of an adapter share; ops read one per tenant."""
    if seen is None:
        return term, t
    first = seen[0]
    if not (_same(first.A, term.A) and _same(first.B, term.B)):
        hint = f"other shared matrices than {seen[1].path}; one pair per adapter is supported"
        raise AdapterError("bad_config", hint, module=t.path)
    return seen


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or a.shape == b.shape and (a.is_meta or torch.equal(a, b))


def _pack_set(term: SharedTerm, t: Target, dtype: torch.dtype, pin: bool) -> SharedSet:
    rank, width = term.A.shape
    rank8 = _fits(layout.round_up(rank, layout.RANK_STEP), t, "rank")
    A = torch.nn.functional.pad(term.A, (0, -width % 8))  # nobody reads past a layer's own inputs
    packer = Packer(dtype)
    packer.add(A, t, "shared A", layout.pack_a)
    b = packer.add(term.B, t, "shared B", layout.pack_b)
    shared = SharedSet("", packer.bytes(pin), b, rank8, A.shape[1], term.B.shape[0])
    if shared.data.is_meta:
        return shared
    digest = hashlib.sha256(f"{dtype} {rank8} {shared.inputs} {shared.outputs} ".encode())
    digest.update(shared.data.numpy())
    return replace(shared, key=digest.hexdigest())
