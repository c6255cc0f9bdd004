"""What the methods of adapters_plain.py refuse of their own file formats, and formats that PEFT no longer writes.

Each refusal has its code, and its text names the key, what was found and what is allowed.
"""

import pytest
import torch
from make_adapters import make_base, write_adapter
from plain_files import BANK, FILES, THETA, ones, read_changed
from small_files import BASE, EMBED, PATH, key, refused

from scute_sgl import layout
from scute_sgl.checkpoint import load
from scute_sgl.methods import METHODS, common
from scute_sgl.slots import BaseShape


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
    monkeypatch.setattr(layout, "KRONECKER_ROWS", 3)
    monkeypatch.setattr(common, "MAX_RANK", 1)
    with refused("too_large", PATH, "rank 2", "at most 1"):
        read_changed("LOKR")


def test_hira_takes_the_rank_of_its_pattern_too():
    """PEFT gives it to all but the first adapter of a layer."""
    for fields in ({"r": 2, "rank_pattern": {"up_proj": 3}}, {"r": 3, "rank_pattern": {"up_proj": 2}}):
        slots = read_changed("HIRA", fields).modules[PATH]
        assert slots.structure.A.shape == (2, 16) and slots.structure.B.shape == (8, 2)


@pytest.mark.parametrize("split", [True, False])
def test_lokr_of_more_columns_than_the_op_has_room_for_is_the_same_as_a_term(monkeypatch, split):
    random = torch.Generator().manual_seed(0)
    sizes = dict(lokr_w2_a=(4, 1), lokr_w2_b=(1, 4)) if split else dict(lokr_w2=(4, 4))
    file = dict.fromkeys(FILES["LOKR"][1])
    file |= {key(name): torch.randn(size, generator=random) for name, size in {"lokr_w1": (2, 4), **sizes}.items()}
    thin = read_changed("LOKR", {"alpha": 3}, file).modules[PATH]
    monkeypatch.setattr(layout, "KRONECKER_ROWS", 3)
    fat = read_changed("LOKR", {"alpha": 3}, file).modules[PATH]
    assert not thin.terms and fat.structure is None
    w2 = thin.structure.w2 if thin.structure.w2_b is None else thin.structure.w2 @ thin.structure.w2_b
    assert (thin.structure.w2_b is not None) == split
    torch.testing.assert_close(fat.terms[0].B @ fat.terms[0].A, torch.kron(thin.structure.w1, w2))


def test_lokr_factors_without_room_for_their_inner_sums_are_multiplied(monkeypatch):
    monkeypatch.setattr(layout, "KRONECKER_VALUES", 3)
    structure = read_changed("LOKR").modules[PATH].structure
    assert structure.w2_b is None and structure.w2.shape == (4, 4)


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


def test_hira_of_an_embedding_is_refused():
    """PEFT has one: rows of the embedding, not of a linear layer, are scaled."""
    file = dict.fromkeys(FILES["HIRA"][1])
    file |= {key(f"hira_embedding_{name}", EMBED): torch.ones(shape) for name, shape in (("A", (2, 32)), ("B", (16, 2)))}
    with refused("unsupported_method", EMBED, "hira_embedding_A", "embedding is not served"):
        read_changed("HIRA", {"target_modules": ["embed_tokens"]}, file)


def test_miss_blocks_larger_than_the_op_has_room_for_are_refused(monkeypatch):
    read_changed("MISS", {"init_weights": "bat"}, ones(miss_block=(2, 4, 4)))
    monkeypatch.setattr(layout, "BLOCK_AFFINE_INPUTS", 3)
    with refused("too_large", PATH, "r: found 4", "at most 3"):
        read_changed("MISS", {"init_weights": "bat"}, ones(miss_block=(2, 4, 4)))


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
