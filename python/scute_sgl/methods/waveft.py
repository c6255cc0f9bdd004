"""WaveFT: the change of W is the inverse wavelet transform of n trained numbers at random places.

    F(x) = x W + b + ((x A^T) * d) B^T,   d = scaling * waveft_spectrum (n,)

The place (p, q) lies in one of the four bands of a transform of one level: halves of rows and of columns. With db1,
the Haar wavelet, it becomes a 2 x 2 patch of W, so a column of A and one of B have two numbers each: 1/sqrt(2) twice,
or with signs + and -. PEFT takes the signs of the rows from the band of the columns and the other way round. Without
use_idwt a place is one element of W. Places follow from the seed and the layer's shape (locations.py), so all adapters
with one seed and n share A and B. Other wavelets are longer and are not served.

Checked against peft/tuners/waveft/{layer,model,waverec2d}.py of PEFT 0.21.2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from scute_sgl.errors import AdapterError
from scute_sgl.methods import common, locations
from scute_sgl.names import Module, Patterns, group
from scute_sgl.slots import Adapter, BaseShape, Slots

FIELDS = common.TARGETING | {
    "n_frequency": 2592,
    "n_frequency_pattern": {},
    "proportional_parameters": False,
    "scaling": 25.0,
    "wavelet_family": "db1",
    "use_idwt": True,
    "random_loc_seed": 777,
    "bias": "none",
}
NEUTRAL: frozenset[str] = frozenset()
PARAMETERS = ("waveft_spectrum",)


def read(config: dict, tensors: dict[str, Tensor], base: BaseShape | None) -> Adapter:
    c = common.settings(config, FIELDS, NEUTRAL)
    scaling, counts = common.number(c["scaling"], "scaling"), Patterns(c["n_frequency_pattern"], "n_frequency_pattern")
    if c["use_idwt"] and c["wavelet_family"] != "db1":
        hint = f"found {c['wavelet_family']!r:.80}; only db1, PEFT's default, is served, or use_idwt=false"
        raise AdapterError("unsupported_method", hint, key="wavelet_family")

    def spectrum(module: Module) -> Tensor:
        common.refuse_embedding(module, "WaveFT")
        # PEFT shares n out by the layers' sizes then: the file tells what came of it.
        n = None if c["proportional_parameters"] else counts.get(module.file_path, c["n_frequency"])
        v = module.need("waveft_spectrum", None if n is None else common.rank(n, "n_frequency"))
        return common.scaled(v, scaling, module, "waveft_spectrum")

    modules, _ = group(tensors, base, PARAMETERS)
    spectra = {module.path: spectrum(module) for module in modules if module.adapted}
    by_path = {module.path: module for module in modules}
    columns = _haar if c["use_idwt"] else _single
    terms = locations.shared_terms(spectra, by_path, c["random_loc_seed"], columns, repeats=1)
    return common.build("WAVEFT", config, modules, lambda module: Slots(shared=terms[module.path]))


def _haar(p: Tensor, q: Tensor, inputs: int, outputs: int) -> tuple[Tensor, Tensor]:
    half_in, half_out = (inputs + 1) // 2, (outputs + 1) // 2  # an odd size is transformed with a zero more
    return _pairs(q % half_in, p >= half_out, inputs), _pairs(p % half_out, q >= half_in, outputs).T


def _pairs(at: Tensor, differ: Tensor, size: int) -> Tensor:
    """(n, size) with 1/sqrt(2) at 2 at and, with a minus where they differ, at 2 at + 1."""
    rows = torch.zeros(len(at), size + size % 2)
    k = torch.arange(len(at))
    rows[k, 2 * at] = math.sqrt(0.5)
    rows[k, 2 * at + 1] = torch.where(differ, -1.0, 1.0) * math.sqrt(0.5)
    return rows[:, :size]


def _single(p: Tensor, q: Tensor, inputs: int, outputs: int) -> tuple[Tensor, Tensor]:
    A, B, k = torch.zeros(len(q), inputs), torch.zeros(outputs, len(p)), torch.arange(len(p))
    A[k, q] = B[p, k] = 1
    return A, B
