"""Early boot: makes SGLang importable and CPU-minded on a machine without an accelerator.

SGLang calls :func:`activate` as an entry point of the group ``sglang.srt.platforms`` in every process, while it
is itself being imported: before it looks for ``sgl_kernel`` and before it decides whether it runs on a CPU.
Nothing else in a package can act that early. So this module imports neither SGLang nor the extension.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

CPU_ENGINE = "SGLANG_USE_CPU_ENGINE"
STAND_IN = Path(__file__).parent / "cpu_shim"


def activate() -> None:
    """Choose the CPU path where it is asked for or is the only one. Returns None: this is no platform."""
    if wants_cpu():
        os.environ[CPU_ENGINE] = "1"  # children inherit it
        install_stand_in()


def wants_cpu() -> bool:
    """Asked for by flag or environment, or no flag asks for a device and there is no accelerator."""
    device = flag_value("--device")
    if device is not None:
        return device == "cpu"
    return os.environ.get(CPU_ENGINE) == "1" or not has_gpu()


def has_gpu() -> bool:
    """Whether torch sees a CUDA, ROCm, XPU or MPS device."""
    import torch

    xpu = getattr(torch, "xpu", None)
    return torch.cuda.is_available() or (xpu is not None and xpu.is_available()) or torch.backends.mps.is_available()


def flag_value(flag: str) -> str | None:
    """What the command line gives for ``flag``; argv is complete even under ``python -m``."""
    for position, word in enumerate(sys.argv):
        if word == flag and position + 1 < len(sys.argv):
            return sys.argv[position + 1]
        if word.startswith(flag + "="):
            return word.partition("=")[2]
    return None


def install_stand_in() -> None:
    """Put a stand-in for the CUDA-only ``sgl_kernel`` on the path, unless the real one can be imported."""
    try:
        importlib.import_module("sgl_kernel")
        return
    except Exception:  # a CUDA wheel without a driver fails in many ways, all of which mean the same here
        pass
    for name in [name for name in sys.modules if name == "sgl_kernel" or name.startswith("sgl_kernel.")]:
        del sys.modules[name]
    if str(STAND_IN) not in sys.path:
        sys.path.insert(0, str(STAND_IN))  # spawned children get a copy of sys.path
