"""Where an adapter's folder is: on this machine, inside the operator's root if there is one, or, if the operator
allows it (``--scute-allow-hub``), on the Hugging Face hub."""

from __future__ import annotations

import os
import re

from scute_sgl.errors import AdapterError
from scute_sgl.options import Options

FILES = ["adapter_config.json", "adapter_model.safetensors", "added_tokens.json"]


def local_folder(path: str) -> str:
    """``path``, or the local copy of the hub adapter that it names. A missing folder is for the reader to refuse."""
    return _download(path) if _is_hub_name(path) else path


def requested_folder(path: str) -> str:
    """:func:`local_folder` of a path that comes from a request: inside the root, with all symbolic links resolved.

    AdapterError ``unsafe_file`` for any path outside, and for a folder whose files link there. It says the same
    whether the path exists or not, so that nobody can probe the machine with it.
    """
    root = Options.read().confining_root
    if not root:
        return local_folder(path)
    if _is_hub_name(path):
        return _download(path)
    if not path or "\0" in path:
        hint = f"found the path {path!r}, want a folder inside the adapter root"
        raise AdapterError("unsafe_file", hint, adapter=path)
    folder = os.path.realpath(path)
    for opened in (folder, *(os.path.join(folder, file) for file in FILES)):
        if not _is_inside(os.path.realpath(opened), os.path.realpath(root)):
            hint = f"found {path!r}, want a folder inside the adapter root {root!r}, links resolved"
            raise AdapterError("unsafe_file", hint, adapter=path)
    return folder


def _is_hub_name(path: str) -> bool:
    return Options.read().allow_hub and not os.path.isdir(path) and bool(re.fullmatch(r"[\w.-]+/[\w.-]+", path))


def _is_inside(path: str, root: str) -> bool:
    return os.path.commonpath([path, root]) == root


def _download(name: str) -> str:
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(name, allow_patterns=FILES)
    except Exception as error:
        raise AdapterError("not_found", f"cannot download {name!r}: {error}", adapter=name) from None
