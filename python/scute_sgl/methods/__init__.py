"""The one list of methods: peft_type -> module with ``read(config, tensors, base) -> Adapter``.

``read`` is pure: it sees the adapter's files and the base's shapes, no weight, no device, no SGLang. To add a
method, write its file (formula in slots.py's notation first), a line here and cases for tests/make_adapters.py.
"""

from scute_sgl.methods import (
    adalora,
    adamss,
    beft,
    boft,
    deft,
    delora,
    fourierft,
    glora,
    gralora,
    hira,
    hra,
    ia3,
    ln_tuning,
    loha,
    lokr,
    lora,
    miss,
    oft,
    osf,
    peanut,
    poly,
    pvera,
    randlora,
    road,
    shira,
    supertuning,
    tinylora,
    trainable_tokens,
    unilora,
    vblora,
    vera,
    waveft,
)

METHODS = {
    "ADALORA": adalora,
    "ADAMSS": adamss,
    "BEFT": beft,
    "BOFT": boft,
    "BONE": miss,  # what older releases of PEFT called MISS
    "DEFT": deft,
    "DELORA": delora,
    "FOURIERFT": fourierft,
    "GLORA": glora,
    "GRALORA": gralora,
    "HIRA": hira,
    "HRA": hra,
    "IA3": ia3,
    "LN_TUNING": ln_tuning,
    "LOHA": loha,
    "LOKR": lokr,
    "LORA": lora,  # with use_dora a DoRA
    "MISS": miss,
    "OFT": oft,
    "OSF": osf,
    "PEANUT": peanut,
    "POLY": poly,
    "PVERA": pvera,
    "RANDLORA": randlora,
    "ROAD": road,
    "SHIRA": shira,
    "SUPERTUNING": supertuning,
    "TINYLORA": tinylora,
    "TRAINABLE_TOKENS": trainable_tokens,
    "UNILORA": unilora,
    "VBLORA": vblora,
    "VERA": vera,
    "WAVEFT": waveft,
}

_PROMPT = "it puts trained embeddings before the prompt and changes no layer"
_CACHE = "it puts trained keys and values before the prompt's and changes no layer"

# PEFT's other types, and why: the refusal says so.
NOT_SERVED = {
    "ADAPTION_PROMPT": "it adds gated attention to a trained prompt and changes no linear layer",
    "C3A": "its block-circulant matrices have full rank; no op multiplies by one yet",
    "CARTRIDGE": _CACHE,
    "CPT": _PROMPT,
    "FROD": "a chain of full-rank matrices takes the weight's place; no op multiplies by one",
    "LILY": "its router averages over all tokens of a call, so that an answer depends on its neighbours",
    "MULTITASK_PROMPT_TUNING": _PROMPT,
    "PREFIX_TUNING": _CACHE,
    "PROMPT_TUNING": _PROMPT,
    "PSOFT": "its file lacks the singular vectors that it was trained with, and their signs depend on the machine",
    "P_TUNING": _PROMPT,
    "SHADOW": "it runs a network of its own beside the model, with a state",
    "XLORA": "it routes every token among adapters, after a pass of the base model without any",
}
