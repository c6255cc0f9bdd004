"""Adapters by Hugging Face hub name, if the operator allows them (``--scute-allow-hub``)."""

from __future__ import annotations

import os
import re

from scute_sgl.errors import AdapterError
from scute_sgl.options import Options

FILES = ["adapter_config.json", "adapter_model.safetensors", "added_tokens.json"]


def local_folder(path: str) -> str:
    """``path``, or the local copy of the hub adapter that it names. A missing folder is left to the reader's refusal."""
    if os.path.isdir(path) or not Options.read().allow_hub or not re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        return path
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(path, allow_patterns=FILES)
    except Exception as error:
        raise AdapterError("not_found", f"cannot download {path!r}: {error}", adapter=path) from None
