"""RandLoRA's shared matrices: drawn as PEFT draws them, copied under every layer, and folded into whole ranks.

Each refusal has its code, and its text names the key, what was found and what is allowed.
"""

import pytest
import torch
from make_adapters import make_base, write_adapter
from peft_answers import load_peft
from small_files import BASE, EMBED, PATH, key, read, refused
from test_methods import root, shape_of, written  # noqa: F401

from scute_sgl import checkpoint
from scute_sgl.errors import NeedsBase
from scute_sgl.methods import common, randlora, vera
from scute_sgl.slots import BaseShape

A, B = "base_model.randlora_A", "base_model.randlora_B"
DOWN = "model.layers.0.mlp.down_proj"


def tensors(r=4, path=PATH, **changed):
    """Of a layer of 16 and 8 features."""
    n, generator = -(-8 // r), torch.Generator().manual_seed(r)
    shapes = {key("randlora_lambda", path): (r, n), key("randlora_gamma", path): (n, 8), A: (r, 1, 8), B: (16, n, r)}
    file = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {name: tensor for name, tensor in (file | changed).items() if tensor is not None}


def config(**fields):
    return {"peft_type": "RANDLORA", "target_modules": ["up_proj", "down_proj"], "r": 4, "randlora_alpha": 12} | fields


def delta(file, r, path=PATH):
    """Element by element, B A (out, in) of PEFT's formula."""
    weights, gamma = file[key("randlora_lambda", path)].double(), file[key("randlora_gamma", path)].double()
    n, total = len(gamma), torch.zeros(16, 8, dtype=torch.float64)
    for j in range(r * n):
        row = weights[j // n, j % n] * file[A][j // n, 0].double() * gamma[j % n]
        total += torch.outer(file[B][:, j // r, j % r].double(), row)
    return (12 / r) * (total if path == DOWN else total.T)


@pytest.mark.parametrize("path", [PATH, DOWN])  # 16 inputs and 8 outputs, 8 inputs and 16 outputs
@pytest.mark.parametrize("r", [1, 2, 3, 4, 5, 8, 9, 100])
def test_a_layer_has_at_most_its_own_rank(r, path):
    (slots,) = read(config(r=r), tensors(r, path)).modules.values()
    (term,) = slots.terms
    assert len(term.A) == 8
    torch.testing.assert_close(term.B.double() @ term.A.double(), delta(tensors(r, path), r, path), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("path", [PATH, DOWN])
@pytest.mark.parametrize("size", [1e-4, 1e-3, 1e3])
def test_float16_holds_both_factors_whatever_lambda_and_gamma_are(path, size):
    file = tensors(4, path)
    file |= {key(name, path): size * file[key(name, path)] for name in ("randlora_lambda", "randlora_gamma")}
    (term,) = read(config(), file).modules[path].terms
    want = delta(file, 4, path)
    assert (term.B.half().double() @ term.A.half().double() - want).abs().max() < 2e-3 * want.abs().max()
    row = file[key("randlora_lambda", path)][0, 0] * file[key("randlora_gamma", path)][0]
    assert size > 1 or (row.half() - row).abs().max() > 2e-3 * row.abs().max()  # on one side it is lost


@pytest.mark.parametrize("name", ["randlora_drawn", "randlora_sparse", "randlora_very_sparse"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_draws_what_peft_draws_on_this_dtype(written, name, dtype):  # noqa: F811
    """Bit for bit, rounded to the base's dtype first."""
    base_dir, folder = written("llama", name)
    settings, _ = checkpoint.load(folder)
    drawn = randlora._draw(settings, settings["r"], shape_of(base_dir, dtype))
    theirs = load_peft(base_dir, folder, dtype).base_model
    for own, buffers in zip(drawn, (theirs.randlora_A, theirs.randlora_B), strict=True):
        assert own.dtype == dtype and torch.equal(own.float(), buffers["default"].float())


def test_a_copy_under_a_layer_is_the_model_s_own():
    copies = {key("randlora_A"): tensors()[A].clone(), key("randlora_B"): tensors()[B].clone()}
    read(config(), tensors() | copies)
    for name, copy in copies.items():
        other = copy.clone()
        other[0, 0, 0] += 1e-6
        with refused("bad_config", PATH, name.rpartition(".")[2], "differs from base_model.randlora_"):
            read(config(), tensors() | copies | {name: other})
        with refused("bad_shape", PATH, name.rpartition(".")[2], "found (1, ", f"want ({len(copy)}, "):
            read(config(), tensors() | {name: copy[:1]})
        with refused("unknown_key", PATH, name.rpartition(".")[2]):
            read(config(save_projection=False), tensors(**{A: None, B: None}) | {name: copy})
    with refused("missing_tensor", A, "save_projection"):
        read(config(), tensors(**{A: None}) | copies)


def test_peft_reads_the_model_s_own_last(tmp_path):
    """So the matrices that count here count there."""
    base_dir = make_base("llama", tmp_path)
    folder = write_adapter(base_dir, tmp_path / "a", "randlora")
    _, file = checkpoint.load(folder)
    model = load_peft(base_dir, folder)
    changed = {name.replace("_A", "_A.default"): t + (name != A) for name, t in file.items() if name.endswith("_A")}
    assert len(changed) == 15
    model.load_state_dict(changed, strict=False)
    assert torch.equal(model.base_model.randlora_A["default"], file[A])


@pytest.mark.parametrize("fields, changed, code, fragments", [
    ({}, {A: None}, "missing_tensor", [A, "save_projection"]),
    ({}, {B: None}, "missing_tensor", [B, "save_projection"]),
    ({}, {A: torch.ones(4, 8)}, "bad_shape", [A, "found (4, 8)", "want (4, 1, inputs)"]),
    ({}, {A: torch.ones(4, 2, 8)}, "bad_shape", [A, "found (4, 2, 8)", "want (4, 1, inputs)"]),
    ({}, {A: torch.ones(4, 1, 8).int()}, "bad_shape", [A]),
    ({}, {A: torch.ones(4, 1, 7)}, "bad_shape", [PATH, "(4, 1, 7)", "at least (4, 1, 8)"]),
    ({}, {B: torch.ones(16, 2, 3)}, "bad_shape", [B, "found (16, 2, 3)", "want (outputs, N, 4)"]),
    ({}, {B: torch.ones(15, 2, 4)}, "bad_shape", [PATH, "(15, 2, 4)", "at least", "(16, 2, 4)"]),
    ({}, {B: torch.ones(16, 1, 4)}, "bad_shape", [PATH, "(16, 1, 4)", "at least", "(16, 2, 4)"]),
    ({}, {key("randlora_lambda"): None}, "missing_tensor", [PATH, "randlora_lambda"]),
    ({}, {key("randlora_gamma"): None}, "missing_tensor", [PATH, "randlora_gamma"]),
    ({}, {key("randlora_lambda"): torch.ones(2, 4)}, "bad_shape", [PATH, "randlora_lambda", "(2, 4)", "(4, 2)"]),
    ({}, {key("randlora_gamma"): torch.ones(2, 16)}, "bad_shape", [PATH, "randlora_gamma", "(2, 16)", "(2, 8)"]),
    ({}, {key("randlora_C"): torch.ones(1)}, "unknown_key", ["randlora_C"]),
    ({}, {key("base_layer.weight"): torch.ones(2, 2)}, "bad_shape", [PATH, "base_layer.weight"]),
    ({"r": 3}, {}, "bad_shape", [A, "found (4, 1, 8)", "want (3, 1, inputs)"]),
    ({"r": 0}, {}, "bad_config", ["r: found 0"]),
    ({"randlora_alpha": "640"}, {}, "bad_config", ["randlora_alpha", "'640'"]),
    ({"randlora_alpha": 1e300}, {}, "bad_config", [PATH, "randlora_lambda", "overflows"]),
    ({}, {key("randlora_gamma"): torch.full((2, 8), 3e38)}, "bad_config", [PATH, "randlora_gamma", "not finite"]),
    ({"r": 3}, tensors(3, **{B: torch.full((16, 3, 3), 3e38)}), "bad_config", [PATH, "randlora_gamma", "not finite"]),
    ({"sparse": 1}, {}, "bad_config", ["sparse", "found 1"]),
    ({"very_sparse": "yes"}, {}, "bad_config", ["very_sparse", "'yes'"]),
    ({"save_projection": False}, {}, "bad_config", ["save_projection", "randlora_A"]),
    ({"exclude_modules": ["q_proj"]}, {}, "bad_config", ["exclude_modules"]),
    ({"modules_to_save": ["lm_head"]}, {}, "bad_config", ["modules_to_save"]),
    ({"target_modules": ["down_proj"]}, {}, "unknown_key", [PATH, "leave it out"]),
])  # fmt: skip
def test_refusals(fields, changed, code, fragments):
    read(config(), tensors())
    with refused(code, *fragments):
        read(config(**fields), tensors(**changed))


UNSAVED = {A: None, B: None}


@pytest.mark.parametrize("fields, code, fragments", [
    ({"projection_prng_key": -1}, "bad_config", ["projection_prng_key", "-1"]),
    ({"target_modules": None}, "bad_config", ["target_modules", "null"]),
    ({"target_modules": ["nothing"]}, "bad_config", ["target_modules"]),
])  # fmt: skip
def test_draw_refusals(fields, code, fragments):
    read(config(save_projection=False), tensors(**UNSAVED))
    with refused(code, *fragments):
        read(config(save_projection=False, **fields), tensors(**UNSAVED))


def test_a_draw_needs_to_know_every_layer_that_may_be_targeted():
    base = BaseShape(BASE, dtype=torch.float32, vocab_size=32, unlisted="model.layers.0.mlp.gate")
    read(config(), tensors(), base)
    with refused("bad_config", "save_projection", "'model.layers.0.mlp.gate'", "save them"):
        read(config(save_projection=False), tensors(**UNSAVED), base)


def test_what_a_small_file_stands_for_is_bounded(monkeypatch):
    monkeypatch.setattr(vera, "MAX_DRAW", 16 * 4 * 4 - 1)  # both targets together have 16 inputs and 16 outputs
    with refused("too_large", "16 x 4 x 4 projections", "255"):
        read(config(save_projection=False), tensors(**UNSAVED))
    monkeypatch.setattr(common, "MAX_VALUES", 8 * (16 + 8) - 1)
    for r in (4, 100):
        with refused("too_large", PATH, "randlora_lambda", "192 values", "191"):
            read(config(r=r), tensors(r))


def test_a_small_file_of_much_work_is_refused_before_any(monkeypatch):
    def never(*_):
        raise AssertionError("too late")

    read(config(save_projection=False), tensors(**UNSAVED))
    monkeypatch.setattr(randlora, "_draw", never)
    file = tensors(**UNSAVED) | tensors(path=DOWN, **UNSAVED)
    monkeypatch.setattr(common, "MAX_VALUES", 2 * 8 * (16 + 8) - 1)  # each layer alone would pass
    with refused("too_large", DOWN, "randlora_lambda", "384 values", "383"):
        read(config(save_projection=False), file)
    monkeypatch.undo()
    monkeypatch.setattr(randlora, "_draw", never)
    monkeypatch.setattr(randlora, "MAX_PRODUCTS", 8 * 16 * 100 - 1)
    with refused("too_large", "r: found 100", "12800 multiplications", "12799"):
        read(config(save_projection=False, r=100), tensors(100, **UNSAVED))
    with pytest.raises(AssertionError, match="too late"):  # a divisor of 8 has no product
        read(config(save_projection=False, r=1), tensors(1, **UNSAVED))


def test_embeddings_are_refused_by_module():
    with refused("unsupported_method", EMBED, "no embedding layer"):
        read(config(target_modules=None), tensors(path=EMBED))


def test_the_base_tells_which_side_of_a_layer_gamma_belongs_to():
    with pytest.raises(NeedsBase, match="gamma"):
        read(config(), tensors(), None)
    with refused("missing_tensor", A):  # which no base would bring
        read(config(), tensors(**{A: None}), None)


@pytest.mark.parametrize("odd", [A, B, key("randlora_lambda"), key("randlora_gamma")])
def test_a_file_may_mix_dtypes(odd):
    (term,) = read(config(), tensors() | {odd: tensors()[odd].double()}).modules[PATH].terms
    torch.testing.assert_close((term.B @ term.A).double(), delta(tensors(), 4), rtol=1e-5, atol=1e-5)
