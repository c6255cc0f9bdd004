"""The pure-Python ``scalar_type`` module of the installed sgl_kernel wheel, loaded by its path."""

import importlib.util
import sys
from pathlib import Path


def _load():
    here = Path(__file__).resolve()
    for folder in sys.path:
        file = Path(folder, "sgl_kernel", "scalar_type.py").resolve()
        if file.exists() and file != here:
            spec = importlib.util.spec_from_file_location(__name__, file)
            module = importlib.util.module_from_spec(spec)
            # Its dataclasses look their module up by name while they are defined.
            sys.modules[__name__] = module
            spec.loader.exec_module(module)
            return
    raise ImportError("no installed sgl_kernel wheel provides scalar_type")


_load()
