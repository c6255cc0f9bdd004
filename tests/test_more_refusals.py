"""Refusals of the methods of adapters_plain.py: each has its code, and its text names the key, what was found and what
is allowed. ``FILES`` holds the smallest adapter of each method on the base of small_files.py; a case changes it.
"""

import peft
import pytest
import torch
from make_adapters import make_base, write_adapter
from small_files import BASE, EMBED, PATH, key, read, refused

from scute_sgl.checkpoint import load
from scute_sgl.methods import METHODS, common
from scute_sgl.slots import BaseShape


def ones(**shapes):
    """Tensors of one module by name, all ones; "__" stands for a dot."""
    return {key(name.replace("__", ".")): torch.ones(shape) for name, shape in shapes.items()}


BANK, THETA, VECTOR = "base_model.vblora_vector_bank", "base_model.unilora_theta_d", "base_model.tinylora_v.0"
FILES = {  # PATH has 16 inputs and 8 outputs
    "ADALORA": ({"init_r": 3}, ones(lora_A=(3, 16), lora_B=(8, 3), lora_E=(3, 1))),
    "BEFT": ({}, ones(beft_bias=(1, 8))),
    "BOFT": ({}, ones(boft_R=(1, 4, 4, 4), boft_s=(8, 1))),
    "BONE": ({"r": 4}, ones(bone_block=(4, 8))),
    "DELORA": ({"r": 4}, ones(delora_A=(4, 16), delora_B=(8, 4), delora_lambda=(1,), delora_w_norm=(16,))),
    "GRALORA": ({"r": 4, "hybrid_r": 2}, ones(
        gralora_A=(2, 8, 4), gralora_B=(2, 4, 4), gralora_A_general__weight=(2, 16), gralora_B_general__weight=(8, 2))),
    "LOHA": ({"r": 2}, ones(hada_w1_a=(8, 2), hada_w1_b=(2, 16), hada_w2_a=(8, 2), hada_w2_b=(2, 16))),
    "LOKR": ({"r": 1}, ones(lokr_w1=(2, 4), lokr_w2_a=(4, 1), lokr_w2_b=(1, 4))),
    "MISS": ({"r": 4}, ones(miss_block=(4, 8))),
    "POLY": (
        {"r": 2, "n_skills": 3, "n_splits": 2},
        ones(poly_lora_A=(2, 3, 8, 2), poly_lora_B=(2, 3, 2, 4), poly_router__module_logits=(1, 6)),
    ),
    "TINYLORA": (
        {"u": 3, "target_modules": [PATH]},
        ones(tinylora_A=(2, 16), tinylora_B=(8, 2), tinylora_P=(3, 2, 2)) | {VECTOR: torch.ones(3)},
    ),
    "UNILORA": (
        {"r": 2, "theta_d_length": 5, "save_indices": True},
        ones(unilora_scales_A=(2, 16), unilora_scales_B=(8, 2)) | {THETA: torch.ones(5)}
        | {key("unilora_indices_A"): torch.full((2, 16), 4), key("unilora_indices_B"): torch.full((8, 2), 4)},
    ),
    "VBLORA": ({"r": 3, "num_vectors": 5, "vector_length": 4},
               ones(vblora_logits_A=(3, 4, 5), vblora_logits_B=(2, 3, 5)) | {BANK: torch.ones(5, 4)}),
}
MAKERS = {
    "ADALORA": lambda: peft.AdaLoraConfig(total_step=9), "BEFT": peft.BeftConfig, "BOFT": peft.BOFTConfig,
    "DELORA": peft.DeloraConfig,
    "GRALORA": peft.GraloraConfig, "LOHA": peft.LoHaConfig, "LOKR": peft.LoKrConfig, "MISS": peft.MissConfig,
    "POLY": peft.PolyConfig, "TINYLORA": peft.TinyLoraConfig, "UNILORA": peft.UniLoraConfig,
    "VBLORA": peft.VBLoRAConfig,
}  # fmt: skip


def read_changed(method, config=None, tensors=None, base=BASE):
    fields, file = FILES[method]
    fields = {"peft_type": method, "target_modules": ["up_proj"]} | fields | (config or {})
    return read(fields, {k: t for k, t in (file | (tensors or {})).items() if t is not None}, base)


@pytest.mark.parametrize("method", FILES)
def test_the_unchanged_files_are_read(method):
    (path,) = read_changed(method).modules
    (alone,) = read_changed(method, base=None).modules
    assert path == alone == PATH


@pytest.mark.parametrize("method", MAKERS)
def test_fields_and_defaults_are_pefts(method):
    """Each field of PEFT's config is read, neutral or refused here, and what is read has PEFT's default."""
    config, module = MAKERS[method]().to_dict(), METHODS[method]
    off = getattr(module, "OFF", common.OFF)
    for name, value in config.items():
        assert name in module.FIELDS or name in module.NEUTRAL | common.NEUTRAL or name in off, name
        assert module.FIELDS.get(name) is None or module.FIELDS[name] == value, name
        assert name not in off or common._is_off(value), name
    common.settings(config | {"peft_type": method}, module.FIELDS, module.NEUTRAL, off)


@pytest.mark.parametrize("method", FILES)
@pytest.mark.parametrize("field", [{"modules_to_save": ["lm_head"]}, {"invented_number": 1}])
def test_field_that_changes_the_result_is_refused_by_name(method, field):
    with refused("bad_config", *field, "found", "want"):
        read_changed(method, field)


@pytest.mark.parametrize("method, name", [(m, name) for m, (_, file) in FILES.items() for name in file])
def test_every_tensor_is_needed_and_its_shape_checked(method, name):
    with refused("missing_tensor", "not in the file" if len(FILES[method][1]) > 1 else "no tensor of"):
        read_changed(method, tensors={name: None})
    found = FILES[method][1][name]
    with refused("bad_shape", PATH if PATH in name else name, "found", "want"):
        read_changed(method, tensors={name: found.new_ones(7, *found.shape[1:])})
    with refused("bad_shape", str((1, *found.shape))):
        read_changed(method, tensors={name: found[None]})


@pytest.mark.parametrize("method", sorted(FILES.keys() - {"TINYLORA"}))
def test_embeddings_are_refused_by_module(method):
    moved = {k.replace(PATH, EMBED): t for k, t in FILES[method][1].items()}
    with refused("unsupported_method", EMBED, "no embedding layer"):
        read_changed(method, {"target_modules": None}, dict.fromkeys(FILES[method][1]) | moved)


@pytest.mark.parametrize("method, config, code, fragments", [
    ("ADALORA", {"init_r": 0}, "bad_config", ["init_r: found 0"]),
    ("ADALORA", {"use_dora": True}, "bad_config", ["use_dora", "no AdaLoRA with DoRA"]),
    ("ADALORA", {"lora_bias": True}, "bad_config", ["lora_bias"]),
    ("ADALORA", {"use_qalora": True}, "bad_config", ["use_qalora"]),
    ("ADALORA", {"rank_pattern": ["a"]}, "bad_config", ["rank_pattern", "['a']", "object"]),
    ("ADALORA", {"rank_pattern": {PATH: [True] * 3}}, "bad_config", ["rank_pattern", PATH, ".lora_E with 3 booleans"]),
    ("ADALORA", {"rank_pattern": {f"{PATH}.lora_E": [True] * 2}}, "bad_config", ["rank_pattern", "[True, True]"]),
    ("ADALORA", {"rank_pattern": {f"{PATH}.lora_E": [1, 0, 1]}}, "bad_config", ["rank_pattern", "[1, 0, 1]"]),
    ("ADALORA", {"rank_pattern": {"x.lora_E": [True] * 3}}, "bad_config", ["rank_pattern", "'x.lora_E'", "no such"]),
    ("ADALORA", {"rank_pattern": {f"{PATH}.lora_E": [True, False, True]}}, "bad_shape", [PATH, "lora_A", "(2, 16)"]),
    ("BEFT", {"bias": "all"}, "bad_config", ["bias", "'all'"]),
    ("BOFT", {"boft_block_size": 0}, "bad_config", ["boft_block_size: found 0", "boft_block_num=0"]),
    ("BOFT", {"boft_block_num": 4}, "bad_config", ["boft_block_size: found 4", "boft_block_num=4"]),
    ("BOFT", {"boft_block_size": 8}, "bad_shape", [PATH, "boft_R", "(1, 4, 4, 4)", "8"]),
    ("BOFT", {"boft_n_butterfly_factor": 0}, "bad_config", ["boft_n_butterfly_factor: found 0"]),
    ("BOFT", {"boft_n_butterfly_factor": 10**9}, "bad_config", ["boft_n_butterfly_factor"]),
    ("BONE", {"init_weights": "bat"}, "unsupported_method", ["init_weights", "'bat'"]),
    ("BONE", {"init_weights": "mini"}, "bad_config", ["init_weights", "'mini'"]),
    ("DELORA", {"r": 3}, "bad_shape", [PATH, "delora_A", "(4, 16)", "(3, 16)"]),
    ("DELORA", {"rank_pattern": {"up_proj": 2}}, "bad_shape", [PATH, "delora_A", "(2, 16)"]),
    ("GRALORA", {"gralora_k": 3}, "bad_config", ["r: found 4", "gralora_k=3"]),
    ("GRALORA", {"r": 32, "gralora_k": 32}, "bad_config", [PATH, "gralora_k: found 32", "16 inputs"]),
    ("GRALORA", {"r": 16, "gralora_k": 16}, "bad_config", [PATH, "gralora_k: found 16", "8 outputs"]),
    ("GRALORA", {"hybrid_r": -1}, "bad_config", ["hybrid_r: found -1"]),
    ("GRALORA", {"hybrid_r": 0}, "unknown_key", [PATH, "gralora_A_general.weight"]),
    ("GRALORA", {"r": 1 << 14, "gralora_k": 4}, "bad_config", ["gralora_k * r + hybrid_r: found 65538"]),
    ("GRALORA", {"exclude_modules": ["q_proj"]}, "bad_config", ["exclude_modules"]),
    ("LOHA", {"r": 3}, "bad_shape", [PATH, "hada_w1_a", "(8, 2)", "(8, 3)"]),
    ("LOHA", {"alpha_pattern": {"up_proj": "8"}}, "bad_config", ["alpha_pattern", "'8'"]),
    ("LOHA", {"bias": "all"}, "bad_config", ["bias", "'all'"]),
    ("LOKR", {"r": 2}, "bad_shape", [PATH, "lokr_w2_a", "(4, 1)", "(any, 2)"]),
    ("LOKR", {"rank_pattern": {"up_proj": 0}}, "bad_config", ["rank_pattern: found 0"]),
    ("MISS", {"init_weights": "bat"}, "unsupported_method", ["init_weights", "'bat'"]),
    ("MISS", {"init_weights": "new"}, "bad_config", ["init_weights", "'new'", "mini"]),
    ("MISS", {"init_weights": "mini"}, "bad_shape", [PATH, "miss_block", "(4, 1)"]),
    ("MISS", {"init_weights": "mini", "mini_r": 0}, "bad_config", ["mini_r: found 0"]),
    ("POLY", {"n_tasks": 4}, "bad_config", ["task_id", "found None", "4 tasks", '"task_id": 0 to 3']),
    ("POLY", {"n_tasks": 4, "task_id": 4}, "bad_config", ["task_id: found 4", "0 to 3"]),
    ("POLY", {"n_tasks": 4, "task_id": -1}, "bad_config", ["task_id: found -1"]),
    ("POLY", {"n_tasks": 4, "task_id": "1"}, "bad_config", ["task_id: found '1'"]),
    ("POLY", {"n_tasks": 4, "task_id": 3}, "bad_shape", [PATH, "module_logits", "(1, 6)", "(4, 6)"]),
    ("POLY", {"task_id": 1}, "bad_config", ["task_id: found 1", "1 tasks"]),
    ("POLY", {"poly_type": "mhr"}, "bad_config", ["poly_type", "'mhr'", "'poly'"]),
    ("POLY", {"n_splits": 3}, "bad_config", [PATH, "n_splits: found 3", "16 inputs"]),
    ("POLY", {"n_splits": 16}, "bad_config", [PATH, "n_splits: found 16", "8 outputs"]),
    ("TINYLORA", {"u": 4}, "bad_shape", [PATH, "tinylora_P", "(3, 2, 2)", "(4, 2, 2)"]),
    ("TINYLORA", {"r": 3}, "bad_shape", [PATH, "tinylora_A", "(2, 16)", "(3, 16)"]),
    ("TINYLORA", {"weight_tying": 1.5}, "bad_config", ["weight_tying", "1.5", "0 to 1"]),
    ("TINYLORA", {"target_modules": ["up_proj"]}, "bad_config", ["layers.1.mlp.up_proj", "target_modules"]),
    ("TINYLORA", {"target_modules": ["down_proj"]}, "bad_config", ["layers.0.mlp.down_proj", "target_modules"]),
    ("TINYLORA", {"save_projection": False}, "unknown_key", [PATH, "tinylora_P"]),
    ("UNILORA", {"theta_d_length": 4}, "bad_shape", [THETA, "(5,)", "(4,)"]),
    ("UNILORA", {"save_indices": False}, "unknown_key", [PATH, "unilora_"]),
    ("UNILORA", {"r": 3}, "bad_shape", [PATH, "unilora_indices_A", "(2, 16)", "(3, 16)"]),
    ("VBLORA", {"topk": 0}, "bad_config", ["topk: found 0"]),
    ("VBLORA", {"topk": 6}, "bad_config", ["topk: found 6", "5 vectors"]),
    ("VBLORA", {"num_vectors": 4}, "bad_shape", [BANK, "(5, 4)", "(4, 4)"]),
    ("VBLORA", {"save_only_topk_weights": True}, "missing_tensor", ["vblora_logits_A_topk_indices"]),
])  # fmt: skip
def test_config_refusals(method, config, code, fragments):
    with refused(code, *fragments):
        read_changed(method, config)


def test_miss_blocks_must_fit_the_layer():
    with refused("bad_config", PATH, "r: found 17", "16 inputs"):
        read_changed("MISS", {"r": 17}, ones(miss_block=(17, 8)))
    with refused("bad_config", PATH, "mini_r: found 3", "8 outputs"):
        read_changed("MISS", {"init_weights": "mini", "mini_r": 3}, ones(miss_block=(4, 3)))


@pytest.mark.parametrize("shape", [(1, 3, 4, 4), (1, 4, 4, 5), (2, 4, 4, 4), (0, 4, 4, 4), (1, 0, 4, 4)])
def test_boft_shapes(shape):
    with refused("bad_shape", PATH, "boft_R", str(shape)):
        read_changed("BOFT", tensors=ones(boft_R=shape))


def test_boft_stages(monkeypatch):
    two = {"boft_block_size": 0, "boft_block_num": 2, "boft_n_butterfly_factor": 2}
    assert read_changed("BOFT", two, ones(boft_R=(2, 2, 8, 8))).modules[PATH].rotation.shape == (1, 16, 16)
    assert read_changed("BOFT", two, ones(boft_R=(1, 2, 8, 8))).modules[PATH].rotation.shape == (2, 8, 8)
    with refused("bad_shape", PATH, "(3, 2, 8, 8)"):  # blocks of 32
        read_changed("BOFT", two | {"boft_n_butterfly_factor": 3}, ones(boft_R=(3, 2, 8, 8)))
    monkeypatch.setattr(METHODS["BOFT"], "MAX_BLOCK", 15)
    with refused("too_large", PATH, "2 stages make blocks of 16", "at most 15"):
        read_changed("BOFT", two, ones(boft_R=(2, 2, 8, 8)))


def test_lokr_products_must_fit_the_layer(monkeypatch):
    with refused("bad_shape", PATH, "lokr_w1", "12 inputs and 8 outputs", "16 and 8"):
        read_changed("LOKR", tensors=ones(lokr_w2_b=(1, 3)))
    with refused("unknown_key", PATH, "lokr_w1_a"):
        read_changed("LOKR", tensors=ones(lokr_w1_a=(2, 1)))
    monkeypatch.setattr(common, "MAX_RANK", 1)
    with refused("too_large", PATH, "rank 2", "at most 1"):
        read_changed("LOKR")


def test_convolutions_of_loha_and_lokr_are_refused():
    for method, name in (("LOHA", "hada_t1"), ("LOKR", "lokr_t2")):
        with refused("unknown_key", name):
            read_changed(method, tensors=ones(**{name: (2, 2, 3, 3)}))


def topk_file(**changed):
    """The VB-LoRA file as save_only_topk_weights writes it."""
    file = ones(vblora_logits_A_topk_weights=(3, 4, 1), vblora_logits_B_topk_weights=(2, 3, 1))
    file[BANK] = torch.ones(5, 4)
    for letter, shape in (("A", (3, 4, 2)), ("B", (2, 3, 2))):
        file[key(f"vblora_logits_{letter}_topk_indices")] = torch.full(shape, 4, dtype=torch.uint8)
    return dict.fromkeys(FILES["VBLORA"][1]) | file | {key(name): t for name, t in changed.items()}


def test_vblora_indices_must_be_of_the_bank(monkeypatch):
    topk, indices = {"save_only_topk_weights": True}, "vblora_logits_B_topk_indices"
    read_changed("VBLORA", topk, topk_file())
    with refused("bad_shape", PATH, indices, "found 5 to 5", "0 to 4"):
        read_changed("VBLORA", topk, topk_file(**{indices: torch.full((2, 3, 2), 5)}))
    with refused("bad_shape", PATH, indices, "found -1 to -1"):
        read_changed("VBLORA", topk, topk_file(**{indices: torch.full((2, 3, 2), -1)}))
    with refused("bad_shape", PATH, indices, "float32", "integers"):
        read_changed("VBLORA", topk, topk_file(**{indices: torch.ones(2, 3, 2)}))
    with refused("unknown_key", PATH, "vblora_logits_A"):
        read_changed("VBLORA", topk, FILES["VBLORA"][1] | topk_file(vblora_logits_A=torch.ones(3, 4, 5)))
    with refused("bad_config", PATH, "vector_length: found 3", "16 inputs"):
        read_changed("VBLORA", {"vector_length": 3}, {BANK: torch.ones(5, 3)})
    monkeypatch.setattr(common, "MAX_VALUES", 3 * 4 * 2 * 4 - 1)
    with refused("too_large", PATH, "vblora_logits_A"):
        read_changed("VBLORA", topk, topk_file())


@pytest.mark.parametrize("config, code, fragments", [
    ({"proj_seed": -1}, "bad_config", ["proj_seed", "-1"]),
    ({"proj_seed": 1 << 80}, "bad_config", ["proj_seed"]),
    ({"target_modules": None}, "bad_config", ["target_modules", "null"]),
    ({"target_modules": ["nothing"]}, "bad_config", ["target_modules", "no module"]),
    ({"target_modules": ["embed_tokens"]}, "unsupported_method", [EMBED]),
    ({"r": 1 << 15}, "too_large", ["1572864 indices", "1000"]),
])  # fmt: skip
def test_unilora_draw_refusals(monkeypatch, config, code, fragments):
    monkeypatch.setattr(METHODS["UNILORA"], "MAX_DRAW", 1000)
    unsaved = dict.fromkeys(FILES["UNILORA"][1]) | {THETA: torch.ones(5)}
    read_changed("UNILORA", {"save_indices": False}, unsaved)
    with refused(code, *fragments):
        read_changed("UNILORA", {"save_indices": False} | config, unsaved)


def test_unilora_must_know_the_layers_that_it_draws_for():
    unsaved = dict.fromkeys(FILES["UNILORA"][1]) | {THETA: torch.ones(5)}
    with refused("bad_config", "save_indices", "want the base"):
        read_changed("UNILORA", {"save_indices": False}, unsaved, base=None)
    more = BaseShape(BASE, dtype=torch.float32, vocab_size=32, counted=lambda: BASE | {"model.x.up_proj": (4, 4)})
    with refused("unknown_key", "model.x.up_proj", "not an adaptable module"):
        read_changed("UNILORA", {"save_indices": False}, unsaved, more)
    wrapped = unsaved | {key("base_layer.bias", "language_model." + PATH): torch.ones(8)}
    with refused("bad_config", "save_indices", "wrapped base"):
        read_changed("UNILORA", {"save_indices": False}, wrapped)
    with refused("bad_shape", PATH, "unilora_indices_B", "found 5 to 5", "0 to 4"):
        read_changed("UNILORA", tensors={key("unilora_indices_B"): torch.full((8, 2), 5)})


def test_tinylora_vectors_must_be_those_of_the_groups(monkeypatch):
    with refused("unknown_key", "base_model.tinylora_v.1", "1 groups"):
        read_changed("TINYLORA", tensors={"base_model.tinylora_v.1": torch.ones(3)})
    other = {k.replace("layers.0", "layers.1"): t for k, t in FILES["TINYLORA"][1].items()}
    both = {"target_modules": ["up_proj"]}
    read_changed("TINYLORA", both | {"weight_tying": 1.0}, other)
    with refused("missing_tensor", "base_model.tinylora_v.1"):
        read_changed("TINYLORA", both, other)
    with refused("bad_config", "layers.1.mlp.up_proj", "target_modules"):
        read_changed("TINYLORA", tensors=other)
    undrawn = {key("tinylora_P"): None}
    with refused("bad_config", "projection_seed", "-1"):
        read_changed("TINYLORA", {"save_projection": False, "projection_seed": -1}, undrawn)
    monkeypatch.setattr(METHODS["TINYLORA"], "MAX_DRAW", 3 * 2 * 2 - 1)
    with refused("too_large", "u: 3 projections of rank 2", "11 values"):
        read_changed("TINYLORA", {"save_projection": False}, undrawn)


def test_bone_is_miss(tmp_path):
    """Files of PEFT before 0.19 differ from MiSS in two names only."""
    base, folder = make_base("llama", tmp_path), tmp_path / "miss"
    config, tensors = load(write_adapter(base, folder, "miss_remainder"))
    renamed = {k.replace("miss_block", "bone_block"): t for k, t in tensors.items()}
    bone = METHODS["BONE"].read(config | {"peft_type": "BONE"}, renamed, None).modules
    for path, slots in METHODS["MISS"].read(config, tensors, None).modules.items():
        assert torch.equal(bone[path].terms[0].B, slots.terms[0].B)
    with refused("unknown_key", "miss_block", "bone_block"):
        METHODS["BONE"].read(config | {"peft_type": "BONE"}, tensors, None)


def test_expanded_matrices_are_bounded(monkeypatch):
    monkeypatch.setattr(common, "MAX_VALUES", 4 * (16 + 8) - 1)
    with refused("too_large", PATH, "95 values"):
        read_changed("MISS")


