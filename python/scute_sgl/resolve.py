"""What slots owe to another module or to the base weight, before a module is sharded.

A term of W is made in two steps: every rank multiplies the part of W that it holds, one sum makes the products whole,
and the same arithmetic on the same numbers then gives every rank the same slots. W is read where it lies, a bounded
number of rows at a time, and never copied to the host; only products with it are.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from scute_sgl.errors import AdapterError
from scute_sgl.linalg import all_finite, compact, full_float32, product, times
from scute_sgl.slots import FromWeight, Slots, Sparse, Target, Term

MAX_SECONDS = 120  # of a load that no other request can interrupt; SGLang's watchdog ends a server after 300


def fold_gates(modules: Mapping[str, Slots], targets: Mapping[str, Target]) -> dict[str, Slots]:
    """Move a gated down_proj's input scale into the gain of the up_proj that it reads, before sharding.

    Exact, because act(gate) * up is elementwise. It stays where low-rank terms read the unscaled input.
    """
    modules = dict(modules)
    for path, slots in sorted(modules.items()):
        up = targets[path].gated_by
        if slots.input_scale is None or up not in targets or slots.terms or slots.shared or slots.from_weight:
            continue
        if slots.input_scale.shape != (targets[up].out_features,):
            found, want = tuple(slots.input_scale.shape), (targets[up].out_features,)
            raise AdapterError("bad_shape", f"found shape {found}, want {want}", module=path, key="input_scale")
        above = modules.get(up, Slots())
        modules[up] = replace(above, gain=product(above.gain, slots.input_scale).float())
        modules[path] = replace(slots, input_scale=None)
    return modules


def fold_norms(
    modules: Mapping[str, Slots], norms: Mapping[str, Tensor], targets: Mapping[str, Target]
) -> dict[str, Slots]:
    """Give every layer behind a trained norm the ratio of its weight to the base's, as the slot ``norm``.

    The trained weight is rounded to the base's dtype, as PEFT's load does. AdapterError ``unknown_key`` for a norm that
    no target reads, ``bad_shape`` for another width, ``wrong_base`` where only the base's weight is 0.
    """
    modules, ratios = dict(modules), {}
    for path, t in targets.items():
        if t.norm in norms:
            if t.norm not in ratios:
                ratios[t.norm] = _ratio(t.norm, norms[t.norm], t.norm_weight())
            modules[path] = replace(modules.get(path, Slots()), norm=ratios[t.norm])
    if unread := sorted(norms.keys() - ratios.keys()):
        raise AdapterError("unknown_key", "no adaptable layer reads this norm alone", module=unread[0])
    return modules


def _ratio(path: str, trained: Tensor, weight: Tensor) -> Tensor:
    if trained.shape != weight.shape:
        found, want = tuple(trained.shape), tuple(weight.shape)
        raise AdapterError("bad_shape", f"found shape {found}, want {want}", module=path, key="weight")
    before, after = weight.detach().cpu().double(), trained.to(weight.dtype).double()
    ratio = torch.where(after == before, 1.0, after / before)
    if not all_finite(ratio):
        where = int((~ratio.isfinite()).nonzero()[0])
        hint = f"input {where}: found {after[where]:g} over the base's {before[where]:g}; want a finite ratio"
        raise AdapterError("wrong_base", hint, module=path, key="weight")
    return ratio


def products(modules: Mapping[str, Slots], targets: Mapping[str, Target]) -> dict[str, Tensor]:
    """This rank's part of every module's product, {path: flat float64} on the host, in the order of the modules.

    Parts of one module have one size on all ranks, and their sum is what :func:`resolve` takes. AdapterError
    ``unsupported_method`` where a method needs all of a split W, ``bad_shape`` for an operand that does not fit it.
    """
    parts = {}
    for path in sorted(modules, key=lambda path: targets[path].module):
        source, t = modules[path].from_weight, targets[path]
        if source is None:
            continue
        _check(source, t)
        if source.right is not None or source.left is not None:
            parts[path] = _part(source, t)
    return parts


def resolve(
    modules: Mapping[str, Slots], targets: Mapping[str, Target], totals: Mapping[str, Tensor]
) -> dict[str, Slots]:
    """Slots without ``from_weight``: its terms and bias are added. ``totals``: products, summed over the ranks.

    AdapterError ``too_large`` if that takes longer than MAX_SECONDS, and what ``finish`` raises.
    """
    modules, deadline = dict(modules), time.monotonic() + MAX_SECONDS
    for path, slots in modules.items():
        if (source := slots.from_weight) is None:
            continue
        if time.monotonic() > deadline:
            hint = f"its terms of the base weight take over {MAX_SECONDS} s, in which no request is served"
            raise AdapterError("too_large", f"{hint}; target fewer modules", module=path)
        P, b0 = _whole(source, targets[path], totals.get(path))
        with full_float32():
            terms, bias = source.finish(P, b0 if slots.base_bias is None else slots.base_bias.double())
        bias = slots.bias if bias is None else bias.cpu() if slots.bias is None else slots.bias + bias.cpu()
        terms = slots.terms + terms
        if source.cancels:
            terms = (compact(terms, P.device),)
        terms = tuple(replace(term, A=term.A.cpu(), B=term.B.cpu()) for term in terms)
        modules[path] = replace(slots, from_weight=None, terms=terms, bias=bias)
    return modules


def without_weight(slots: Slots, t: Target) -> Slots:
    """Slots of the same sizes after folding for which no base weight is needed: zeros for what W gives.

    The same ``finish`` runs, on a W that has a shape only, so its refusals by shapes are raised here too. What only
    numbers of W would refuse is not. ``t.bias`` tells by None whether there is a bias.
    """
    if slots.magnitude is not None:  # s, outside the terms or not, has its size
        slots = replace(slots, magnitude=None, scale=slots.magnitude)
    if isinstance(slots.structure, Sparse):
        slots = replace(slots, structure=replace(slots.structure, rounded=False))
    slots = replace(slots, base_weight=None)
    if (source := slots.from_weight) is None:
        return slots
    _check(source, t)
    with FakeTensorMode(allow_non_fake_inputs=True):
        P = torch.empty(t.out_features, t.in_features)
        if source.right is not None:
            P = times(P, source.right)
        elif source.left is not None:
            P = times(P.T, source.left.T).T
        terms, bias = source.finish(P, None if t.bias() is None else torch.empty(t.out_features, dtype=torch.float64))
        terms = slots.terms + terms
        terms = (compact(terms, P.device),) if source.cancels else terms
    terms = tuple(Term(_zeros(term.A), _zeros(term.B)) for term in terms)
    bias = slots.bias if bias is None else _zeros(bias)
    return replace(slots, from_weight=None, terms=terms, bias=bias)


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros(()).expand(like.shape)


def is_split(t: Target) -> bool:
    return t.inputs != (0, t.in_features) or t.outputs != (0, t.out_features)


def _check(source: FromWeight, t: Target) -> None:
    if t.kind == "embedding":
        raise AdapterError("unsupported_method", "terms of an embedding's weight are not served", module=t.path)
    if source.right is None and source.left is None and is_split(t):
        hint = "this method needs all of the base weight, of which each tensor-parallel rank holds a part"
        raise AdapterError("unsupported_method", f"{hint}; want --tp-size 1", module=t.path)
    for operand, axis, size in ((source.right, 0, t.in_features), (source.left, 1, t.out_features)):
        if operand is not None and operand.shape[axis] != size:
            found = tuple(operand.shape)
            raise AdapterError("bad_shape", f"found {found} beside W, want {size} on axis {axis}", module=t.path)


def _part(source: FromWeight, t: Target) -> Tensor:
    """The local product among zeros for what other ranks hold, the local bias likewise, and the shares that are held."""
    W, b0, inputs, outputs = t.weight(), t.bias(), slice(*t.inputs), slice(*t.outputs)
    if source.right is not None:
        P = torch.zeros(t.out_features, source.right.shape[1], dtype=torch.float64)
        P[outputs] = times(W, source.right[inputs]).cpu()
    else:
        P = torch.zeros(len(source.left), t.in_features, dtype=torch.float64)
        P[:, inputs] = times(W.T, source.left[:, outputs].T).T.cpu()
    bias, held = torch.zeros(t.out_features, dtype=torch.float64), 0.0
    if b0 is not None:
        bias[outputs], held = b0.cpu().double(), len(b0) / t.out_features
    return torch.cat([P.flatten(), bias, torch.tensor([W.numel() / (t.in_features * t.out_features), held]).double()])


def _whole(source: FromWeight, t: Target, total: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """P and the base bias from the sum over the ranks. Ranks that hold the same part, as of replicated KV heads or
    of a row-parallel layer's bias, were all counted: the whole was added that many times."""
    if total is None:
        b0 = t.bias()
        return t.weight(), None if b0 is None else b0.cpu().double()
    copies, bias_copies = (round(float(n)) for n in total[-2:])
    bias, P = total[-2 - t.out_features : -2], total[: -2 - t.out_features] / copies
    shape = (t.out_features, -1) if source.right is not None else (-1, t.in_features)
    return P.view(shape), bias / bias_copies if bias_copies else None
