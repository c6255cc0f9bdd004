"""Every refusal of the readers: its code, and that the text names the key, what was found and what is allowed.

Ids such as B19 or R3 are rows of the project's log of public bug reports.
"""

import math
import re
from pathlib import Path

import peft
import pytest
import torch
from small_files import (
    BASE, EMBED, HEAD, PATH, ia3_config, key, lora_config, lora_tensors, oft_config, read, refused, vera_config,
    vera_tensors,
)  # fmt: skip

from scute_sgl import checkpoint
from scute_sgl.methods import METHODS, common, oft
from scute_sgl.slots import BaseShape

# ------------------------------------------------------------------------------------------------ older formats


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


# ----------------------------------------------------------------------------------------------- config fields


@pytest.mark.parametrize("config, field", [
    (lora_config, {"modules_to_save": ["lm_head"]}),
    (lora_config, {"trainable_token_indices": [3, 5]}),
    (lora_config, {"target_parameters": ["mlp.experts.up_proj"]}),
    (lora_config, {"layer_replication": [[0, 1]]}),
    (lora_config, {"alora_invocation_tokens": [1]}),
    (lora_config, {"use_qalora": True}),
    (lora_config, {"use_bdlora": {"nblocks": 2}}),
    (lora_config, {"arrow_config": {"top_k": 3}}),
    (lora_config, {"kasa_config": {"beta": 0.1}}),
    (lora_config, {"velora_config": {"scale": 1.0}}),
    (lora_config, {"monteclora_config": {"num_samples": 8}}),
    (ia3_config, {"modules_to_save": ["lm_head"]}),
    (vera_config, {"modules_to_save": ["lm_head"]}),
    (oft_config, {"modules_to_save": ["lm_head"]}),
    (ia3_config, {"layers_to_transform": [1]}),
    (vera_config, {"exclude_modules": ["q_proj"]}),
    (lora_config, {"invented_config": {"a": 1}}),
    (oft_config, {"invented_number": 1}),
    (vera_config, {"invented_flag": True}),
])  # fmt: skip
def test_field_that_changes_the_result_is_refused_by_name(config, field):
    """B29 B55 B59 B134."""
    (name,) = field
    with refused("bad_config", name, "found", "want"):
        read(config(**field), lora_tensors())


@pytest.mark.parametrize("value", [None, False, "", [], {}])
def test_unknown_field_that_is_off_is_accepted(value):
    """B134: a newer PEFT adds fields; switched off they change nothing."""
    read(lora_config(invented_config=value), lora_tensors())


@pytest.mark.parametrize("make", [peft.LoraConfig, peft.IA3Config, peft.VeraConfig, peft.OFTConfig])
def test_fields_and_defaults_are_pefts(make):
    """Each field of PEFT's config is read, neutral or refused here, and what is read has PEFT's default."""
    config = make().to_dict()
    method = METHODS[config["peft_type"].value]
    off = getattr(method, "OFF", common.OFF)
    for name, value in config.items():
        assert name in method.FIELDS or name in method.NEUTRAL | common.NEUTRAL or name in off, name
        if method.FIELDS.get(name) is not None and name != "init_lora_weights":
            assert method.FIELDS[name] == value, name
        assert name not in off or common._is_off(value), name
    common.settings(config | {"peft_type": "X"}, method.FIELDS, method.NEUTRAL, off)


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_16", "olora", "corda", "loftq", "somethingnew", 3])
def test_lora_init_that_changes_the_base_is_refused(init):
    """B29: PEFT would change W on loading."""
    with refused("bad_config", "init_lora_weights", init, "convert"):
        read(lora_config(init_lora_weights=init), lora_tensors())


@pytest.mark.parametrize("init", [None, True, False, "gaussian", "eva", "mica", "orthogonal", "lora_ga"])
def test_lora_init_that_keeps_the_base_is_plain_lora(init):
    assert read(lora_config(init_lora_weights=init), lora_tensors()).method == "LORA"


@pytest.mark.parametrize("field, value", [
    ("r", 0), ("r", -1), ("r", 10**9), ("r", "8"), ("r", True), ("r", 4.0),
    ("lora_alpha", math.nan), ("lora_alpha", math.inf), ("lora_alpha", 10**400), ("lora_alpha", "16"),
    ("rank_pattern", {"up_proj": 0}), ("rank_pattern", {"up_proj": -3}), ("rank_pattern", ["up_proj"]),
    ("alpha_pattern", {"up_proj": math.nan}), ("rank_pattern", {"(": 4}), ("rank_pattern", {"(a+)+": 4}),
    ("use_rslora", 1), ("use_dora", "yes"), ("bias", "some"), ("target_modules", 7), ("target_modules", [1]),
    ("target_modules", "(a*)*b"), ("target_modules", ".*" * 20), ("target_modules", "a)(b"),
    ("layers_to_transform", "1"), ("layers_to_transform", ["1"]), ("exclude_modules", {"a": 1}),
])  # fmt: skip
def test_lora_bad_values(field, value):
    """B125: refused quickly, by the field's name."""
    with refused("bad_config", field, "found"):
        read(lora_config(**{field: value}), lora_tensors())


def test_lora_scale_that_overflows():
    with refused("bad_config", PATH, "lora_B.weight", "overflows"):
        read(lora_config(lora_alpha=1e300), lora_tensors())


def test_lora_bias_beside_dora():
    with refused("bad_config", "lora_bias", "use_dora"):
        read(lora_config(lora_bias=True, use_dora=True), lora_tensors())


def test_rank_pattern_against_the_tensor():
    """B28: both numbers."""
    with refused("bad_shape", PATH, "lora_A.weight", "found (4, 16)", "want (8, 16)"):
        read(lora_config(rank_pattern={"up_proj": 8}), lora_tensors())


@pytest.mark.parametrize("changed, code, fragments", [
    ({key("lora_B.weight"): None}, "missing_tensor", [PATH, "lora_B.weight"]),
    ({key("lora_A.weight"): torch.ones(4, 15)}, "bad_shape", [PATH, "found (4, 15)", "want (4, 16)"]),
    ({key("lora_A.weight"): torch.ones(64)}, "bad_shape", [PATH, "found (64,)", "want (4, 16)"]),
    ({key("lora_B.weight"): torch.ones(9, 4)}, "bad_shape", [PATH, "found (9, 4)", "want (8, 4)"]),
    ({key("lora_A.weight"): torch.ones(4, 16).int()}, "bad_shape", [PATH, "torch.int32"]),
    ({key("lora_C.weight"): torch.ones(1)}, "unknown_key", [PATH, "lora_C.weight"]),
    ({key("lora_magnitude_vector"): torch.ones(8)}, "unknown_key", [PATH, "lora_magnitude_vector"]),
    ({key("lora_B.bias"): torch.ones(8)}, "unknown_key", [PATH, "lora_B.bias"]),
    ({key("bias"): torch.ones(8)}, "unknown_key", [PATH, "bias"]),
    ({key("lora_embedding_A"): torch.ones(4, 16)}, "unknown_key", [PATH, "lora_embedding_A"]),
    ({key("base_layer.bias"): torch.ones(7)}, "bad_shape", [PATH, "base_layer.bias", "(7,)", "(8)"]),
    ({key("base_layer.weight"): torch.ones(16, 8)}, "bad_shape", [PATH, "base_layer.weight", "(16, 8)", "(8, 16)"]),
    ({key("bias", "model.norm"): torch.ones(16)}, "unknown_key", ["model.norm", "no adaptable module"]),
    ({key("weight", HEAD): torch.ones(33, 16)}, "bad_shape", [HEAD, "(33, 16)", "(32, 16)"]),
    ({key("token_adapter.trainable_tokens_delta", EMBED): torch.ones(2, 16)}, "unknown_key", ["token_adapter"]),
    ({"base_model.vera_A": torch.ones(2, 2)}, "unknown_key", ["base_model.vera_A"]),
    ({PATH + ".lora_A.weight": torch.ones(4, 16)}, "unknown_key", ["base_model.model.<module>"]),
    (lora_tensors(PATH + "_x"), "unknown_key", ["up_proj_x", "no adaptable module"]),
    (lora_tensors("model.layers.0.mlp.xup_proj"), "unknown_key", ["xup_proj"]),
    (lora_tensors("model.layers.7.mlp.up_proj"), "unknown_key", ["layers.7"]),
    (lora_tensors(EMBED), "missing_tensor", [EMBED, "lora_embedding_A"]),
])  # fmt: skip
def test_lora_tensors_that_do_not_fit(changed, code, fragments):
    """B40 B41 B44 R3 R4 R9: nothing is dropped, and no module is found by a part of its name."""
    tensors = {k: v for k, v in (lora_tensors() | changed).items() if v is not None}
    with refused(code, *fragments):
        read(lora_config(target_modules=None), tensors)


def test_no_module_applied():
    """B37 B38."""
    for tensors in ({}, {key("weight"): torch.ones(8, 16)}):
        with refused("missing_tensor", "LORA"):
            read(lora_config(), tensors)


@pytest.mark.parametrize("fields", [
    {"target_modules": ["down_proj"]}, {"target_modules": "model.*down_proj"}, {"exclude_modules": ["up_proj"]},
    {"exclude_modules": ".*up_proj"}, {"layers_to_transform": [1]}, {"layers_to_transform": 0, "layers_pattern": "h"},
    {"target_modules": ["p_proj"]},
])  # fmt: skip
def test_tensors_of_a_module_that_the_config_leaves_out(fields):
    """PEFT would drop them silently."""
    with refused("unknown_key", PATH, "target_modules"):
        read(lora_config(**fields), lora_tensors())


@pytest.mark.parametrize("fields", [
    {"target_modules": ["up_proj", "router"]}, {"target_modules": "all-linear"}, {"target_modules": None},
    {"target_modules": r".*(up|down)_proj"}, {"target_modules": [PATH], "layers_to_transform": [1]},
    {"layers_to_transform": [0, 1]}, {"layers_to_transform": []},
    {"layers_to_transform": 0, "layers_pattern": "layers"},
])  # fmt: skip
def test_targets_only_confirm_the_tensors(fields):
    """B43 B47: absent modules are left alone; all-linear is a word, not letters."""
    assert read(lora_config(**fields), lora_tensors()).modules.keys() == {PATH}


@pytest.mark.parametrize("file_path", [
    "layers.0.mlp.up_proj", "language_model.model.layers.0.mlp.up_proj", "model.language_model.layers.0.mlp.up_proj"
])  # fmt: skip
def test_paths_of_a_wrapped_base(file_path):
    """B37 B49: taken if the whole file fits one rewrite."""
    tensors = lora_tensors(file_path)
    assert read(lora_config(), tensors).modules.keys() == {PATH}
    with refused("unknown_key", "no adaptable module"):
        read(lora_config(), tensors | lora_tensors("layers.1.mlp.other"))


def test_bias_of_an_untouched_module():
    """bias="all" stores every bias: a linear's is served though no LoRA sits there."""
    tensors = lora_tensors() | {key("bias", "model.layers.0.mlp.down_proj"): torch.arange(16.0)}
    slots = read(lora_config(bias="all"), tensors).modules["model.layers.0.mlp.down_proj"]
    assert torch.equal(slots.base_bias, torch.arange(16.0)) and not slots.terms


def test_copies_of_base_weights_are_kept_for_the_fold():
    """B52: resized or targeted embeddings are saved whole; the fold compares them with the served ones."""
    tensors = lora_tensors() | {key("weight", HEAD): torch.rand(32, 16), key("weight", EMBED): torch.rand(32, 16)}
    modules = read(lora_config(), tensors).modules
    assert torch.equal(modules[HEAD].base_weight, tensors[key("weight", HEAD)])
    assert torch.equal(modules[EMBED].base_weight, tensors[key("weight", EMBED)])


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


def test_readers_do_not_import_peft_or_sglang():
    package = Path(checkpoint.__file__).parent
    for file in [*package.glob("methods/*.py"), package / "names.py", package / "checkpoint.py"]:
        text = file.read_text()
        assert not re.search(r"^\s*(import|from) (peft|sglang|transformers)", text, re.MULTILINE), file
        assert not re.search(r"torch\.load|import pickle|\beval\(|\bexec\(", text), "B118 B121"
