"""The one list of methods: peft_type -> module with ``read(config, tensors, base) -> Adapter``.

``read`` is pure: it sees the adapter's files and the base's shapes, no weight, no device, no SGLang. To add a
method, write its file (formula in slots.py's notation first), a line here and cases for tests/make_adapters.py.
"""

from scute_sgl.methods import (
    adalora,
    beft,
    boft,
    delora,
    gralora,
    ia3,
    loha,
    lokr,
    lora,
    miss,
    oft,
    poly,
    tinylora,
    unilora,
    vblora,
    vera,
)

METHODS = {
    "ADALORA": adalora,
    "BEFT": beft,
    "BOFT": boft,
    "BONE": miss,  # what older releases of PEFT called MISS
    "DELORA": delora,
    "GRALORA": gralora,
    "IA3": ia3,
    "LOHA": loha,
    "LOKR": lokr,
    "LORA": lora,  # DoRA too: a LORA with use_dora
    "MISS": miss,
    "OFT": oft,
    "POLY": poly,
    "TINYLORA": tinylora,
    "UNILORA": unilora,
    "VBLORA": vblora,
    "VERA": vera,
}
