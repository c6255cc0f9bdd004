"""Builds ``scute_sgl._C``; metadata is in pyproject.toml.

Environment: SCUTE_CPU_ONLY=1 leaves the CUDA ops out, as does a machine without nvcc; TORCH_CUDA_ARCH_LIST
names the architectures (default: those of the GPUs found, else 8.0 and 9.0); CUDA_HOME the toolkit; MAX_JOBS
limits the compilers.
"""

import os
import re
from glob import glob
from pathlib import Path

import torch
from setuptools import setup
from torch.utils import cpp_extension
from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension

CPU_SOURCES = [
    "csrc/bindings.cpp",
    "csrc/cpu/plan.cpp",
    "csrc/cpu/shrink.cpp",
    "csrc/cpu/lookup.cpp",
    "csrc/cpu/project.cpp",
    "csrc/cpu/expand.cpp",
    "csrc/cpu/linear.cpp",
    "csrc/cpu/rotate.cpp",
    "csrc/cpu/structured.cpp",
    "csrc/cpu/token_rows.cpp",
    "csrc/cpu/token_logits.cpp",
    "csrc/cpu/reweigh.cpp",
]
CUDA_SOURCES = [
    "csrc/plan.cu",
    "csrc/shrink.cu",
    "csrc/lookup.cu",
    "csrc/expand.cu",
    "csrc/linear.cu",
    "csrc/project.cu",
    "csrc/rotate.cu",
    "csrc/structured.cu",
    "csrc/token_rows.cu",
    "csrc/token_logits.cu",
    "csrc/reweigh.cu",
]
HEADERS = sorted(glob("csrc/**/*.h", recursive=True) + glob("csrc/*.cuh"))
CXX_FLAGS = ["-O3", "-g0", "-fopenmp", "-Wall"]  # torch adds -std=, which its headers decide


def cuda_home() -> str | None:
    """The toolkit to build with. An nvcc on the PATH may be a link or a script far from its headers."""
    for home in filter(None, (cpp_extension.CUDA_HOME, "/usr/local/cuda")):
        if Path(home, "bin/nvcc").exists() and Path(home, "include/cuda_runtime_api.h").exists():
            return home
    return None


def cuda_archs() -> str:
    """Value for TORCH_CUDA_ARCH_LIST: the user's, that of the GPUs here, or one that suits most servers."""
    if archs := os.environ.get("TORCH_CUDA_ARCH_LIST"):
        archs = ";".join(archs.replace(";", " ").split())
        if not re.fullmatch(r"(\d+\.\d+[af]?(\+PTX)?(;|$))+", archs):  # torch takes names too; build.py compares numbers
            raise SystemExit(f"TORCH_CUDA_ARCH_LIST is {archs}; want numbers such as 8.0;9.0+PTX")
        return archs
    found = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    return ";".join(f"{major}.{minor}" for major, minor in sorted(found)) or "8.0;9.0+PTX"


def extension():
    shared = {"depends": HEADERS, "extra_link_args": ["-fopenmp"]}
    home = cuda_home()
    if os.environ.get("SCUTE_CPU_ONLY") == "1" or home is None or torch.version.cuda is None:
        return CppExtension("scute_sgl._C", CPU_SOURCES, extra_compile_args={"cxx": CXX_FLAGS}, **shared)
    cpp_extension.CUDA_HOME = home
    os.environ["TORCH_CUDA_ARCH_LIST"] = cuda_archs()
    return CUDAExtension(
        "scute_sgl._C",
        CPU_SOURCES + CUDA_SOURCES,
        define_macros=[("SCUTE_WITH_CUDA", None), ("SCUTE_CUDA_ARCHS", f'"{cuda_archs()}"')],
        extra_compile_args={"cxx": CXX_FLAGS, "nvcc": ["-O3"]},
        **shared,
    )


setup(ext_modules=[extension()], cmdclass={"build_ext": BuildExtension})
