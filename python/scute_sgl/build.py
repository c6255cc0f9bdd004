"""Whether the extension, as it was built, suits what it runs on. Nothing here imports it."""

from __future__ import annotations

import re

import torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
REBUILD = "pip install --no-build-isolation --no-deps --force-reinstall ."


def check(info: dict, device: torch.device, dtype: torch.dtype) -> None:
    """RuntimeError that says why and what to run, unless the ops of ``build_info()`` serve this device and dtype."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    why = problem(info, torch.__version__, torch.version.cuda, capability, dtype)
    if why:
        raise RuntimeError(f"scute refuses to start: {why}")


def problem(
    info: dict, torch_version: str, cuda_version: str | None, capability: tuple[int, int] | None, dtype: torch.dtype
) -> str:
    """Why not, or "". ``capability``: (major, minor) of the GPU, None on the CPU."""
    if dtype not in DTYPES:
        return f"--dtype {str(dtype).removeprefix('torch.')} is not served; want float32, float16 or bfloat16"
    rebuild = f"rebuild it, in a clone of scute_sgl: {REBUILD}"
    if torch_version.split("+")[0] != info["torch_version"].split("+")[0]:
        # C++ has no stable interface between releases: it may load, and then read other offsets.
        return f"its extension was built with torch {info['torch_version']}, this is {torch_version}; {rebuild}"
    if capability is None:
        return ""
    if not info["cuda_archs"]:
        return f"its extension was built without CUDA; set CUDA_HOME to a CUDA {cuda_version} toolkit and {rebuild}"
    if info["cuda_version"].split(".")[0] != (cuda_version or "").split(".")[0]:
        return f"its extension was built with CUDA {info['cuda_version']}, torch with {cuda_version}; {rebuild}"
    if not has_code(info["cuda_archs"], capability):
        gpu = "{}.{}".format(*capability)
        why = f"its extension has code for {info['cuda_archs']}, this GPU has compute capability {gpu}"
        return f"{why}; {rebuild.replace('pip', f'TORCH_CUDA_ARCH_LIST={gpu} pip')}"
    return ""


def has_code(archs: str, capability: tuple[int, int]) -> bool:
    """Whether code for ``archs``, written as TORCH_CUDA_ARCH_LIST is, runs on a GPU of this compute capability.

    Machine code runs on its major version from its minor version on, PTX on all that is later. With the suffix "a"
    both run on that one capability, with "f" on that major version (CUDA C++ programming guide, "Compute capability").
    """
    for major, minor, suffix, ptx in re.findall(r"(\d+)\.(\d+)([af]?)(\+PTX)?", archs):
        built = int(major), int(minor)
        same_major = built[0] == capability[0] and built <= capability
        if built == capability or (suffix != "a" and same_major) or (ptx and not suffix and built <= capability):
            return True
    return False
