"""Adapter folders that are incomplete, damaged or hostile: each a refusal that says what is wrong, quickly and in
little memory; what their weights file may hold is in test_safetensors.py. Ids such as B125 are rows of the project's
log of public bug reports."""

import json
import os
import pickle

import pytest
from small_files import BAD_JSON, BASE, PATH, lora_config, refused

from scute_sgl import checkpoint
from scute_sgl.checkpoint import CONFIG, WEIGHTS, load, read_adapter
from scute_sgl.methods import METHODS

pytestmark = pytest.mark.usefixtures("quickly_and_in_little_memory")


def test_good(folder):
    assert read_adapter(folder, BASE).modules.keys() == {PATH}
    assert read_adapter(str(folder)).method == "LORA"


# ------------------------------------------------------------------------------------------- what the folder holds


def test_no_folder():
    """B119: a hub id is a path like any other; nothing is fetched."""
    with refused("not_found", "org/repo", "nothing is downloaded"):
        load("org/repo")


def test_no_config(folder):
    """B131."""
    (folder / CONFIG).unlink()
    with refused("not_found", CONFIG, "no adapter_config.json in"):
        load(folder)
    (folder / "sql").mkdir()
    (folder / "sql" / CONFIG).write_text("{}")  # PEFT saves adapters of other names than "default" in sub-folders
    with refused("not_found", "sub-folders that have one: sql"):
        load(folder)


def test_no_permission(folder, monkeypatch):
    """B131: not the message of a missing file."""
    def deny(path, *_):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("builtins.open", deny)
    with refused("not_found", CONFIG, "Permission denied"):
        load(folder)


def test_no_weights(folder):
    (folder / WEIGHTS).unlink()
    with refused("not_found", "no adapter_model.safetensors in"):
        load(folder)


@pytest.mark.parametrize("name", ["adapter_model-00001-of-00002.safetensors", "adapter_model.safetensors.index.json"])
def test_sharded(folder, name):
    (folder / WEIGHTS).rename(folder / name)
    with refused("not_found", "sharded", "one adapter_model.safetensors"):
        load(folder)


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt", "model.pth", "last.ckpt", "x.pkl"])
def test_pickle_alone_is_never_opened(folder, name):
    """B118 B121 R7."""
    (folder / WEIGHTS).unlink()
    (folder / name).write_bytes(pickle.dumps(_Bomb()))
    with refused("unsafe_file", name, "pickle", WEIGHTS):
        load(folder)


def test_pickle_beside_safetensors_is_left_alone(folder):
    """B121."""
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(_Bomb()))
    read_adapter(folder, BASE)


class _Bomb:
    def __reduce__(self):
        return os.abort, ()


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_fifo_does_not_block(folder, name):
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with refused("unsafe_file", name, "regular"):
        load(folder)


# --------------------------------------------------------------------------------------------- config and tokenizer


@pytest.mark.parametrize("text", BAD_JSON)
def test_bad_json(folder, text):
    (folder / CONFIG).write_bytes(text)
    with refused("bad_config", CONFIG):
        load(folder)


def test_huge_config(folder):
    (folder / CONFIG).write_text(json.dumps(lora_config(note="x" * checkpoint.MAX_JSON)))
    with refused("too_large", CONFIG):
        load(folder)


@pytest.mark.parametrize("peft_type", ["LILY", "XLORA", "lora", None, 3, ["LORA"], "x" * 10_000])
def test_method_that_is_not_served(folder, peft_type):
    """R5: names it and lists what is."""
    (folder / CONFIG).write_text(json.dumps(lora_config(peft_type=peft_type)))
    with refused("unsupported_method", f"peft_type={str(peft_type)[:80]}", f"supported: {', '.join(METHODS)}"):
        read_adapter(folder, BASE)


def test_config_without_method(folder):
    (folder / CONFIG).write_text("{}")
    with refused("unsupported_method", "peft_type=None", "LORA"):
        read_adapter(folder, BASE)


def test_nan_alpha_in_json(folder):
    """B125: Python's JSON accepts NaN."""
    (folder / CONFIG).write_text(json.dumps(lora_config(lora_alpha=float("nan"))))
    with refused("bad_config", "lora_alpha", "nan"):
        read_adapter(folder, BASE)


def test_added_tokens(folder):
    """B56: a copy of the base's own list is harmless, ids beyond its vocabulary are not."""
    (folder / "added_tokens.json").write_text(json.dumps({"<pad>": 31}))
    read_adapter(folder, BASE)
    (folder / "added_tokens.json").write_text(json.dumps({"<pad>": 31, "<new>": 32}))
    with refused("wrong_base", "added_tokens.json", "<new>", "32", "31"):
        read_adapter(folder, BASE)


def test_refusal_can_be_named(folder):
    (folder / CONFIG).unlink()
    with refused("not_found") as caught:
        load(folder)
    assert str(caught.value.named("sql")).startswith("adapter 'sql' refused [not_found]: ")


def test_slow_patterns_end(folder):
    """A regex from an adapter's config must not hold the server."""
    nasty = {f"{'.*' * 6}x{i}": 4 for i in range(3000)}
    (folder / CONFIG).write_text(json.dumps(lora_config(rank_pattern=nasty)))
    with refused("bad_config", "rank_pattern", "slow"):
        read_adapter(folder, BASE)
