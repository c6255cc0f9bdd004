"""BD-LoRA, a LoRA with use_bdlora: A or B of some modules is block-diagonal, and the file holds the blocks in a column.

    A = block_diag(A_1 ... A_n), the file has (r, in / n)     where the path contains a name of target_modules_bd_a
    B = block_diag(B_1 ... B_n), the file has (out, r / n)    where it contains one of target_modules_bd_b

Elsewhere it is a plain LoRA, which match_strict forbids. Written out, it is one everywhere.

Checked against BdLoraLinearVariant in peft/tuners/lora/variants.py of PEFT 0.21.2.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from scute_sgl.errors import AdapterError
from scute_sgl.methods import common
from scute_sgl.names import Module

FIELDS = {"target_modules_bd_a": [], "target_modules_bd_b": [], "nblocks": 1, "match_strict": True}


def reader(config: object) -> Callable[[Module, int], tuple[Tensor, Tensor]]:
    """(module, r) -> lora_A (r, in) and lora_B (out, r) of a linear layer, for the value of ``use_bdlora``."""
    if not config:
        return lambda module, r: _take(module, r, 1, 1)
    if not isinstance(config, dict):
        raise AdapterError("bad_config", f"found {config!r:.80}, want null or an object", key="use_bdlora")
    c = common.settings(config, FIELDS)
    of_a, of_b, n = c["target_modules_bd_a"], c["target_modules_bd_b"], common.rank(c["nblocks"], "nblocks")
    if not all(isinstance(name, str) for name in of_a + of_b):
        raise AdapterError("bad_config", f"found {(of_a + of_b)!r:.80}, want names", key="use_bdlora")

    def read(module: Module, r: int) -> tuple[Tensor, Tensor]:
        in_a, in_b = (any(name in module.file_path for name in names) for names in (of_a, of_b))
        if in_a and in_b or (c["match_strict"] and not in_a and not in_b):
            hint = f"{'both' if in_a else 'none'} of target_modules_bd_a and _b match this module, want one"
            raise module.error("bad_config", "use_bdlora", hint)
        for size, split in ((r, in_a or in_b), (module.in_features, in_a), (module.out_features, in_b)):
            if split and size and size % n:
                raise module.error("bad_config", "use_bdlora", f"found nblocks={n}, want a divisor of {size}")
        return _take(module, r, n if in_a else 1, n if in_b else 1)

    return read


def _take(module: Module, r: int, blocks_a: int, blocks_b: int) -> tuple[Tensor, Tensor]:
    inputs = module.in_features and module.in_features // blocks_a
    A, B = module.need("lora_A.weight", r, inputs), module.need("lora_B.weight", module.out_features, r // blocks_b)
    return _diagonal(A, blocks_a), _diagonal(B, blocks_b)


def _diagonal(stacked: Tensor, blocks: int) -> Tensor:
    return stacked if blocks == 1 else torch.block_diag(*stacked.chunk(blocks))
