"""WaveFT: the change of W is the inverse wavelet transform of n trained numbers at random places.

    F(x) = x W + b + x S^T,   S = the transform of scaling * waveft_spectrum (n,)

The place (p, q) lies in one of the four bands of a transform of one level: halves of rows and of columns. With db1,
the Haar wavelet, it becomes a 2 x 2 patch of W: half of the number four times, with signs. PEFT takes the signs of the
rows from the band of the columns and the other way round. Without use_idwt a place is one element of W. Places follow
from the seed and the layer's shape (locations.py). Other wavelets are longer and are not served.

Checked against peft/tuners/waveft/{layer,model,waverec2d}.py of PEFT 0.21.2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from scute_sgl import structured
from scute_sgl.errors import AdapterError
from scute_sgl.methods import common, locations
from scute_sgl.names import Module, Patterns, group
from scute_sgl.slots import Adapter, BaseShape, Slots, Sparse

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
    counts = locations.counted(spectra, by_path, c["random_loc_seed"])
    known = all(None not in shape for shape in counts)
    drawn = {shape: locations.places(*shape, n, c["random_loc_seed"]) for shape, n in counts.items() if known}
    matrix = _haar if c["use_idwt"] else structured.sparse

    def read_one(module: Module) -> Slots:
        values = spectra[module.path]
        if not drawn:  # no base: nothing but the number of values is known
            return Slots(structure=Sparse(*torch.empty(3, len(values), device="meta"), (0, 0)))
        shape = module.in_features, module.out_features
        p, q = (at[: len(values)] for at in drawn[shape])
        return Slots(structure=matrix(p, q, common.wide(values), (shape[1], shape[0])))

    return common.build("WAVEFT", config, modules, read_one)


def _haar(p: Tensor, q: Tensor, values: Tensor, shape: tuple[int, int]) -> Sparse:
    """Each value at four places: half of it, with the signs of its bands."""
    half_out, half_in = ((size + 1) // 2 for size in shape)  # an odd size is transformed with a zero more
    of_inputs, of_outputs = (1 - 2 * band.to(values.dtype) for band in (p >= half_out, q >= half_in))
    rows = torch.cat([2 * (p % half_out) + i for i in (0, 0, 1, 1)])
    columns = torch.cat([2 * (q % half_in) + i for i in (0, 1, 0, 1)])
    patch = torch.cat([values / 2, values / 2 * of_inputs, values / 2 * of_outputs, values / 2 * of_inputs * of_outputs])
    inside = (rows < shape[0]) & (columns < shape[1])
    return structured.sparse(rows[inside], columns[inside], patch[inside], shape)
