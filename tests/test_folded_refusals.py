"""Refusals of the methods whose terms depend on the base weight or share matrices: fields, shapes, tensors.

Each has its code, and its text names the key, what was found and what is allowed.
"""

import pytest
import torch
from folded_files import FILES, config, ones, tensors
from small_files import EMBED, PATH, key, read, refused, weighted

from scute_sgl.fold import fold_adapter
from scute_sgl.methods import adamss


@pytest.mark.parametrize("method", FILES)
def test_the_smallest_file_is_read(method):
    assert read(config(method), tensors(method)).modules.keys() == {PATH}


@pytest.mark.parametrize("method", FILES)
def test_no_tensor_may_be_missing_unknown_or_of_another_size(method):
    for name in FILES[method]:
        if name.startswith(("adamss_B", "adamss_newB")):
            continue  # their sizes are checked with the base weight
        with refused("missing_tensor", name.removesuffix("zeros") if len(FILES[method]) > 1 else method):
            read(config(method), tensors(method, **{name: None}))
        *sizes, last = FILES[method][name].shape
        wrong = ones(*sizes, last + 1).to(FILES[method][name].dtype)
        with refused("bad_shape", PATH, name, f"found {tuple(wrong.shape)}"):
            read(config(method), tensors(method) | {key(name): wrong})
    with refused("unknown_key", "invented"):
        read(config(method), tensors(method, invented=ones(1)))
    with refused("bad_config", "modules_to_save"):
        read(config(method, modules_to_save=["lm_head"]), tensors(method))
    with refused("unsupported_method", EMBED, "embedding"):
        read(config(method, target_modules=["embed_tokens"]), tensors(method, EMBED))


@pytest.mark.parametrize("method, fields, fragments", [
    ("ADAMSS", {"num_subspaces": 0}, ["num_subspaces", "found 0"]),
    ("ADAMSS", {"num_subspaces": 10**6}, ["num_subspaces", "want 1 to 1024"]),
    ("ADAMSS", {"random_seed": -1}, ["random_seed", "found -1"]),
    ("HRA", {"r": 0}, ["r", "found 0"]),
    ("HRA", {"apply_GS": 1}, ["apply_GS", "found 1"]),
    ("DEFT", {"decomposition_method": "svd"}, ["decomposition_method", "found 'svd'", "relu or qr"]),
    ("DEFT", {"alpha": "8"}, ["alpha", "found '8'"]),
    ("PEANUT", {"act_fn": "swiglu"}, ["act_fn", "found 'swiglu'", "relu"]),
    ("PEANUT", {"depth": -1}, ["depth", "found -1"]),
    ("PEANUT", {"depth": 10**9}, ["depth", "want 0 to 64"]),
    ("GLORA", {"config_C": "constant"}, ["config_C", "found 'constant'", "lora, vector, none"]),
    ("GLORA", {"config_D_E": "lora"}, ["config_D_E", "found 'lora'"]),
    ("PVERA", {"sample_at_inference": True}, ["sample_at_inference", "found True", "noise"]),
    ("PVERA", {"save_projection": False}, ["save_projection", "pvera_A"]),
    ("FOURIERFT", {"n_frequency": 0}, ["n_frequency", "found 0"]),
    ("FOURIERFT", {"n_frequency_pattern": {"(a+)+": 2}}, ["n_frequency_pattern", "repeated groups"]),
    ("FOURIERFT", {"random_loc_seed": -1}, ["random_loc_seed", "found -1"]),
    ("FOURIERFT", {"scaling": "1"}, ["scaling", "found '1'"]),
    ("WAVEFT", {"n_frequency_pattern": {"up_proj": 0}}, ["n_frequency", "found 0"]),
    ("WAVEFT", {"random_loc_seed": 1 << 63}, ["random_loc_seed", "want 0 <= seed"]),
    ("ROAD", {"variant": "road_3"}, ["variant", "found 'road_3'", "road_1, road_2, road_4"]),
    ("ROAD", {"group_size": 5}, ["group_size", "found 5", "even"]),
    ("ROAD", {"group_size": 0}, ["group_size", "found 0"]),
    ("ROAD", {"group_size": 6}, [PATH, "group_size", "found 6", "divisor of the 8 outputs"]),
    ("SHIRA", {"r": 0}, ["r", "found 0"]),
    ("SUPERTUNING", {"sparsity": 1.0}, ["sparsity", "found 1.0", "0 up to 1"]),
    ("SUPERTUNING", {"sparsity": "0.9"}, ["sparsity", "found '0.9'"]),
    ("SUPERTUNING", {"r": 0}, ["r", "found 0"]),
    ("SUPERTUNING", {"lora_alpha": 3.0}, ["lora_alpha", "found 3.0 without r"]),
    ("SUPERTUNING", {"r": 2, "lora_alpha": "3"}, ["lora_alpha", "found '3'"]),
    ("OSF", {"rank_pattern": {"(a+)+": 2}}, ["rank_pattern", "repeated groups"]),
    ("OSF", {"effective_rank": "half"}, ["effective_rank", "found 'half'"]),
])  # fmt: skip
def test_bad_values_are_refused_by_the_fields_name(method, fields, fragments):
    with refused("bad_config", *fragments):
        read(config(method, **fields), tensors(method))


def test_hra_column_without_a_direction():
    U = torch.ones(16, 2)
    with refused("bad_config", PATH, "hra_u", "direction"):
        read(config("HRA", apply_GS=True), tensors("HRA", hra_u=U))  # the second is the first
    U[:, 1] = 0
    with refused("bad_config", PATH, "hra_u", "direction"):
        read(config("HRA"), tensors("HRA", hra_u=U))


def test_deft_para_has_no_r():
    with refused("unknown_key", PATH, "deft_R"):
        read(config("DEFT", para=True), tensors("DEFT"))


def test_peanut_depth_against_the_file():
    with refused("missing_tensor", PATH, "peanut_encoders.0.weight"):
        read(config("PEANUT", depth=1), tensors("PEANUT"))
    with refused("unknown_key", "peanut_encoders.0.weight"):
        read(config("PEANUT"), tensors("PEANUT", **{"peanut_encoders.0.weight": ones(2, 2)}))


def test_glora_matrices_of_another_rank_or_size():
    files = {f"glora_{path}.{name}": ones(*shape) for path in "AB" for name, shape in (("Xu", (2, 16)), ("Xd", (8, 2)))}
    off = {f"glora_{path}.X": None for path in "AB"}
    for fields in ({"config_A_B": "lora", "r": 2}, {"config_A_B": None, "r": 2}):  # PEFT's default
        slots = read(config("GLORA", **fields), tensors("GLORA", **off | files)).modules[PATH]
        assert slots.structure.A.shape == slots.terms[0].A.shape == (2, 16)
        for name, tensor in files.items():
            with refused("missing_tensor", PATH, name):
                read(config("GLORA", **fields), tensors("GLORA", **off | files | {name: None}))
            with refused("bad_shape", PATH, name, f"found {(3, *tensor.shape[1:])}"):
                read(config("GLORA", **fields), tensors("GLORA", **off | files | {name: ones(3, *tensor.shape[1:])}))
        with refused("unknown_key", PATH, "glora_A.X"):
            read(config("GLORA", **fields), tensors("GLORA", **off | files | {"glora_A.X": ones(8, 1)}))
    with refused("bad_shape", PATH, "glora_A.Xu", "found (2, 16), want (3, 16)"):
        read(config("GLORA", config_A_B="lora", r=3), tensors("GLORA", **off | files))
    with refused("bad_config", "config_A_B", "'matrix'", "lora, vector, constant, none"):
        read(config("GLORA", config_A_B="matrix"), tensors("GLORA"))


def test_glora_path_that_is_off_holds_zeros():
    with refused("bad_config", PATH, "glora_D.zeros", "zeros"):
        read(config("GLORA"), tensors("GLORA", **{"glora_D.zeros": ones(8)}))


@pytest.mark.parametrize("path", "AB")
def test_glora_needs_a_and_b(path):
    """Neither may be off alone, nor on against the config."""
    off = {f"glora_{path}.X": None, f"glora_{path}.zeros": torch.zeros(8, 16)}
    with refused("missing_tensor", PATH, f"glora_{path}.X"):
        read(config("GLORA"), tensors("GLORA", **off))
    with refused("missing_tensor", PATH, "glora_A.zeros"):
        read(config("GLORA", config_A_B="none"), tensors("GLORA"))


def test_glora_with_a_bias_on_a_base_without_one():
    with_d = {"glora_D.zeros": None, "glora_D.X": ones(8)}
    adapter = read(config("GLORA", config_D_E="vector"), tensors("GLORA", **with_d))
    fold_adapter(adapter, weighted(ones(8, 16), ones(8)))
    with refused("wrong_base", PATH, "glora_D", "bias"):
        fold_adapter(adapter, weighted(ones(8, 16)))


def test_glora_vectors_without_a_base_are_equally_long():
    for name in ("glora_A.X", "glora_B.X"):
        with refused("bad_shape", PATH, "glora_B.X"):
            read(config("GLORA"), tensors("GLORA", **{name: ones(9, 1)}), None)


def test_adamss_clusters_against_the_file():
    W = torch.zeros(8, 16)
    W[:, :3] = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))  # V spans the first three inputs
    rows = adamss.cluster_rows(W, None, FILES["ADAMSS"]["adamss_newB"], 2, 0, None)
    sizes = [len(own) for own in rows]
    assert sorted(torch.cat(rows).tolist()) == list(range(8)) and min(sizes) > 0
    parts = {f"adamss_B.{k}": ones(size, 1) for k, size in enumerate(sizes)}
    whole = read(config("ADAMSS"), tensors("ADAMSS", **parts))
    B = fold_adapter(whole, weighted(W))[0][1].B
    assert [B[:, k].nonzero().flatten().tolist() for k in range(2)] == [own.tolist() for own in rows]
    other = {f"adamss_B.{k}": ones(size, 1) for k, size in enumerate((sizes[0] + 1, sizes[1] - 1))}
    with refused("wrong_base", PATH, "adamss_B", f"found parts of {[sizes[0] + 1, sizes[1] - 1]}", f"have {sizes}"):
        fold_adapter(read(config("ADAMSS"), tensors("ADAMSS", **other)), weighted(W))
    with refused("wrong_base", PATH, "adamss_newB", "of the space", "kind of device"):
        fold_adapter(whole, weighted(W.roll(3, dims=1)))
    with refused("wrong_base", PATH, "adamss_newB", "found 16 columns", "exactly if the layer has a bias"):
        fold_adapter(whole, weighted(W, ones(8)))
    with refused("bad_shape", PATH, "adamss_newB", "found (3, 18)", "16 or one more"):
        read(config("ADAMSS"), tensors("ADAMSS", adamss_newB=ones(3, 18)))
    with refused("bad_shape", PATH, "adamss_newB", "found (2, 16)"):
        read(config("ADAMSS"), tensors("ADAMSS", adamss_newB=ones(2, 16)))
    with refused("missing_tensor", PATH, "adamss_newB"):
        read(config("ADAMSS"), tensors("ADAMSS", adamss_newB=None))


def test_adamss_without_scikit_learn(monkeypatch):
    monkeypatch.setattr(adamss, "find_spec", lambda name: None)
    with refused("unsupported_method", "scikit-learn", "pip install"):
        read(config("ADAMSS"), tensors("ADAMSS"))


def test_adamss_with_a_bias_of_its_own():
    with refused("unknown_key", PATH, "base_layer.bias", "trains no bias"):
        read(config("ADAMSS"), tensors("ADAMSS", **{"base_layer.bias": ones(8)}))


def test_osf_rank_against_the_file():
    with refused("bad_shape", PATH, "osf_svd_params.S_low", "found (4,)", "want (6)"):
        read(config("OSF", effective_rank=0.25), tensors("OSF"))
    with refused("bad_shape", PATH, "osf_svd_params.S_low", "found (4,)", "want (3)"):
        read(config("OSF", rank_pattern={"up": 5}), tensors("OSF"))
    empty = {"osf_svd_params.U_low": ones(8, 0), "osf_svd_params.S_low": ones(0), "osf_svd_params.V_low": ones(0, 16)}
    with refused("bad_config", PATH, "effective_rank", "keeps all"):
        read(config("OSF", effective_rank=8), tensors("OSF", **empty))


@pytest.mark.parametrize("key, tensor, code, found", [
    ("base_model.pvera_A", None, "missing_tensor", "save_projection"),
    ("base_model.pvera_A", ones(2, 16), "bad_shape", "found (2, 16), want (4, inputs)"),
    ("base_model.pvera_B", ones(8, 4), "bad_shape", "found (8, 4), want (outputs, 2)"),
    ("base_model.pvera_B", ones(7, 2), "bad_shape", "a B of 7 outputs"),
])  # fmt: skip
def test_pvera_projections_that_do_not_fit(key, tensor, code, found):
    changed = {k: v for k, v in (tensors("PVERA") | {key: tensor}).items() if v is not None}
    with refused(code, found):
        read(config("PVERA"), changed)
