"""Builds ``scute_sgl._C``; metadata is in pyproject.toml.

Environment: SCUTE_CPU_ONLY=1 leaves the CUDA ops out, as does a machine without nvcc; TORCH_CUDA_ARCH_LIST
names the architectures (default: those of the GPUs found, else 8.0 and 9.0); MAX_JOBS limits the compilers.
"""

import os
from glob import glob

import torch
from setuptools import setup
from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension

CPU_SOURCES = [
    "csrc/bindings.cpp",
    "csrc/cpu/plan.cpp",
    "csrc/cpu/shrink.cpp",
    "csrc/cpu/lookup.cpp",
    "csrc/cpu/expand.cpp",
    "csrc/cpu/vera.cpp",
    "csrc/cpu/rotate.cpp",
]
CUDA_SOURCES = [
    "csrc/plan.cu",
    "csrc/shrink.cu",
    "csrc/lookup.cu",
    "csrc/expand.cu",
    "csrc/vera.cu",
    "csrc/rotate.cu",
]
HEADERS = sorted(glob("csrc/**/*.h", recursive=True) + glob("csrc/*.cuh"))
CXX_FLAGS = ["-std=c++17", "-O3", "-g0", "-fopenmp", "-Wall"]


def cuda_archs() -> str:
    """Value for TORCH_CUDA_ARCH_LIST: the user's, that of the GPUs here, or one that suits most servers."""
    if archs := os.environ.get("TORCH_CUDA_ARCH_LIST"):
        return archs
    found = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    return ";".join(f"{major}.{minor}" for major, minor in sorted(found)) or "8.0;9.0"


def extension():
    shared = {"depends": HEADERS, "extra_link_args": ["-fopenmp"]}
    if os.environ.get("SCUTE_CPU_ONLY") == "1" or CUDA_HOME is None or torch.version.cuda is None:
        return CppExtension("scute_sgl._C", CPU_SOURCES, extra_compile_args={"cxx": CXX_FLAGS}, **shared)
    os.environ["TORCH_CUDA_ARCH_LIST"] = cuda_archs()
    return CUDAExtension(
        "scute_sgl._C",
        CPU_SOURCES + CUDA_SOURCES,
        define_macros=[("SCUTE_WITH_CUDA", None), ("SCUTE_CUDA_ARCHS", f'"{cuda_archs()}"')],
        extra_compile_args={"cxx": CXX_FLAGS, "nvcc": ["-std=c++17", "-O3"]},
        **shared,
    )


setup(ext_modules=[extension()], cmdclass={"build_ext": BuildExtension})
