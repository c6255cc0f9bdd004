"""Refusals of the methods whose terms depend on the base weight or share matrices: fields, shapes, tensors.

Each has its code, and its text names the key, what was found and what is allowed.
"""

import pytest
import torch
from small_files import BASE, EMBED, PATH, key, read, refused, weighted

from scute_sgl.fold import fold_adapter
from scute_sgl.methods import adamss, locations
from scute_sgl.slots import BaseShape

ones = torch.ones
HRA = {"hra_u": ones(16, 2)}
DEFT = {"deft_P": ones(8, 2), "deft_R": ones(2, 16)}
PEANUT = {"peanut_A.weight": ones(2, 8), "peanut_B.weight": ones(8, 2)}
GLORA = {f"glora_{path}.X": ones(8, 1) for path in "AB"} | {"glora_C.zeros": torch.zeros(16, 1)}
GLORA |= {f"glora_{path}.zeros": torch.zeros(8) for path in "DE"}
OSF = {"osf_svd_params.U_low": ones(8, 4), "osf_svd_params.S_low": ones(4), "osf_svd_params.V_low": ones(4, 16)}
ADAMSS = {"adamss_newB": torch.eye(3, 16), "adamss_A.0": ones(1, 3), "adamss_A.1": ones(1, 3)}
ADAMSS |= {"adamss_B.0": ones(7, 1), "adamss_B.1": ones(1, 1)}
PVERA = {"pvera_lambda_b": ones(8), "pvera_lambda_d": ones(4)}
SHARED = {"base_model.pvera_A": ones(4, 16), "base_model.pvera_B": ones(8, 2)}
FOURIERFT, WAVEFT = {"fourierft_spectrum": ones(5)}, {"waveft_spectrum": ones(5)}
ROAD = {"road_theta": ones(4), "road_alpha": ones(4)}
SHIRA = {"shira_weight": ones(24), "shira_indices": torch.stack([torch.arange(24) * 5 // 16, torch.arange(24) * 5 % 16])}
SUPERTUNING = {"supertuning_values": ones(12), "supertuning_indices": torch.arange(12).int() * 10}
FILES = {
    "ADAMSS": ADAMSS, "DEFT": DEFT, "FOURIERFT": FOURIERFT, "GLORA": GLORA, "HRA": HRA, "OSF": OSF, "PEANUT": PEANUT,
    "PVERA": PVERA, "ROAD": ROAD, "SHIRA": SHIRA, "SUPERTUNING": SUPERTUNING, "WAVEFT": WAVEFT,
}  # fmt: skip
FIELDS = {"ADAMSS": {"r": 3, "num_subspaces": 2}, "GLORA": {"config_A_B": "vector", "config_C": "vector"}, "OSF": {}}
FIELDS |= {method: {"n_frequency": 5} for method in ("FOURIERFT", "WAVEFT")}
FIELDS |= {"ROAD": {"group_size": 4}, "SHIRA": {"r": 1}, "SUPERTUNING": {"sparsity": 0.9}}


def config(method, **fields):
    return {"peft_type": method, "target_modules": ["up_proj"]} | FIELDS.get(method, {"r": 2}) | fields


def tensors(method, path=PATH, **changed):
    named = FILES[method] | changed
    shared = SHARED if method == "PVERA" else {}
    return shared | {key(name, path): tensor for name, tensor in named.items() if tensor is not None}


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


def test_adamss_clusters_against_the_file():
    W = torch.zeros(8, 16)
    W[:, :3] = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))  # V spans the first three inputs
    rows = adamss.cluster_rows(W, None, ADAMSS["adamss_newB"], 2, 0, None)
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


def test_glora_vectors_without_a_base_are_equally_long():
    for name in ("glora_A.X", "glora_B.X"):
        with refused("bad_shape", PATH, "glora_B.X"):
            read(config("GLORA"), tensors("GLORA", **{name: ones(9, 1)}), None)


def test_shira_of_windows_has_the_same_places():
    """PEFT writes them as float32 there, and reads both."""
    file = tensors("SHIRA", shira_indices=SHIRA["shira_indices"].float())
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
