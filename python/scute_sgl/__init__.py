"""Adapters of many PEFT methods, exact and mixed in one batch, as a LoRA backend for SGLang.

SGLang imports this package while it is itself being imported, so everything public loads on first use.
"""

from __future__ import annotations

__all__ = ["AdapterError", "Engine", "__version__", "lang"]

_HOMES = {"AdapterError": "scute_sgl.errors", "Engine": "scute_sgl.engine"}


def __getattr__(name: str):
    from importlib import import_module, metadata

    if name == "__version__":
        return metadata.version("scute_sgl")
    if name == "lang":
        return import_module("scute_sgl.lang")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'scute_sgl' has no attribute {name!r}")
