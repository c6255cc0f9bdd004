"""Stand-in for SGLang's CUDA-only kernel package on machines that cannot load it.

SGLang imports a few names ending in ``_cpu`` at start-up, and calls none of them with torch_native attention.
They exist here and raise if called. Every other name is absent, so that SGLang's own probes find no kernels.
"""

from __future__ import annotations


def __getattr__(name: str):
    if not name.endswith("_cpu"):
        raise AttributeError(f"sgl_kernel cannot be loaded on this machine; its stand-in has no {name!r}")

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} needs the real sgl_kernel, which this machine cannot load")

    return missing
