"""The one list of methods: peft_type -> module with ``read(config, tensors, base) -> Adapter``.

``read`` is pure: it sees the adapter's files and the base's shapes, no weight, no device, no SGLang. To add a
method, write its file (formula in slots.py's notation first), add a line here and a case in tests/make_adapters.py.
"""

from scute_sgl.methods import ia3, lora, oft, vera

METHODS = {"LORA": lora, "IA3": ia3, "VERA": vera, "OFT": oft}  # DoRA is a LORA with use_dora
