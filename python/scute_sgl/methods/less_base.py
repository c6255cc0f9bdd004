"""LoRA that was trained on W less a part of it: PiSSA, OLoRA and KaSA.

PEFT takes the part out of W when it loads such an adapter. Here W stays whole, and minus the part is a second term:

    pissa   the r largest singular triplets of W
    olora   c * Q[:, :r] R[:r] of W = Q R, c = alpha / r or alpha / sqrt(r)
    kasa    the r smallest singular triplets of W; lora_B is scaled by lora_diag (r,)

Checked against peft/tuners/lora/{layer,variants}.py of PEFT 0.21.2.
"""

from __future__ import annotations

from scute_sgl.errors import AdapterError
from scute_sgl.linalg import without_columns, without_singular
from scute_sgl.names import Module
from scute_sgl.slots import FromWeight

SAME_BASE = {"gaussian", "eva", "mica", "orthogonal", "lora_ga"}  # initial values that leave W as it is
LESS_BASE = {"pissa", "olora"}  # those that leave a known part of it


def trained_on(init: object, kasa: object) -> str:
    """Which part of W the adapter was trained without: pissa, olora, kasa, or none ("")."""
    name = init.lower() if isinstance(init, str) else ""
    same = init is None or isinstance(init, bool) or name in SAME_BASE
    if kasa is not None and not isinstance(kasa, dict):
        raise AdapterError("bad_config", f"found {kasa!r:.80}, want null or an object", key="kasa_config")
    if same:
        return "" if kasa is None else "kasa"
    if kasa is None and name in LESS_BASE:
        return name
    advice = "it changes the base weight; convert with save_pretrained(path_initial_model_for_weight_conversion=...)"
    hint = f"found {init!r:.80}, want true, false or one of {sorted(SAME_BASE | LESS_BASE)}; {advice}"
    raise AdapterError("bad_config", hint, key="init_lora_weights")


def taken(less: str, r: int, scale: float, module: Module) -> FromWeight | None:
    if not less:
        return None
    if module.is_embedding:
        raise module.error("unsupported_method", "lora_embedding_A", f"{less} of an embedding is not served")
    if less == "olora":
        return FromWeight(lambda W, b0: ((without_columns(W, r, scale),), None), cancels=True)
    part = slice(-r, None) if less == "pissa" else slice(0, r)
    return FromWeight(lambda W, b0: ((without_singular(W, part),), None), cancels=less == "pissa")
