"""Methods with trained numbers at random places of W's shape (FourierFT, WaveFT): the places, and shared matrices.

A place (p, q) is an output and an input that depend on the seed and the layer's shape alone. In FourierFT each gives two
ranks: a column of inputs and one of outputs. Layers of one shape have the same; layers of several shapes get their ranks
one after the other in one pair A, B, and d is zero on the ranks of other shapes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from scute_sgl.errors import AdapterError
from scute_sgl.names import Module
from scute_sgl.slots import SharedTerm

MAX_PLACES = 1 << 28  # elements of a layer among which PEFT draws: 8 bytes for each, for a moment
MAX_RANK = 8192  # every row of a batch needs scratch of this width
MAX_VALUES = 1 << 27  # of A and of B
Columns = Callable[[Tensor, Tensor, int, int], tuple[Tensor, Tensor]]


def shared_terms(
    spectra: dict[str, Tensor], modules: dict[str, Module], seed: int, columns: Columns, repeats: int
) -> dict[str, SharedTerm]:
    """A term for every module's spectrum (n,), by path; all have the same A and B.

    ``columns(p, q, inputs, outputs)`` gives the rows of A (repeats n, inputs) and the columns of B (outputs, repeats n)
    of n places. AdapterError ``too_large`` with the numbers if A and B would be too large.
    """
    counts = counted(spectra, modules, seed)
    if any(None in shape for shape in counts):  # no base: only d is known
        unknown = torch.empty(0, 0, device="meta")
        return {path: SharedTerm(unknown, unknown, d=v.repeat(repeats), e=unknown[0:0]) for path, v in spectra.items()}
    if not counts:
        return {}  # which the caller refuses
    rank = repeats * sum(counts.values())
    inputs, outputs = (max(sizes) for sizes in zip(*counts))
    if rank > MAX_RANK or rank * max(inputs, outputs) > MAX_VALUES:
        shapes = ", ".join(f"{n} in {o} x {i}" for (i, o), n in counts.items())
        hint = f"{shapes}: shared matrices of rank {rank} and width {max(inputs, outputs)}"
        want = f"want a rank up to {MAX_RANK} and up to {MAX_VALUES} values; train fewer numbers or fewer shapes"
        raise AdapterError("too_large", f"{hint}; {want}", key="n_frequency")
    A, B = torch.zeros(rank, inputs), torch.zeros(outputs, rank)
    begins, begin = {}, 0
    for (i, o), n in counts.items():
        p, q = places(i, o, n, seed)
        own = slice(begin, begin + repeats * n)
        A[own, :i], B[:o, own] = columns(p, q, i, o)
        begins[i, o], begin = begin, own.stop
    terms = {}
    for path, spectrum in spectra.items():
        shape = modules[path].in_features, modules[path].out_features
        d = torch.zeros(rank, dtype=torch.promote_types(spectrum.dtype, torch.float32))
        for repeat in range(repeats):
            first = begins[shape] + repeat * counts[shape]
            d[first : first + len(spectrum)] = spectrum
        terms[path] = SharedTerm(A, B, d=d, e=torch.ones(shape[1]))
    return terms


def counted(spectra: dict[str, Tensor], modules: dict[str, Module], seed: int) -> dict[tuple, int]:
    """(in, out) of every shape of layer, with None without a base, and how many places it needs."""
    if not 0 <= seed < 1 << 63:
        raise AdapterError("bad_config", f"found {seed}, want 0 <= seed < 2**63", key="random_loc_seed")
    counts: dict[tuple, int] = {}
    for path, spectrum in spectra.items():
        shape = modules[path].in_features, modules[path].out_features
        if None not in shape and len(spectrum) > shape[0] * shape[1]:
            found = f"found {len(spectrum)} numbers for a layer of {shape}, want fewer"
            raise modules[path].error("bad_shape", "", found)
        counts[shape] = max(counts.get(shape, 0), len(spectrum))
    return counts


def places(inputs: int, outputs: int, n: int, seed: int) -> tuple[Tensor, Tensor]:
    """The first n of a permutation of W's elements, as PEFT draws it: their outputs p and inputs q, int64."""
    size = inputs * outputs
    if size > MAX_PLACES:
        raise AdapterError("too_large", f"places among {size} elements of a layer; want up to {MAX_PLACES}")
    index = torch.randperm(size, generator=torch.Generator().manual_seed(seed))[:n]
    return index // inputs, index % inputs
