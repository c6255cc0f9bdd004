"""Weights files that are damaged or hostile, read without trust: each a refusal, quickly and in little memory.

Ids such as B125 are rows of the project's log of public bug reports.
"""

import json
import os
import pickle
import struct

import pytest
import torch
from safetensors.torch import save_file
from small_files import BAD_JSON, BASE, key, lora_tensors, refused

from scute_sgl import checkpoint
from scute_sgl.checkpoint import WEIGHTS, load, read_adapter

pytestmark = pytest.mark.usefixtures("quickly_and_in_little_memory")


def write_raw(folder, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


@pytest.mark.parametrize("dtype", sorted(checkpoint.DTYPES.values(), key=str))
def test_same_tensors_as_safetensors_reads(folder, dtype):
    want = {"a": (torch.rand(3, 5) * 9).to(dtype), "b": torch.tensor(3).to(dtype), "c": torch.zeros(0, 4, dtype=dtype)}
    save_file(want, folder / WEIGHTS, metadata={"format": "pt"})
    got = load(folder)[1]
    assert got.keys() == want.keys()
    assert all(torch.equal(got[k], want[k]) and got[k].dtype == dtype for k in want)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.bool, torch.complex64])
def test_numbers_of_a_type_that_no_adapter_has(folder, dtype):
    save_file({name: tensor.to(dtype) for name, tensor in lora_tensors().items()}, folder / WEIGHTS)
    with refused("bad_config", key("lora_A.weight"), "found numbers of type", "want F64, F32"):
        read_adapter(folder, BASE)


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
    {"a": entry(dtype="F33")}, {"a": entry(dtype=[1])}, {"a": entry(shape=(3,))}, {"a": entry(shape=(-1,))},
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


@pytest.mark.parametrize("text", BAD_JSON)
def test_bad_json(folder, text):
    write_raw(folder, text)
    with refused("unsafe_file", WEIGHTS):
        load(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_not_finite(folder, value, dtype):
    tensors = {name: tensor.to(dtype) for name, tensor in lora_tensors().items()}
    tensors[key("lora_B.weight")][3, 1] = value
    save_file(tensors, folder / WEIGHTS)
    with refused("bad_shape", key("lora_B.weight"), "NaN or infinity"):
        read_adapter(folder, BASE)
