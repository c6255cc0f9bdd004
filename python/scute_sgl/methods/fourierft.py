"""FourierFT: the change of W is the inverse Fourier transform of n trained numbers at random frequencies.

    F(x) = x W + b + ((x A^T) * d) B^T,   d = [v, v] * scaling / sqrt(in out),   v = fourierft_spectrum (n,)
    A = [cos; sin](2 pi q_k a / in) / sqrt(in)  (2 n, in)     B = [cos, -sin](2 pi p_k j / out) / sqrt(out)  (out, 2 n)

The real part of exp(2 pi i (p j / out + q a / in)), summed over the frequencies (p_k, q_k). These follow from the seed
and the layer's shape (locations.py), so all adapters with one seed and n share A and B. The divisor in * out of the
transform is split evenly, so that 16 bits hold every factor. Angles are reduced as whole numbers: they are exact.

Checked against peft/tuners/fourierft/{layer,model}.py of PEFT 0.21.2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from scute_sgl.errors import AdapterError
from scute_sgl.methods import common, locations
from scute_sgl.names import MAX_PATTERNS, compile_pattern, group
from scute_sgl.slots import Adapter, BaseShape, Slots

FIELDS = common.TARGETING | {
    "n_frequency": 1000,
    "n_frequency_pattern": {},
    "scaling": 150.0,
    "random_loc_seed": 777,
    "bias": "none",
}
NEUTRAL: frozenset[str] = frozenset()
PARAMETERS = ("fourierft_spectrum",)


def read(config: dict, tensors: dict[str, Tensor], base: BaseShape | None) -> Adapter:
    c = common.settings(config, FIELDS, NEUTRAL)
    scaling, table = common.number(c["scaling"], "scaling"), c["n_frequency_pattern"]
    if len(table) > MAX_PATTERNS:
        raise AdapterError("bad_config", f"found {len(table)}, want up to {MAX_PATTERNS}", key="n_frequency_pattern")
    # Unlike other patterns of PEFT, these need a dot before them.
    rules = [(compile_pattern(key, "n_frequency_pattern", r".*\.{}$"), n) for key, n in table.items()]
    modules, _ = group(tensors, base, PARAMETERS)
    spectra = {}
    for module in modules:
        if module.adapted:
            common.refuse_embedding(module, "FourierFT")
            n = next((n for rule, n in rules if rule.match(module.file_path)), c["n_frequency"])
            v = module.need("fourierft_spectrum", common.rank(n, "n_frequency"))
            balance = math.sqrt((module.in_features or 1) * (module.out_features or 1))
            spectra[module.path] = common.scaled(v, scaling / balance, module, "fourierft_spectrum")
    by_path = {module.path: module for module in modules}
    terms = locations.shared_terms(spectra, by_path, c["random_loc_seed"], _waves, repeats=2)
    return common.build("FOURIERFT", config, modules, lambda module: Slots(shared=terms[module.path]))


def _waves(p: Tensor, q: Tensor, inputs: int, outputs: int) -> tuple[Tensor, Tensor]:
    over_inputs, over_outputs = _angles(q, inputs), _angles(p, outputs)
    A = torch.cat([over_inputs.cos(), over_inputs.sin()]) / math.sqrt(inputs)
    B = torch.cat([over_outputs.cos(), -over_outputs.sin()]).T / math.sqrt(outputs)
    return A, B


def _angles(frequency: Tensor, size: int) -> Tensor:
    """2 pi frequency a / size for a in 0 .. size - 1: float64 (n, size)."""
    return (frequency[:, None] * torch.arange(size) % size).double() * (2 * math.pi / size)
