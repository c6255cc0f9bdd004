"""Refusals of the methods of adapters_plain.py: fields, tensors and shapes.

Each has its code, and its text names the key, what was found and what is allowed.
"""

import peft
import pytest
import torch
from plain_files import BANK, FILES, THETA, read_changed
from small_files import EMBED, PATH, key, refused

from scute_sgl.errors import NeedsBase
from scute_sgl.methods import METHODS, common

MAKERS = {
    "ADALORA": lambda: peft.AdaLoraConfig(total_step=9), "BEFT": peft.BeftConfig, "BOFT": peft.BOFTConfig,
    "DELORA": peft.DeloraConfig,
    "GRALORA": peft.GraloraConfig, "HIRA": peft.HiraConfig, "LOHA": peft.LoHaConfig, "LOKR": peft.LoKrConfig, "MISS": peft.MissConfig,
    "POLY": peft.PolyConfig, "TINYLORA": peft.TinyLoraConfig, "UNILORA": peft.UniLoraConfig,
    "VBLORA": peft.VBLoRAConfig,
}  # fmt: skip


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


@pytest.mark.parametrize("method", sorted(FILES.keys() - {"TINYLORA", "HIRA"}))
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
    ("BONE", {"init_weights": "bat"}, "bad_shape", [PATH, "bone_block", "(4, 8)", "(2, 4, 4)"]),
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
    ("HIRA", {"r": 3}, "bad_shape", [PATH, "hira_A", "found rank 2, want 3"]),
    ("HIRA", {"r": 0}, "bad_config", ["r: found 0"]),
    ("HIRA", {"rank_pattern": {"up_proj": 0}}, "bad_config", ["rank_pattern: found 0"]),
    ("HIRA", {"r": 3, "rank_pattern": {"up_proj": 1}}, "bad_shape", [PATH, "hira_A", "found rank 2", "3", "1"]),
    ("HIRA", {"alpha": 8}, "bad_config", ["alpha", "found 8"]),
    ("LOHA", {"r": 3}, "bad_shape", [PATH, "hada_w1_a", "(8, 2)", "(8, 3)"]),
    ("LOHA", {"alpha_pattern": {"up_proj": "8"}}, "bad_config", ["alpha_pattern", "'8'"]),
    ("LOHA", {"bias": "all"}, "bad_config", ["bias", "'all'"]),
    ("LOKR", {"r": 2}, "bad_shape", [PATH, "lokr_w2_a", "(4, 1)", "(any, 2)"]),
    ("LOKR", {"rank_pattern": {"up_proj": 0}}, "bad_config", ["rank_pattern: found 0"]),
    ("MISS", {"init_weights": "bat"}, "bad_shape", [PATH, "miss_block", "(4, 8)", "(2, 4, 4)"]),
    ("MISS", {"init_weights": "bat", "r": 5}, "bad_config", [PATH, "r: found 5", "divisor of the 16 inputs"]),
    ("MISS", {"init_weights": "bat", "r": 16}, "bad_config", [PATH, "r: found 16", "divisor of the 8 outputs"]),
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


LOKR_A_B = {"lokr_w2_a": (8, 1), "lokr_w2_b": (1, 16)}


@pytest.mark.parametrize("method, config, shapes, values", [
    ("LOKR", {}, {"lokr_w1_a": (8, 1), "lokr_w1_b": (1, 16), "lokr_w2": (1, 1)}, 8 * 16 + 1),
    ("LOKR", {}, {"lokr_w1": (1, 1)} | LOKR_A_B, 1 + 8 * 16),
    ("LOKR", {}, {"lokr_w1": (1, 600)} | LOKR_A_B, 600 * 16 + 8),  # a term: w1 has too many columns
    ("LOKR", {"r": 2}, {"lokr_w1": (4, 600), "lokr_w2": (2, 1)}, 4 * (600 + 8)),
    ("LOHA", {}, dict.fromkeys(("hada_w1_a", "hada_w2_a"), (8, 2)) | dict.fromkeys(("hada_w1_b", "hada_w2_b"), (2, 16)),
     4 * (8 + 16)),
])  # fmt: skip
def test_what_small_matrices_stand_for_is_bounded_before_it_is_made(monkeypatch, method, config, shapes, values):
    """Without a base, by less: nothing else bounds the sizes there, and one may exist that has them."""
    file = dict.fromkeys(FILES[method][1]) | {key(name): torch.ones(shape) for name, shape in shapes.items()}
    for limit in ("MOST_UNBOUNDED", "MAX_VALUES"):
        with monkeypatch.context() as patch:
            patch.setattr(common, limit, values - 1)
            code = refused("too_large", PATH, f"{values} values")
            with pytest.raises(NeedsBase) if limit == "MOST_UNBOUNDED" else code:
                read_changed(method, config, file, base=None)
            patch.setattr(common, limit, values)
            read_changed(method, config, file, base=None)


def test_what_all_modules_stand_for_is_bounded_before_the_first_is_read(monkeypatch):
    moved = {k.replace(PATH, "model.layers.1.mlp.up_proj"): t for k, t in FILES["LOHA"][1].items()}
    rank = len(FILES["LOHA"][1][key("hada_w1_b")]) ** 2
    values = 2 * min(rank, 8) * (8 + 16)
    monkeypatch.setattr(common, "MAX_VALUES", values)
    assert len(read_changed("LOHA", tensors=moved).modules) == 2
    monkeypatch.setattr(common, "MAX_VALUES", values - 1)
    monkeypatch.setattr(common, "build", None)
    with refused("too_large", "model.layers.1.mlp.up_proj", "hada_w1_a", f"{values} values", f"{values - 1}"):
        read_changed("LOHA", tensors=moved)


@pytest.mark.parametrize("method", ["LOKR", "HIRA"])
def test_the_values_of_structures_count(monkeypatch, method):
    (module,) = read_changed(method).modules.values()
    tensors = [t for t in vars(module.structure).values() if isinstance(t, torch.Tensor)]
    count = sum(t.numel() for t in tensors)
    moved = {k.replace(PATH, "model.layers.1.mlp.up_proj"): t for k, t in FILES[method][1].items()}
    monkeypatch.setattr(common, "MAX_VALUES", 2 * count)
    read_changed(method, tensors=moved)
    monkeypatch.setattr(common, "MAX_VALUES", 2 * count - 1)
    with refused("too_large", f"over {2 * count - 1} values"):
        read_changed(method, tensors=moved)


@pytest.mark.parametrize("method", FILES)
def test_a_file_may_mix_dtypes(method):
    for odd in FILES[method][1]:
        mixed = {k: t.double() if k == odd and t.is_floating_point() else t for k, t in FILES[method][1].items()}
        assert read_changed(method, tensors=mixed).modules.keys() == {PATH}
        read_changed(method, tensors=mixed, base=None)


LOKR_PARTS = {"lokr_w1_a": (2, 3), "lokr_w1_b": (3, 4), "lokr_w2_a": (4, 3), "lokr_w2_b": (3, 4)}
LOHA_PARTS = {"hada_w1_a": (8, 3), "hada_w1_b": (3, 16), "hada_w2_a": (8, 3), "hada_w2_b": (3, 16)}


@pytest.mark.parametrize("method, shapes, odd", [
    *(("LOKR", LOKR_PARTS, odd) for odd in LOKR_PARTS), *(("LOHA", LOHA_PARTS, odd) for odd in LOHA_PARTS),
])  # fmt: skip
def test_a_file_may_mix_dtypes_that_are_multiplied(method, shapes, odd):
    kinds = {name: torch.float64 if name == odd else torch.float16 for name in shapes}
    mixed = {key(name): torch.ones(shape, dtype=kinds[name]) for name, shape in shapes.items()}
    read_changed(method, {"r": 3}, dict.fromkeys(FILES[method][1]) | mixed)


@pytest.mark.parametrize("method, name, shape", [
    ("HIRA", "hira_A", (2, 0)), ("HIRA", "hira_B", (0, 2)), ("LOKR", "lokr_w2_a", (0, 1)), ("LOKR", "lokr_w1", (0, 0)),
    ("LOHA", "hada_w1_b", (2, 0)), ("ADALORA", "lora_A", (3, 0)),
])  # fmt: skip
def test_no_layer_has_no_inputs_or_outputs(method, name, shape):
    with refused("bad_shape", PATH, name, f"found {shape}", "any"):
        read_changed(method, tensors={key(name): torch.ones(shape)}, base=None)
