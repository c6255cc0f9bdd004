"""Arithmetic with a base weight: in float64, where the weight lies, a bounded number of its elements at a time.

And what an adapter's own tensors are asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from scute_sgl.errors import AdapterError
from scute_sgl.slots import Term

SCRATCH = 1 << 21  # float64 elements of W in work at a time (16 MiB)
MAX_SIDE = 8192  # of an eigenproblem, which stalls the server: n^3 work, seconds for 4096


def all_finite(tensor: Tensor) -> bool:
    """Whether no number is NaN or infinite. An extreme is NaN if any is; isfinite writes, and takes 14 times as long."""
    return tensor.numel() == 0 or bool(torch.stack(tensor.aminmax()).isfinite().all())


@contextmanager
def full_float32() -> Iterator[None]:
    """SGLang may have allowed TF32 products (--enable-tf32-matmul), whose 10 bits would show in s - 1."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def times(M: Tensor, X: Tensor) -> Tensor:
    """M @ X in float64 on M's device, for a large M (m, n) of any dtype and a small X (n, k)."""
    X = X.to(M.device, torch.float64)
    step = max(1, SCRATCH // max(1, M.shape[1]))
    return torch.cat([rows.double() @ X for rows in M.split(step)])


def has_numbers(W: Tensor) -> bool:
    """False for the stand-in of a weight of which only the shape is known (resolve.without_weight)."""
    return not isinstance(W, FakeTensor)


def product(*factors: Tensor | None) -> Tensor | None:
    """float64 product of the factors that exist."""
    result = None
    for factor in factors:
        if factor is not None:
            result = factor.double() if result is None else result * factor.double()
    return result


def dense(delta: Tensor) -> Term:
    """A whole matrix (out, in) as a term of rank min(out, in)."""
    outputs, inputs = delta.shape
    identity = torch.eye(min(outputs, inputs), dtype=delta.dtype)
    return Term(identity, delta) if inputs <= outputs else Term(delta, identity)


def kronecker_term(first: Term, second: Term) -> Term:
    """The Kronecker product of two matrices as a term: of both ranks' product, or of the product's own whole rank."""
    inputs, outputs = first.A.shape[1] * second.A.shape[1], len(first.B) * len(second.B)
    if len(first.A) * len(second.A) > min(inputs, outputs):
        return dense(torch.kron(first.B @ first.A, second.B @ second.A))
    return Term(torch.kron(first.A, second.A), torch.kron(first.B, second.B))


def without_singular(W: Tensor, part: slice) -> Term:
    """What takes a part of the singular triplets out of W (out, in): minus the sum of s_k u_k v_k^T over ``part`` of
    them in ascending order, so that ``slice(-r, None)`` is the r largest.

    With V the eigenvectors of W^T W that sum is W V V^T, or U U^T W if W has fewer rows than columns: no sign of a
    singular vector is left in it. AdapterError ``too_large`` where both sides of W exceed MAX_SIDE.
    """
    tall = W if W.shape[0] > W.shape[1] else W.T
    side = tall.shape[1]
    if side > MAX_SIDE:
        hint = f"needs the singular vectors of a {tuple(W.shape)} weight; want one side up to {MAX_SIDE}"
        raise AdapterError("too_large", hint)
    gram = torch.zeros(side, side, dtype=torch.float64, device=W.device)
    for rows in tall.split(max(1, SCRATCH // side)):
        gram += rows.double().T @ rows.double()
    vectors = torch.linalg.eigh(gram).eigenvectors[:, part]
    rest = times(tall, vectors)
    return Term(A=vectors.T, B=-rest) if tall is W else Term(A=rest.T, B=-vectors)


def without_columns(W: Tensor, r: int, scale: float) -> Term:
    """Minus scale * Q[:, :r] R[:r] of W = Q R (out, in). Q[:, :r] spans the first r columns: it is their own factor."""
    Q = torch.linalg.qr(W[:, :r].double()).Q
    return Term(A=times(W.T, Q).T, B=-scale * Q)


def compact(terms: tuple[Term, ...], device: torch.device) -> Term:
    """The sum of the terms as one, of the smallest rank that holds any such sum, by singular values.

    A trained term lies near the part of W that it replaces, and HRA's reflections come in pairs that undo each other.
    Stored apart, they would be rounded to 16 bits before they cancel, with errors as large as what is left of them.
    """
    A = torch.cat([term.A.to(device, torch.float64) for term in terms])
    B = torch.cat([term.B.to(device, torch.float64) for term in terms], dim=1)
    (Q_in, R_in), (Q_out, R_out) = torch.linalg.qr(A.T), torch.linalg.qr(B)
    U, S, Vh = torch.linalg.svd(R_out @ R_in.T, full_matrices=False)
    return Term(A=(Q_in @ (Vh.T * S.sqrt())).T, B=Q_out @ (U * S.sqrt()))
