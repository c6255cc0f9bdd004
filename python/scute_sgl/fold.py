"""Sharded slots + the local base weight -> the tensors that kernels apply. Runs once, when an adapter loads.

    y' = y + y * scale + bias + (x A^T) B^T + ...      y = (x R) W + b0 as the base layer gives it

        s      = scale * dora                dora = magnitude / ||row of (W + sum_k B_k A_k)||
        scale' = s * gain - 1                the identity is dropped, because 16 bits keep s - 1 but not s
        bias'  = gain * (b - s * b0)         b = (base_bias or b0) + bias
        R'     = diag(norm) R                a norm's trained over its base weight, for the layers behind it
        A'     = A diag(norm)                S and own rows of an output head likewise
        B'     = gain * dora * B             terms are outside s: a plain scale leaves them alone
        e'     = gain * e
        S'     = round(W + S) - W where PEFT adds S to W in W's dtype

Vectors are multiplied in float64 and rounded once to float32. Only row norms, S', and what resolve.py does before, read
W: on its device, a bounded number of rows at a time. All results are on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from scute_sgl.errors import AdapterError
from scute_sgl.linalg import full_float32, product
from scute_sgl.resolve import fold_gates, fold_norms, is_split, products, resolve
from scute_sgl.shard import shard
from scute_sgl.slots import Adapter, Folded, Kronecker, Mix, Slots, Sparse, Target, Term, Tokens
from scute_sgl.structured import OF_WEIGHT, folded_structure

SCRATCH = 1 << 22  # float32 elements of W in work at a time (16 MiB)
Result = TypeVar("Result")
Share = Callable[[AdapterError | None], AdapterError | None]


def fold_adapter(
    adapter: Adapter,
    targets: Mapping[str, Target],
    sum_over_tp: Callable[[Tensor], Tensor] = lambda part: part,
    share: Share = lambda own: own,
    adds_bias: bool = True,
) -> dict[int, tuple[Target, Folded]]:
    """Shard and fold every module: {row of the device table: (target, folded)}, in ascending order.

    ``targets`` by HF module path. Everything that may fail runs under :func:`agree` with ``share``,
    so a refusal on one rank is a refusal on all and nobody waits for a sum that never comes.
    ``sum_over_tp`` gets one float64 vector with the products of all split modules that need some (resolve.py), then
    one on W's device with the sums of squares of all modules whose inputs are split; neither if it would be empty.
    AdapterError: ``unknown_key`` (no such module), ``bad_shape``, ``wrong_base``, what resolve.py and shard.py refuse.
    """

    def with_own_products() -> tuple[dict[str, Slots], dict[str, Tensor]]:
        unknown = sorted(adapter.modules.keys() - targets.keys())
        if unknown:
            raise AdapterError("unknown_key", "the base model has no such adaptable module", module=unknown[0])
        modules = fold_gates(fold_norms(adapter.modules, adapter.norms, targets), targets)
        return modules, products(modules, targets)

    modules, found = agree(with_own_products, share)
    split = [path for path in found if is_split(targets[path])]
    found |= zip(split, _sums([found[path] for path in split], sum_over_tp))

    def local_part() -> list[tuple[Target, Slots, Tensor | None]]:
        whole = resolve(modules, targets, found)
        parts = [(t, shard(whole[t.path], t)) for t in sorted(map(targets.get, whole), key=lambda t: t.module)]
        return [(t, slots, _read_base(slots, t, adds_bias)) for t, slots in parts]

    parts = agree(local_part, share)
    sums = iter(_sums([squares for t, _, squares in parts if squares is not None and _splits_inputs(t)], sum_over_tp))

    def with_whole_norms() -> dict[int, tuple[Target, Folded]]:
        folded = {}
        for t, slots, squares in parts:
            if squares is not None and _splits_inputs(t):
                squares = next(sums)
            folded[t.module] = t, _fold(slots, t, squares, adds_bias)
        return folded

    return agree(with_whole_norms, share)


def agree(step: Callable[[], Result], share: Share) -> Result:
    """Run a step that does not communicate; if it fails on any rank, it fails on all of them.

    ``share`` takes this rank's refusal, or None, and returns the first among all ranks' (Ranks.first_refusal). A rank
    that refused raises its own error, the others that one.
    """
    result, error = None, None
    try:
        result = step()
    except Exception as caught:  # whatever it is, the other ranks wait for this one's status
        error = caught
    refusal = share(None if error is None else AdapterError.of(error))
    if error is not None:
        raise error
    if refusal is not None:
        raise refusal
    return result


def _sums(parts: list[Tensor], sum_over_tp: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
    """Every part summed over the ranks, in one collective."""
    return sum_over_tp(torch.cat(parts)).split([len(part) for part in parts]) if parts else ()


def fold(
    slots: Slots,
    t: Target,
    sum_over_tp: Callable[[Tensor], Tensor] = lambda part: part,
    adds_bias: bool = True,
) -> Folded:
    """Fold one module that is already sharded. ``adds_bias``: whether this rank adds a row-parallel layer's bias."""
    squares = _read_base(slots, t, adds_bias)
    if squares is not None and _splits_inputs(t):
        squares = sum_over_tp(squares)
    return _fold(slots, t, squares, adds_bias)


def needs_base_weight(slots: Slots) -> bool:
    rounded = isinstance(slots.structure, Sparse) and slots.structure.rounded
    return rounded or any(slot is not None for slot in (slots.magnitude, slots.base_weight, slots.from_weight))


def live_slots(folded: Collection[Folded]) -> list[str]:
    """Names of the slots that are not the identity, as the kernels see them."""
    found = {
        "R": any(f.rotation is not None for f in folded),
        "s": any(f.scale is not None for f in folded),
        "b": any(f.bias is not None for f in folded),
        "A": any(f.A is not None or f.shared is not None for f in folded),
        "B": any(f.B is not None or f.shared is not None for f in folded),
        "d": any(f.shared is not None for f in folded),
        "e": any(f.shared is not None for f in folded),
        "S": any(isinstance(f.structure, (Kronecker, Sparse, *OF_WEIGHT)) for f in folded),
        "mix": any(isinstance(f.structure, Mix) for f in folded),
        "rows": any(f.tokens is not None for f in folded),
    }
    return [name for name, is_live in found.items() if is_live]


def _fold(slots: Slots, t: Target, squares: Tensor | None, adds_bias: bool) -> Folded:
    """``squares``: the whole sums of squares of the rows of W + B A, where there is a magnitude."""
    dora = None if slots.magnitude is None else slots.magnitude.double() / squares.sqrt().to(slots.magnitude.device)
    A, B = _join(slots.terms)
    shared, lift = slots.shared, product(dora, slots.gain)
    if B is not None and lift is not None:
        B = (B * lift[:, None]).float()
    if A is not None and slots.norm is not None:
        A = (A * slots.norm).float()
    if shared is not None:
        shared = replace(shared, d=shared.d.float(), e=product(shared.e, slots.gain).float())
    scale = product(dora, slots.scale, slots.gain)
    return Folded(
        A=A,
        B=B,
        scale=None if scale is None else (scale - 1).float(),
        bias=_shift(slots, t, product(dora, slots.scale), adds_bias),
        rotation=_rotation(slots),
        shared=shared,
        structure=folded_structure(slots.structure, slots.norm, t.weight),
        tokens=slots.tokens and Tokens(slots.tokens.ids, product(slots.tokens.rows, slots.norm).float()),
    )


def _shift(slots: Slots, t: Target, s: Tensor | None, adds_bias: bool) -> Tensor | None:
    """gain * (b - s * b0), float32 (out,), or None where it is 0 for lack of slots.

    Ranks that do not add a row-parallel bias hold zeros, not None: images of all ranks keep the same shape,
    and with it the same place in the arena and the same live bits.
    """
    b0 = t.bias()
    shift = None if slots.bias is None else slots.bias.double()
    if slots.base_bias is not None:
        # b0 is None on a rank that adds no row-parallel bias; zeros are returned there.
        moved = slots.base_bias.double() if b0 is None else slots.base_bias.double() - b0.cpu().double()
        shift = moved if shift is None else shift + moved
    if s is not None and b0 is not None:
        kept = (s - 1) * b0.cpu().double()
        shift = -kept if shift is None else shift - kept
    if shift is None:
        return None
    if t.kind == "row" and not adds_bias:
        return torch.zeros_like(shift, dtype=torch.float32)
    return product(shift, slots.gain).float()


def _rotation(slots: Slots) -> Tensor | None:
    """R - I: (in,) for a diagonal, else (in / b or 1, b, b)."""
    if slots.rotation is None:
        diagonal = product(slots.norm, slots.input_scale)
        return None if diagonal is None else (diagonal - 1).float()
    blocks = slots.rotation.double()
    if slots.norm is not None:
        blocks = slots.norm.double().view(-1, blocks.shape[-1], 1) * blocks
    return (blocks - torch.eye(blocks.shape[-1], dtype=blocks.dtype, device=blocks.device)).float()


def _join(terms: tuple[Term, ...]) -> tuple[Tensor | None, Tensor | None]:
    """All terms as one of their summed rank, float32: A (rank, in), B (out, rank)."""
    if not terms:
        return None, None
    return torch.cat([term.A.float() for term in terms]), torch.cat([term.B.float() for term in terms], dim=1)


def _splits_inputs(t: Target) -> bool:
    return t.inputs != (0, t.in_features)


def _read_base(slots: Slots, t: Target, adds_bias: bool) -> Tensor | None:
    """What a module needs of the base: checks ``base_bias`` and ``base_weight``, returns the local sums of squares
    for a magnitude.

    Per output feature, float64 (out,) on W's device. W is (out, in), an embedding's (vocabulary, out).
    """
    holds_bias = adds_bias or t.kind != "row"  # else only another rank knows whether there is one
    if slots.base_bias is not None and holds_bias and t.bias() is None:
        hint = "the base layer has no bias that this one could replace, and PEFT would ignore it"
        raise AdapterError("wrong_base", hint, module=t.path, key="base_bias")
    if not needs_base_weight(slots):
        return None
    W = t.weight()
    step = max(1, SCRATCH // max(1, W.shape[1]))
    chunks = [slice(begin, begin + step) for begin in range(0, W.shape[0], step)]
    if slots.base_weight is not None:
        # The file may hold the base in another precision: what counts is the weight it would have become.
        if not all(torch.equal(slots.base_weight[rows].to(W), W[rows]) for rows in chunks):
            hint = "the base weight in the file differs from the served one"
            raise AdapterError("wrong_base", hint, module=t.path, key="base_weight")
    if slots.magnitude is None:
        return None
    A, B = _join(slots.terms)
    embedding = t.kind == "embedding"
    squares = torch.zeros(W.shape[1 if embedding else 0], dtype=torch.float64, device=W.device)
    if A is not None:
        A, B = A.to(W.device), B.to(W.device)
        left, right = (A.T, B.T) if embedding else (B, A)  # W's rows take left @ right
    with full_float32():
        for rows in chunks:
            total = W[rows].float() if A is None else torch.addmm(W[rows].float(), left[rows], right)
            part = total.square().sum(0 if embedding else 1, dtype=torch.float64)
            if embedding:
                squares += part
            else:
                squares[rows] = part
    return squares
