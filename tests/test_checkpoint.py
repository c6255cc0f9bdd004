"""Adapter folders that are incomplete, damaged or hostile: each a refusal that says what is wrong, quickly and in
little memory. Ids such as B125 are rows of the project's log of public bug reports."""

import json
import os
import pickle
import struct
import time
import tracemalloc

import pytest
import torch
from safetensors.torch import save_file
from small_files import BASE, PATH, key, lora_config, lora_tensors, refused

from scute_sgl import checkpoint
from scute_sgl.checkpoint import CONFIG, WEIGHTS, load, read_adapter
from scute_sgl.methods import METHODS


@pytest.fixture
def folder(tmp_path):
    """A good adapter; tests spoil it."""
    (tmp_path / CONFIG).write_text(json.dumps(lora_config()))
    save_file(lora_tensors(), tmp_path / WEIGHTS)
    return tmp_path


def write_raw(folder, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


@pytest.fixture(autouse=True)
def quickly_and_in_little_memory():
    tracemalloc.start()
    begin = time.process_time()  # of this process: a busy machine is no fault of the reader
    yield
    seconds, (_, peak) = time.process_time() - begin, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < 10 and peak < 64 << 20, (seconds, peak)


def test_good(folder):
    assert read_adapter(folder, BASE).modules.keys() == {PATH}
    assert read_adapter(str(folder)).method == "LORA"


@pytest.mark.parametrize("dtype", sorted(checkpoint.DTYPES.values(), key=str))
def test_same_tensors_as_safetensors_reads(folder, dtype):
    want = {"a": (torch.rand(3, 5) * 9).to(dtype), "b": torch.tensor(3).to(dtype), "c": torch.zeros(0, 4, dtype=dtype)}
    save_file(want, folder / WEIGHTS, metadata={"format": "pt"})
    got = load(folder)[1]
    assert got.keys() == want.keys()
    assert all(torch.equal(got[k], want[k]) and got[k].dtype == dtype for k in want)


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


# ------------------------------------------------------------------------------------------------- the weights file


def test_pickle_named_safetensors(folder):
    """B122."""
    (folder / WEIGHTS).write_bytes(pickle.dumps({"a": list(range(1000))}))
    with refused("unsafe_file", WEIGHTS, "not a well-formed safetensors file"):
        load(folder)


@pytest.mark.parametrize("keep", [0, 5, 8, 60, -4])
def test_truncated(folder, keep):
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[:keep])
    with refused("unsafe_file", WEIGHTS):
        load(folder)


def test_bytes_after_the_end(folder):
    with open(folder / WEIGHTS, "ab") as file:
        file.write(b"more")
    with refused("unsafe_file", WEIGHTS, "want"):
        load(folder)


@pytest.mark.parametrize("length", [1 << 60, (1 << 64) - 1, 1000])
def test_lying_header_length(folder, length):
    """B125."""
    write_raw(folder, {}, length=length)
    with refused("unsafe_file", str(length)):
        load(folder)


def test_huge_header(folder):
    """B125: of a sparse file of 1 GiB, nothing but eight bytes is read."""
    write_raw(folder, {}, length=1 << 29)
    os.truncate(folder / WEIGHTS, 1 << 30)
    with refused("too_large", str(1 << 29), str(checkpoint.MAX_HEADER)):
        load(folder)


def test_huge_file(folder):
    os.truncate(folder / WEIGHTS, 1 << 40)
    with refused("too_large", str(1 << 40)):
        load(folder)
    with refused("too_large", "want at most 100"):
        read_adapter(folder, BASE, max_bytes=100)


def test_million_keys(folder):
    """B125."""
    entry = b'{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    with open(folder / WEIGHTS, "wb") as file:
        file.write(struct.pack("<Q", 0) + b'{"x":' + entry)
        file.writelines(b',"%d":' % i + entry for i in range(10**6))
        file.write(b"}")
        length = file.tell() - 8
        file.seek(0)
        file.write(struct.pack("<Q", length))
    with refused("too_large", WEIGHTS):
        load(folder)


def test_too_many_keys(folder, monkeypatch):
    monkeypatch.setattr(checkpoint, "MAX_KEYS", 1)
    with refused("too_large", "found 2 tensors, want at most 1"):
        load(folder)


def entry(shape=(2,), offsets=(0, 8), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize("header", [
    {"a": entry(dtype="F4")}, {"a": entry(dtype=[1])}, {"a": entry(shape=(3,))}, {"a": entry(shape=(-1,))},
    {"a": entry(shape=(2.0,))}, {"a": entry(shape=(True,) * 2)}, {"a": entry(shape=(10**30, 0), offsets=(0, 8))},
    {"a": entry(offsets=(8, 0))}, {"a": entry(offsets=(0,))}, {"a": entry(shape=(1,) * 9 + (2,))},
    {"a": {"dtype": "F32"}}, {"a": 3}, {"a": entry(), "b": entry()}, {"a": entry(shape=(1,), offsets=(4, 8))},
    {"a": entry(shape=(1,), offsets=(0, 4))}, {"a": entry(shape=(4,), offsets=(0, 16))},
    {"a": entry(), "b": entry(shape=(0, 10**30), offsets=(8, 8))}, {"a": entry(), "b": entry(shape=(0, 1 << 62, 4), offsets=(8, 8))},
])  # fmt: skip
def test_bad_header_entries(folder, header):
    """B125: among them overlaps, gaps and ends beyond the file."""
    write_raw(folder, header, b"\0" * 8)
    with refused("unsafe_file", "safetensors"):
        load(folder)


@pytest.mark.parametrize("text", [
    b"", b"[]", b"3", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a":1,"a":2}', b'{"a":' + b"9" * 5000 + b"}",
])  # fmt: skip
@pytest.mark.parametrize("where", [CONFIG, WEIGHTS])
def test_bad_json(folder, where, text):
    if where == WEIGHTS:
        write_raw(folder, text)
    else:
        (folder / CONFIG).write_bytes(text)
    with refused("unsafe_file" if where == WEIGHTS else "bad_config", where):
        load(folder)


def test_huge_config(folder):
    (folder / CONFIG).write_text(json.dumps(lora_config(note="x" * checkpoint.MAX_JSON)))
    with refused("too_large", CONFIG):
        load(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_not_finite(folder, value, dtype):
    tensors = {name: tensor.to(dtype) for name, tensor in lora_tensors().items()}
    tensors[key("lora_B.weight")][3, 1] = value
    save_file(tensors, folder / WEIGHTS)
    with refused("bad_shape", key("lora_B.weight"), "NaN or infinity"):
        read_adapter(folder, BASE)


# --------------------------------------------------------------------------------------------- config and tokenizer


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
