"""Refusals of (IA)3, VeRA and OFT: formats of older PEFT versions, shapes, and configs that disagree with them.

Each has its code, and its text names the key, what was found and what is allowed. Ids such as B19 are rows of the
project's log of public bug reports.
"""

import math

import pytest
import torch
from small_files import (
    BASE, EMBED, PATH, ia3_config, key, oft_config, read, refused, vera_config, vera_tensors,
)  # fmt: skip

from scute_sgl.methods import oft
from scute_sgl.slots import BaseShape


def rotation(config, Q):
    tensors = {key("oft_R.weight"): Q}
    return read(oft_config(**config), tensors, BASE).modules[PATH].rotation


@pytest.mark.parametrize("version", ["0.17.1", "0.16.0", None])
@pytest.mark.parametrize("terms", [1, 2, 3, 4, 5, 6])
def test_oft_before_018_uses_its_own_series(version, terms):
    """B19: peft_version exists since 0.18; without it the series is the older one, all coefficients 2."""
    Q = torch.randn(2, 28, dtype=torch.float64) * 0.1
    K = oft.skew(Q, 8)
    want = torch.eye(8).double() + sum(2 * torch.linalg.matrix_power(K, p) for p in range(1, terms))
    config = {"peft_version": version, "num_cayley_neumann_terms": terms}
    assert (rotation(config, Q) - want).abs().max() < 1e-14
    if terms > 2:
        assert (rotation(config | {"peft_version": "0.18.0"}, Q) - want).abs().max() > 1e-4


def test_oft_unclear_versions_are_refused():
    """B19: neither series is certain."""
    Q = torch.zeros(2, 28)
    with refused("bad_config", "peft_version", "0.17.2.dev0"):
        rotation({"peft_version": "0.17.2.dev0"}, Q)
    with refused("bad_config", "peft_version", "latest"):
        rotation({"peft_version": "latest"}, Q)
    with refused("bad_config", "use_cayley_neumann"):
        rotation({"drop": "use_cayley_neumann"}, Q)


def test_oft_layout_before_016_is_refused():
    tensors = {key("oft_r"): torch.zeros(2, 8, 8), key("oft_s"): torch.ones(8, 1)}
    with refused("unsupported_method", PATH, "oft_r", "0.15", "0.18"):
        read(oft_config(), tensors, BASE)


@pytest.mark.parametrize("vector, feedforward, code, fragments", [
    (torch.ones(1, 16), ["down_proj"], "bad_config", ["input vector", "feedforward_modules", "down_proj"]),
    (torch.ones(8, 1), ["up_proj"], "bad_config", ["output vector", "feedforward_modules", "up_proj"]),
    (torch.ones(8, 1), ["p_proj"], "bad_config", ["output vector"]),
    (torch.ones(8, 1), ".*up_proj", "bad_config", ["output vector"]),
    (torch.ones(1, 16), None, "bad_config", ["input vector", "None"]),
    (torch.ones(7, 1), [], "bad_shape", ["(7, 1)", "(8, 1)", "(1, 16)"]),
    (torch.ones(1, 15), [], "bad_shape", ["(1, 15)"]),
    (torch.ones(8), [], "bad_shape", ["(8,)"]),
    (torch.ones(8, 1), 5, "bad_config", ["feedforward_modules"]),
])  # fmt: skip
def test_ia3_shape_decides_and_the_config_must_agree(vector, feedforward, code, fragments):
    """B13."""
    with refused(code, *fragments):
        read(ia3_config(feedforward_modules=feedforward), {key("ia3_l"): vector})


def test_ia3_null_feedforward_is_the_old_table():
    tensors = {key("ia3_l"): torch.ones(8, 1), key("ia3_l", "model.layers.0.mlp.down_proj"): torch.ones(1, 8)}
    modules = read(ia3_config(feedforward_modules=None), tensors).modules
    assert modules[PATH].gain is not None and modules["model.layers.0.mlp.down_proj"].input_scale is not None


@pytest.mark.parametrize("config, changed, code, fragments", [
    ({}, {"base_model.vera_A": None}, "missing_tensor", ["base_model.vera_A", "save_projection"]),
    ({}, {"base_model.vera_B": torch.ones(8, 5)}, "bad_shape", ["base_model.vera_B", "(8, 5)", "(outputs, 4)"]),
    ({}, {"base_model.vera_A": torch.ones(4, 15)}, "bad_shape", [PATH, "15", "16"]),
    ({}, {"base_model.vera_B": torch.ones(7, 4)}, "bad_shape", [PATH, "7", "8"]),
    ({}, {key("vera_lambda_d"): torch.ones(5)}, "bad_shape", [PATH, "vera_lambda_d", "(5,)", "(4)"]),
    ({}, {key("vera_lambda_b"): None}, "missing_tensor", [PATH, "vera_lambda_b"]),
    ({"save_projection": False}, {}, "bad_config", ["save_projection", "vera_A"]),
    ({"r": 0}, {}, "bad_config", ["r: found 0"]),
])  # fmt: skip
def test_vera_refusals(config, changed, code, fragments):
    with refused(code, *fragments):
        read(vera_config(**config), vera_tensors(**changed))


@pytest.mark.parametrize("config, code, fragments", [
    ({"projection_prng_key": -1}, "bad_config", ["projection_prng_key", "-1"]),
    ({"projection_prng_key": 1 << 80}, "bad_config", ["projection_prng_key"]),
    ({"target_modules": None}, "bad_config", ["target_modules", "null"]),
    ({"target_modules": ["nothing"]}, "bad_config", ["target_modules"]),
])  # fmt: skip
def test_vera_draw_refusals(config, code, fragments):
    unsaved = vera_tensors(**{"base_model.vera_A": None, "base_model.vera_B": None})
    with refused(code, *fragments):
        read(vera_config(save_projection=False, **config), unsaved)


def test_vera_draw_needs_to_know_every_layer_that_may_be_targeted():
    """PEFT draws matrices as wide as the widest: a layer that is not listed might be it."""
    unsaved = vera_tensors(**{"base_model.vera_A": None, "base_model.vera_B": None})
    base = BaseShape(BASE, dtype=torch.float32, vocab_size=32, unlisted="model.layers.0.mlp.gate")
    read(vera_config(), vera_tensors(), base)
    with refused("bad_config", "save_projection", "'model.layers.0.mlp.gate'", "save them"):
        read(vera_config(save_projection=False), unsaved, base)


def test_vera_draw_is_bounded():
    """A vector of r numbers in the file must not make the server draw gigabytes."""
    wide = BaseShape({"a.up_proj": (16, 1 << 20)}, dtype=torch.float32, vocab_size=8)
    tensors = {key("vera_lambda_b", "a.up_proj"): torch.ones(1 << 20), key("vera_lambda_d", "a.up_proj"): torch.ones(4)}
    with refused("too_large", "1048576"):
        read(vera_config(save_projection=False, r=1 << 15), tensors, wide)


@pytest.mark.parametrize("config, packed, fragments", [
    ({}, torch.ones(2, 27), ["(2, 27)", "16 inputs"]),
    ({}, torch.ones(3, 28), ["(3, 28)", "16 inputs"]),
    ({}, torch.ones(1, 28), ["(1, 28)"]),
    ({"block_share": True}, torch.ones(2, 28), ["(2, 28)"]),
    ({"block_share": True}, torch.ones(1, 10), ["(1, 10)"]),
    ({}, torch.ones(16, 0), ["(16, 0)"]),
    ({}, torch.ones(56), ["(56,)"]),
])  # fmt: skip
def test_oft_shapes(config, packed, fragments):
    with refused("bad_shape", PATH, "oft_R.weight", *fragments):
        read(oft_config(**config), {key("oft_R.weight"): packed})


@pytest.mark.parametrize("field, value", [
    ("num_cayley_neumann_terms", 0), ("num_cayley_neumann_terms", 10**9), ("eps", -1.0), ("eps", math.nan)
])  # fmt: skip
def test_oft_bad_values(field, value):
    with refused("bad_config", field, "found", "want"):
        read(oft_config(**{field: value}), {key("oft_R.weight"): torch.ones(2, 28)})


def test_embeddings_of_methods_that_cannot_serve_them():
    """B04: by module name, never a part of the adapter."""
    with refused("unsupported_method", EMBED, "oft_embedding_R.weight"):
        read(oft_config(target_modules=["embed_tokens"]), {key("oft_embedding_R.weight", EMBED): torch.ones(2, 28)})
    with refused("unsupported_method", EMBED):
        read(ia3_config(target_modules=["embed_tokens"]), {key("ia3_l", EMBED): torch.ones(16, 1)})
    with refused("unsupported_method", EMBED):
        read(vera_config(target_modules=None), vera_tensors(**{key("vera_lambda_b", EMBED): torch.ones(16)}))
