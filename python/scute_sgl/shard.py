"""Slots of a whole module -> the part that this tensor-parallel rank holds.

Only ``Target.inputs`` and ``Target.outputs`` decide, so column, row, merged, replicated and KV-replicated
layers, heads and embeddings need no cases of their own: what runs over outputs (B, e, scale, magnitude, biases,
gain) is cut by outputs, what runs over inputs (A, input_scale, norm, rotation blocks) by inputs. The parts are views.
A Kronecker product is cut by its blocks; where they straddle shards, or a norm scales its inputs, it becomes the low-rank
term that it is.

Every shape is checked against the whole module here, so that a wrong tensor is refused and never cut askew.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from scute_sgl import structured
from scute_sgl.errors import AdapterError
from scute_sgl.slots import (
    BlockAffine, Hadamard, Kronecker, Mix, SharedTerm, Slots, Sparse, Structure, Target, Term, Tokens,
)  # fmt: skip


def shard(slots: Slots, t: Target) -> Slots:
    """This rank's part of one module's slots. AdapterError ``bad_shape`` for tensors that do not fit ``t``.

    A and B of a shared term stay whole, because ranks and layers read different corners of one copy.
    ``base_weight`` lies as the base stores it: (out, in), for an embedding (vocabulary, out).
    """
    assert slots.from_weight is None, "resolve.py comes first"
    elsewhere = slots.shared, slots.input_scale, slots.rotation, slots.structure
    if t.kind == "embedding" and any(slot is not None for slot in elsewhere):
        raise AdapterError("unsupported_method", "an embedding takes A, B, scale and bias only", module=t.path)
    if slots.norm is not None and slots.shared is not None:
        hint = "its matrices are shared with other tenants, so they cannot take this adapter's own norm"
        raise AdapterError("unsupported_method", f"{hint} {t.norm!r}; train without it", module=t.path)
    if slots.input_scale is not None and slots.rotation is not None:
        raise AdapterError("bad_config", "found both an input scale and a rotation, want one", module=t.path)
    if slots.structure is not None and (slots.magnitude is not None or slots.gain is not None):
        raise AdapterError("unsupported_method", "has a magnitude or a gain beside a structure", module=t.path)
    terms, structure = _structure(slots.structure, t, slots.norm is not None)
    weight_axes = ("in", "out") if t.kind == "embedding" else ("out", "in")
    by_outputs = ("scale", "magnitude", "bias", "base_bias", "gain")
    return replace(
        slots,
        terms=tuple(_term(term, t) for term in slots.terms + terms),
        structure=structure,
        shared=slots.shared and _shared(slots.shared, t),
        rotation=None if slots.rotation is None else _rotation(slots.rotation, t),
        input_scale=_cut(slots.input_scale, t, "input_scale", "in"),
        norm=_cut(slots.norm, t, "norm", "in"),
        tokens=slots.tokens and _tokens(slots.tokens, t),
        base_weight=_cut(slots.base_weight, t, "base_weight", *weight_axes),
        **{name: _cut(getattr(slots, name), t, name, "out") for name in by_outputs},
    )


def _cut(tensor: Tensor | None, t: Target, key: str, *axes: str | int) -> Tensor | None:
    """Narrow each axis named "in" or "out" to this rank; a number is the size the axis must have."""
    if tensor is None:
        return None
    full = {"in": t.in_features, "out": t.out_features}
    want = tuple(full.get(axis, axis) for axis in axes)
    if tuple(tensor.shape) != want:
        raise _bad_shape(t, key, tuple(tensor.shape), want)
    for dim, axis in enumerate(axes):
        if axis in full:
            begin, end = t.inputs if axis == "in" else t.outputs
            tensor = tensor.narrow(dim, begin, end - begin)
    return tensor


def _term(term: Term, t: Target) -> Term:
    rank = term.A.shape[0]
    return Term(A=_cut(term.A, t, "A", rank, "in"), B=_cut(term.B, t, "B", "out", rank))


def _shared(term: SharedTerm, t: Target) -> SharedTerm:
    rank, in_max = term.A.shape
    out_max, rank_of_b = term.B.shape
    if rank_of_b != rank or in_max < t.in_features or out_max < t.out_features:
        found = f"{tuple(term.A.shape)} and {tuple(term.B.shape)}"
        want = f"({rank}, >= {t.in_features}) and (>= {t.out_features}, {rank})"
        raise _bad_shape(t, "shared A and B", found, want)
    return replace(term, d=_cut(term.d, t, "d", rank), e=_cut(term.e, t, "e", "out"))


def _tokens(tokens: Tokens, t: Target) -> Tokens:
    """Of the tokens that this rank holds, counted from its first; perhaps none."""
    held, width = (t.inputs, t.out_features) if t.kind == "embedding" else (t.outputs, t.in_features)
    if t.kind not in ("embedding", "head"):
        raise AdapterError("unsupported_method", "own rows are those of an embedding or output head", module=t.path)
    if tokens.rows.shape != (len(tokens.ids), width):
        raise _bad_shape(t, "rows", tuple(tokens.rows.shape), (len(tokens.ids), width))
    here = (tokens.ids >= held[0]) & (tokens.ids < held[1])
    return Tokens(tokens.ids[here] - held[0], tokens.rows[here])


def _rotation(blocks: Tensor, t: Target) -> Tensor:
    """(in / b or 1, b, b) -> the blocks of this rank's inputs. A single block serves every rank as it is."""
    count, size = blocks.shape[0], blocks.shape[-1]
    whole = t.in_features // size
    if blocks.shape != (count, size, size) or t.in_features % size or count not in (1, whole):
        raise _bad_shape(t, "rotation", tuple(blocks.shape), f"({whole} or 1, {size}, {size})")
    begin, end = t.inputs
    if begin % size or end % size:
        hint = f"rotation blocks of {size} inputs straddle the tensor-parallel shards of {end - begin} inputs"
        raise AdapterError("bad_shape", hint, module=t.path, key="rotation")
    return blocks if count == 1 else blocks[begin // size : end // size]


def _structure(s: Structure | None, t: Target, scaled: bool) -> tuple[tuple[Term, ...], Structure | None]:
    """This rank's part of a structure, or the whole module's terms that stand for it. ``scaled``: its inputs are."""
    if s is None:
        return (), None
    outputs, inputs = structured.sizes(s)
    if outputs != t.out_features or inputs not in (None, t.in_features):
        raise _bad_shape(t, "structure", (outputs, inputs), (t.out_features, t.in_features))
    if isinstance(s, Kronecker):
        (rows, over_rows), (columns, over_columns) = (
            ((begin // size, end // size), begin % size or end % size)
            for (begin, end), size in zip((t.outputs, t.inputs), s.inner)
        )
        if over_rows or over_columns or scaled:
            return (structured.as_term(s),), None
        return (), replace(s, w1=s.w1[slice(*rows), slice(*columns)])
    if isinstance(s, Hadamard):  # whose W is this rank's part
        rank = len(s.A)
        return (), Hadamard(_cut(s.A, t, "A", rank, "in"), _cut(s.B, t, "B", "out", rank))
    if isinstance(s, BlockAffine):
        if scaled:
            hint = f"its blocks take the inputs as they are, not behind this adapter's own norm {t.norm!r}; train without it"
            raise AdapterError("unsupported_method", hint, module=t.path)
        return (), _block_affine(s, t)
    if isinstance(s, Sparse):
        own = (s.rows >= t.outputs[0]) & (s.rows < t.outputs[1])
        own &= (s.columns >= t.inputs[0]) & (s.columns < t.inputs[1])
        shape = t.outputs[1] - t.outputs[0], t.inputs[1] - t.inputs[0]
        rows, columns = s.rows[own] - t.outputs[0], s.columns[own] - t.inputs[0]
        return (), replace(s, rows=rows, columns=columns, values=s.values[own], shape=shape)
    return (), _mix(s, t)


def _block_affine(s: BlockAffine, t: Target) -> BlockAffine:
    r = s.M.shape[1]
    if s.M.shape != (t.out_features // r, r, r) or t.in_features % r:
        raise _bad_shape(t, "M", tuple(s.M.shape), f"square blocks that divide {t.out_features} and {t.in_features}")
    if any(place % r for place in (*t.outputs, *t.inputs)):
        shards = " x ".join(str(end - begin) for begin, end in (t.outputs, t.inputs))
        hint = f"blocks of {r} outputs and inputs straddle the tensor-parallel shards of {shards}"
        raise AdapterError("bad_shape", hint, module=t.path, key="M")
    return BlockAffine(s.M[t.outputs[0] // r : t.outputs[1] // r])


def _mix(s: Mix, t: Target) -> Mix:
    if t.inputs != (0, t.in_features):
        hint = "it mixes outputs, of which every rank has a part of each sum; want --tp-size 1, or other target_modules"
        raise AdapterError("unsupported_method", hint, module=t.path)
    begin, end = t.outputs
    if s.group < 2 or s.group % 2 or begin % s.group or end % s.group:
        hint = f"pairs in groups of {s.group} straddle the tensor-parallel shards of {end - begin} outputs"
        raise AdapterError("bad_shape", hint, module=t.path)
    own = slice(begin // (1 + s.one_each), end // (1 + s.one_each))
    return replace(s, f1=s.f1[own], f2=s.f2[own])


def _bad_shape(t: Target, key: str, found: object, want: object) -> AdapterError:
    return AdapterError("bad_shape", f"found shape {found}, want {want}", module=t.path, key=key)
