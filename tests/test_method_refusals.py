"""Refusals of the readers: config fields of all methods, and LoRA's tensors.

Each has its code, and its text names the key, what was found and what is allowed. Ids such as B29 or R3 are rows of
the project's log of public bug reports.
"""

import math
import re
from pathlib import Path

import peft
import pytest
import torch
from small_files import (
    EMBED, HEAD, PATH, ia3_config, key, lora_config, lora_tensors, oft_config, read, refused, vera_config,
)  # fmt: skip

from scute_sgl import checkpoint
from scute_sgl.errors import AdapterError
from scute_sgl.methods import METHODS, common


@pytest.mark.parametrize("config, field", [
    (lora_config, {"modules_to_save": ["lm_head"]}),
    (lora_config, {"target_parameters": ["mlp.experts.up_proj"]}),
    (lora_config, {"layer_replication": [[0, 1]]}),
    (lora_config, {"arrow_config": {"top_k": 3}}),
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


@pytest.mark.parametrize("make", [
    peft.LoraConfig, peft.IA3Config, peft.VeraConfig, peft.OFTConfig, peft.HRAConfig, peft.DeftConfig,
    peft.PeanutConfig, peft.GloraConfig, peft.OSFConfig, peft.AdamssConfig,
    peft.PveraConfig, peft.FourierFTConfig, peft.WaveFTConfig, peft.RoadConfig, peft.ShiraConfig, peft.SupertuningConfig,
    peft.RandLoraConfig,
])
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


@pytest.mark.parametrize("init", ["pissa_niter_16", "corda", "loftq", "somethingnew", 3])
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


def test_readers_do_not_import_peft_or_sglang():
    package = Path(checkpoint.__file__).parent
    for file in [*package.glob("methods/*.py"), package / "names.py", package / "checkpoint.py"]:
        text = file.read_text()
        assert not re.search(r"^\s*(import|from) (peft|sglang|transformers)", text, re.MULTILINE), file
        assert not re.search(r"torch\.load|import pickle|\beval\(|\bexec\(", text), "B118 B121"


@pytest.mark.parametrize("changed, tensors, start", [
    ({"target_modules": [["a" * 100_000]]}, {}, "target_modules: found [['aaa"),
    ({"layers_to_transform": ["a" * 100_000]}, {}, "layers_to_transform: found ['aaa"),
    ({"a" * 100_000: 1}, {}, "aaa"),
    ({}, {"a" * 100_000: torch.ones(1)}, "aaa"),
    ({}, {key("lora_A.weight", "a" * 100_000): torch.ones(1)}, "base_model.model.aaa"),
])  # fmt: skip
def test_a_refusal_is_short_whatever_the_file_names(changed, tensors, start):
    with pytest.raises(AdapterError) as caught:
        read(lora_config(**changed), lora_tensors() | tensors)
    assert caught.value.reason.startswith(start) and len(str(caught.value)) < 2500


def test_a_layer_s_number_may_have_any_length():
    """Python does not read one of over 4300 digits."""
    with refused("unknown_key", "leave it out"):
        read(lora_config(layers_to_transform=[0]), lora_tensors() | lora_tensors(f"model.layers.{'9' * 5000}.mlp.up_proj"), None)
