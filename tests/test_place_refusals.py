"""Refusals of the methods that train numbers at places of a weight: which places, how many, and of what spectrum."""

import pytest
import torch
from folded_files import FILES, config, ones, tensors
from small_files import BASE, PATH, read, refused

from scute_sgl.methods import locations
from scute_sgl.slots import BaseShape


@pytest.mark.parametrize("method", ["FOURIERFT", "WAVEFT"])
def test_numbers_of_places_that_do_not_fit(method, monkeypatch):
    name = f"{method.lower()}_spectrum"
    with refused("bad_shape", PATH, name, "found (5,)", "want (6)"):
        read(config(method, n_frequency_pattern={"up_proj": 6}), tensors(method))
    with refused("bad_shape", PATH, "found 129 numbers", "(16, 8)"):
        read(config(method, n_frequency=129), tensors(method, **{name: ones(129)}))
    monkeypatch.setattr(locations, "MAX_PLACES", 127)
    with refused("too_large", "128 elements", "up to 127"):
        read(config(method), tensors(method))


def test_fourierft_ranks_that_do_not_fit(monkeypatch):
    down = "model.layers.0.mlp.down_proj"
    both = tensors("FOURIERFT") | tensors("FOURIERFT", down)
    fields = config("FOURIERFT", target_modules=["up_proj", "down_proj"])
    assert read(fields, both).modules[down].shared.A.shape == (20, 16)  # of two shapes
    monkeypatch.setattr(locations, "MAX_RANK", 19)
    with refused("too_large", "n_frequency", "5 in 8 x 16, 5 in 16 x 8", "rank 20", "up to 19"):
        read(fields, both)


@pytest.mark.parametrize("method, name", [("SHIRA", "shira_indices"), ("SUPERTUNING", "supertuning_indices")])
def test_places_that_are_not_of_the_weight(method, name):
    places = FILES[method][name]
    for value, found in ((-1, "found outputs -1 to"), (128, f"to {128 if method == 'SHIRA' else 8}, want 0 to 7")):
        wrong = places.clone()
        wrong.view(-1)[0] = value
        with refused("bad_shape", PATH, name, found):
            read(config(method), tensors(method, **{name: wrong}))
    twice = places.clone()
    twice[..., 1] = twice[..., 0]
    with refused("bad_config", PATH, name, "twice"):
        read(config(method), tensors(method, **{name: twice}))
    if method == "SUPERTUNING":
        with refused("bad_shape", PATH, name, "float32", "integers"):
            read(config(method), tensors(method, **{name: places.float()}))


@pytest.mark.parametrize("method, name", [("SHIRA", "shira_indices"), ("SUPERTUNING", "supertuning_indices")])
@pytest.mark.parametrize("place", [1 << 62, (1 << 63) - 1, -1 << 63])
def test_places_without_a_base_have_32_bits(method, name, place):
    wrong = FILES[method][name].long().clone()
    read(config(method), tensors(method, **{name: wrong}), None)
    wrong.view(-1)[-1] = place
    with refused("bad_shape", PATH, name, "want 0 to 2147483647" if place > 0 else "found"):
        read(config(method), tensors(method, **{name: wrong}), None)


@pytest.mark.parametrize("method", ["FOURIERFT", "WAVEFT"])
def test_numbers_of_a_module_that_the_config_leaves_out(method):
    for base in (None, BASE):
        with refused("unknown_key", PATH, "leave it out"):
            read(config(method, target_modules=[]), tensors(method), base)


def test_shira_of_windows_has_the_same_places():
    """PEFT writes them as float32 there, and reads both."""
    file = tensors("SHIRA", shira_indices=FILES["SHIRA"]["shira_indices"].float())
    got, want = (read(config("SHIRA"), f).modules[PATH].structure for f in (file, tensors("SHIRA")))
    assert torch.equal(got.rows, want.rows) and torch.equal(got.columns, want.columns)


def test_supertuning_without_its_places_is_refused():
    with refused("unsupported_method", "save_precomputed_indices", "depends on the machine"):
        read(config("SUPERTUNING", save_precomputed_indices=False), tensors("SUPERTUNING", supertuning_indices=None))


def test_supra_needs_its_lora_and_nothing_else_has_one():
    lora = {"supertuning_lora_A.weight": ones(2, 16), "supertuning_lora_B.weight": ones(8, 2)}
    term = read(config("SUPERTUNING", r=2), tensors("SUPERTUNING", **lora)).modules[PATH].terms[0]
    assert torch.equal(term.B, 2 * ones(8, 2))  # lora_alpha is 2 r
    with refused("unknown_key", PATH, "supertuning_lora_A.weight"):
        read(config("SUPERTUNING"), tensors("SUPERTUNING", **lora))
    for name in lora:
        with refused("missing_tensor", PATH, name):
            read(config("SUPERTUNING", r=2), tensors("SUPERTUNING", **lora | {name: None}))


def test_supertuning_values_are_rounded_to_the_base_s_dtype_first():
    base = BaseShape(BASE, dtype=torch.bfloat16, vocab_size=32)
    values = torch.linspace(0.1, 0.2, 12)
    file = tensors("SUPERTUNING", supertuning_values=values)
    assert torch.equal(read(config("SUPERTUNING"), file, base).modules[PATH].structure.values, values.bfloat16().float())
    values = torch.linspace(0.1, 0.2, 24)  # SHiRA's are rounded with W alone
    assert torch.equal(read(config("SHIRA"), tensors("SHIRA", shira_weight=values), base).modules[PATH].structure.values, values)


def test_waveft_wavelets_other_than_haar():
    with refused("unsupported_method", "wavelet_family", "found 'sym5'", "db1", "use_idwt=false"):
        read(config("WAVEFT", wavelet_family="sym5"), tensors("WAVEFT"))
    read(config("WAVEFT", wavelet_family="sym5", use_idwt=False), tensors("WAVEFT"))
