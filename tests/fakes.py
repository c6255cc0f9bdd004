"""A small base model as rank r of n would hold it, and the slots' definition in float64."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
from torch import Tensor

from scute_sgl.slots import BlockAffine, Folded, FromWeight, Hadamard, Kronecker, Mix, SharedTerm, Slots, Sparse, Target, Term

HIDDEN, HEADS, KV_HEADS, HEAD, FFN, VOCAB = 64, 8, 2, 8, 128, 96
ATTENTION, MLP = "model.layers.{}.self_attn.", "model.layers.{}.mlp."
EMBEDDING, LM_HEAD = "model.embed_tokens", "lm_head"


class FakeModel:
    """Full weights of every kind of layer: column, merged, KV-replicated, row, replicated, head, embedding."""

    def __init__(self, layers: int = 1, dtype: torch.dtype = torch.float32, bias: bool = True, seed: int = 0):
        random = torch.Generator().manual_seed(seed)
        self.kinds, self.shapes, self.gates = {}, {}, {}
        self._add(EMBEDDING, "embedding", VOCAB, HIDDEN)
        for layer in range(layers):
            attention, mlp = ATTENTION.format(layer), MLP.format(layer)
            self._add(attention + "q_proj", "column", HIDDEN, HEADS * HEAD)
            self._add(attention + "k_proj", "column", HIDDEN, KV_HEADS * HEAD)
            self._add(attention + "v_proj", "column", HIDDEN, KV_HEADS * HEAD)
            self._add(attention + "o_proj", "row", HEADS * HEAD, HIDDEN)
            self._add(mlp + "gate_proj", "column", HIDDEN, FFN)
            self._add(mlp + "up_proj", "column", HIDDEN, FFN)
            self._add(mlp + "down_proj", "row", FFN, HIDDEN)
            self._add(mlp + "router", "replicated", HIDDEN, 16)
            self.gates[mlp + "down_proj"] = mlp + "up_proj"
        self._add(LM_HEAD, "head", HIDDEN, VOCAB)
        self.weights, self.biases = {}, {}
        for path, (inputs, outputs) in self.shapes.items():
            shape = (inputs, outputs) if self.kinds[path] == "embedding" else (outputs, inputs)
            self.weights[path] = (0.1 * torch.randn(shape, generator=random)).to(dtype)
            self.biases[path] = (0.1 * torch.randn(outputs, generator=random)).to(dtype) if bias else None
        self.biases[EMBEDDING] = None

    def _add(self, path: str, kind: str, inputs: int, outputs: int) -> None:
        self.kinds[path], self.shapes[path] = kind, (inputs, outputs)

    def targets(self, rank: int = 0, tp: int = 1) -> dict[str, Target]:
        return {path: self._target(path, module, rank, tp) for module, path in enumerate(self.shapes)}

    def _target(self, path: str, module: int, rank: int, tp: int) -> Target:
        kind, (inputs, outputs) = self.kinds[path], self.shapes[path]
        in_range, out_range = (0, inputs), (0, outputs)
        if kind in ("row", "embedding"):
            in_range = _part(inputs, rank, tp)
        elif path.endswith(("k_proj", "v_proj")):
            out_range = _part(outputs, rank * min(tp, KV_HEADS) // tp, min(tp, KV_HEADS))
        elif kind != "replicated":
            out_range = _part(outputs, rank, tp)
        weight, bias = self.weights[path], self.biases[path]
        rows, columns = (in_range, out_range) if kind == "embedding" else (out_range, in_range)
        weight = weight[slice(*rows), slice(*columns)]
        if bias is not None:
            bias = None if kind == "row" and rank else bias[slice(*out_range)]
        gate = self.gates.get(path, "")
        return Target(
            path, module, kind, inputs, outputs, in_range, out_range, lambda: weight, lambda: bias, gated_by=gate
        )


def _part(size: int, rank: int, tp: int) -> tuple[int, int]:
    return rank * size // tp, (rank + 1) * size // tp


def random_slots(t: Target, *names: str, near: bool = False, seed: int = 0) -> Slots:
    """Slots of the whole module with these parts. ``near``: as near the identity as trained vectors are (0.2%).

    Names are Slots' fields, with "rotation" or "one_block" for the kinds of blocks, "terms" or "two_terms", "right",
    "left" or "whole" for what it takes from the weight, and STRUCTURES for a structure.
    """
    random = torch.Generator().manual_seed(seed + 7919 * t.module)
    spread = 2e-3 if near else 0.5
    inputs, outputs = t.in_features, t.out_features

    def noise(*shape: int, std: float = 0.1) -> Tensor:
        return std * torch.randn(shape, generator=random)

    def block(count: int, size: int) -> Tensor:
        return torch.eye(size) + noise(count, size, size, std=spread)

    made = {}
    for name in names:
        if name in ("terms", "two_terms"):
            ranks = (3,) if name == "terms" else (3, 8)
            made["terms"] = tuple(Term(noise(r, inputs), noise(outputs, r)) for r in ranks)
        elif name == "shared":
            A, B = noise(5, inputs + 16), noise(outputs + 8, 5)
            made["shared"] = SharedTerm(A, B, d=noise(5, std=1), e=noise(outputs, std=1))
        elif name in STRUCTURES:
            made["structure"] = STRUCTURES[name](noise, inputs, outputs)
        elif name in ("right", "left", "whole"):
            made["from_weight"] = _from_weight(name, noise, inputs, outputs)
        elif name in ("scale", "gain"):
            made[name] = 1 + noise(outputs, std=spread)
        elif name == "magnitude":
            made[name] = "later"  # it follows the norm, which needs the terms
        elif name in ("bias", "base_bias"):
            made[name] = noise(outputs)
        elif name in ("input_scale", "norm"):
            made[name] = 1 + noise(inputs, std=spread)
        elif name in ("rotation", "one_block"):
            made["rotation"] = block(inputs // 8 if name == "rotation" else 1, 8)
        else:
            raise ValueError(name)
    if "magnitude" in made:
        norms = row_norms(resolved(Slots(**made | {"magnitude": None}), t), t).float()
        made["magnitude"] = norms * (1 + noise(outputs, std=spread))
    return Slots(**made)


def _sparse(noise, inputs: int, outputs: int, rounded: bool = False) -> Sparse:
    rows, columns = (noise(outputs * inputs) > 0.1).view(outputs, inputs).nonzero().T
    return Sparse(rows, columns, noise(len(rows)), (outputs, inputs), rounded)


STRUCTURES = {  # their blocks divide every shard of FakeModel
    "kronecker": lambda noise, i, o: Kronecker(noise(o // 4, i // 8, std=0.5), noise(4, 8, std=0.5)),
    "split": lambda noise, i, o: Kronecker(noise(o // 8, i // 8, std=0.5), noise(8, 2, std=0.5), noise(2, 8, std=0.5)),
    "sparse": _sparse,
    "rounded": lambda noise, i, o: _sparse(noise, i, o, rounded=True),
    "hadamard": lambda noise, i, o: Hadamard(noise(5, i, std=1), noise(o, 5, std=1)),
    "block_affine": lambda noise, i, o: BlockAffine(noise(o // 4, 4, 4, std=0.5)),
    "mix": lambda noise, i, o: Mix(1 + noise(o, std=0.2), noise(o, std=0.3), 4),
    "pairs": lambda noise, i, o: Mix(1 + noise(o // 2, std=0.2), noise(o // 2, std=0.3), 2, one_each=True),
}


def structured(s, x: Tensor, y: Tensor, W: Tensor) -> Tensor:
    """The definition of a structure in slots.py, on y with all the rest in it. A Mix has its whole f1."""
    if isinstance(s, BlockAffine):
        r, x = s.M.shape[1], x.view(len(x), -1, s.M.shape[1])
        for k, M in enumerate(s.M.double()):  # W_k M x + M x, with every block of inputs
            u = x @ M.T
            of_block = u.flatten(1) @ W[k * r : (k + 1) * r].T + u.sum(1)
            y = torch.cat([y[:, : k * r], y[:, k * r : (k + 1) * r] + of_block, y[:, (k + 1) * r :]], dim=1)
        return y
    if isinstance(s, Hadamard):
        return y + x @ (W * (s.B.double() @ s.A.double())).T
    if isinstance(s, Kronecker):
        w2 = s.w2.double() if s.w2_b is None else s.w2.double() @ s.w2_b.double()
        blocks = x.view(len(x), s.w1.shape[1], w2.shape[1])
        return y + torch.einsum("npq,lp,oq->nlo", blocks, s.w1.double(), w2).flatten(1)
    if isinstance(s, Sparse):
        return y.index_add(1, s.rows, x[:, s.columns] * s.values.double())
    if isinstance(s, Mix):
        groups = y.view(len(y), -1, 2, s.group // 2)
        f1, f2 = (f.double().view(-1, 2 - s.one_each, s.group // 2) for f in (s.f1, s.f2))
        turned = torch.stack([-groups[:, :, 1], groups[:, :, 0]], dim=2)
        return (groups * f1 + turned * f2).view_as(y)
    return y


def _from_weight(name: str, noise, inputs: int, outputs: int) -> FromWeight:
    A, B, mix = noise(3, inputs), noise(outputs, 3), noise(3, 3, std=1).double()
    right, left = noise(inputs, 3) if name == "right" else None, noise(3, outputs) if name == "left" else None

    def finish(P, b0):
        bias = None if b0 is None else 0.5 * b0
        if name == "whole":
            return (Term(P[:3], B),), bias
        return (Term(torch.tanh(mix @ P), B) if name == "left" else Term(A, P @ mix),), bias

    return FromWeight(finish, right, left)


def resolved(slots: Slots, t: Target) -> Slots:
    """The slots with what they take from the whole weight, by the definition in slots.py."""
    if (source := slots.from_weight) is None:
        return slots
    P, b0 = full_weight(t), t.bias() if slots.base_bias is None else slots.base_bias
    if source.right is not None:
        P = P @ source.right.double()
    elif source.left is not None:
        P = source.left.double() @ P
    terms, bias = source.finish(P, None if b0 is None else b0.double())
    bias = slots.bias if bias is None else bias if slots.bias is None else slots.bias + bias
    return replace(slots, from_weight=None, terms=slots.terms + terms, bias=bias)


def full_weight(t: Target) -> Tensor:
    """(out, in) in float64, also of an embedding."""
    W = t.weight().double()
    return W.T if t.kind == "embedding" else W


def row_norms(slots: Slots, t: Target) -> Tensor:
    total = full_weight(t)
    for term in slots.terms:
        total = total + term.B.double() @ term.A.double()
    return total.norm(dim=1)


def apply_slots(slots: Slots, t: Target, x: Tensor) -> Tensor:
    """The definition at the top of slots.py, for an unsharded target. x: float64 (rows, in)."""
    slots = resolved(slots, t)
    x = x if slots.norm is None else x * slots.norm.double()
    W, b0 = full_weight(t), t.bias()
    b = torch.zeros(t.out_features) if b0 is None else b0
    b = (b if slots.base_bias is None else slots.base_bias).double()
    b = b if slots.bias is None else b + slots.bias.double()
    s = torch.ones(t.out_features, dtype=torch.float64) if slots.scale is None else slots.scale.double()
    dora = 1 if slots.magnitude is None else slots.magnitude.double() / row_norms(slots, t)
    y = (rotate(slots, x) @ W.T) * s * dora + b
    for term in slots.terms:
        y = y + x @ term.A.double().T @ term.B.double().T * dora
    if slots.shared is not None:
        y = y + _shared(slots.shared, x[:, : t.in_features], 0, 0, t.out_features)
    return structured(slots.structure, x, y if slots.gain is None else y * slots.gain.double(), W)


def rotate(slots: Slots, x: Tensor) -> Tensor:
    if slots.input_scale is not None:
        return x * slots.input_scale.double()
    if slots.rotation is None:
        return x
    size = slots.rotation.shape[-1]
    blocks = slots.rotation.double().expand(x.shape[1] // size, size, size)
    return torch.einsum("nki,kij->nkj", x.view(len(x), -1, size), blocks).reshape(x.shape)


def apply_folded(f: Folded, t: Target, x: Tensor) -> Tensor:
    """What base layer and kernels make of this rank's x, in float64: its outputs, partial for split inputs."""
    W, b0 = full_weight(t), t.bias()
    change = x if f.rotation is None else f.rotation.double()
    if f.rotation is None:
        rotated = x
    elif f.rotation.dim() == 1:
        rotated = x + x * change
    else:
        blocks = change.expand(x.shape[1] // change.shape[-1], -1, -1)
        rotated = x + torch.einsum("nki,kij->nkj", x.view(len(x), -1, change.shape[-1]), blocks).reshape(x.shape)
    y = rotated @ W.T if b0 is None else rotated @ W.T + b0.double()
    out = y if f.scale is None else y + y * f.scale.double()
    out = out if f.bias is None else out + f.bias.double()
    if f.A is not None:
        out = out + x @ f.A.double().T @ f.B.double().T
    if f.shared is not None:
        out = out + _shared(f.shared, x, t.inputs[0], *t.outputs)
    s = f.structure
    return structured(replace(s, f1=1 + s.f1.double()) if isinstance(s, Mix) else s, x, out, W)


def _shared(term: SharedTerm, x: Tensor, in_begin: int, out_begin: int, out_end: int) -> Tensor:
    A, B = term.A.double()[:, in_begin : in_begin + x.shape[1]], term.B.double()[out_begin:out_end]
    return ((x @ A.T) * term.d.double()) @ B.T * term.e.double()


def every_combination() -> list[tuple[str, ...]]:
    """All sets of slots that make sense in one module."""
    flags = ("shared", "scale", "magnitude", "bias", "base_bias", "gain")
    terms = ((), ("terms",), ("two_terms",))
    rotations = ((), ("input_scale",), ("rotation",), ("one_block",))
    picks = itertools.product(*(((), (flag,)) for flag in flags), terms, rotations)
    return [sum(pick, ()) for pick in picks]
