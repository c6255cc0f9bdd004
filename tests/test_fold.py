"""The folded tensors do what the slots say, to float32 rounding, and one rank's refusal is everybody's."""

import math
from dataclasses import fields, replace

import pytest
import torch
from fakes import (
    EMBEDDING, STRUCTURES, FakeModel, apply_folded, apply_slots, every_combination, random_slots, row_norms,
)  # fmt: skip

from scute_sgl import fold as fold_module
from scute_sgl.errors import AdapterError
from scute_sgl.fold import agree, fold, fold_adapter, fold_gates, needs_base_weight
from scute_sgl.slots import Adapter, Folded, SharedTerm, Slots, Term

MODEL, PLAIN = FakeModel(), FakeModel(bias=False)
UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"
Q_PROJ, O_PROJ = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.o_proj"


def inputs(t, rows=3):
    return torch.randn(rows, t.in_features, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("model", [MODEL, PLAIN], ids=["bias", "no bias"])
@pytest.mark.parametrize("near", [False, True], ids=["far", "near"])
def test_every_combination_of_slots_is_its_definition(model, near):
    t = model.targets()[Q_PROJ]
    x = inputs(t)
    for names in every_combination():
        if "base_bias" in names and model is PLAIN:
            continue  # refused
        slots = random_slots(t, *names, near=near)
        want = apply_slots(slots, t, x)
        got = apply_folded(fold(slots, t), t, x)
        torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6, msg=lambda text: f"{names}: {text}")


def test_an_embedding_folds_like_a_linear_layer_over_its_vocabulary():
    t = MODEL.targets()[EMBEDDING]
    one_hot = torch.eye(t.in_features, dtype=torch.float64)
    for names in (("terms",), ("two_terms", "magnitude"), ("terms", "magnitude", "gain"), ("magnitude",)):
        slots = random_slots(t, *names)
        got = apply_folded(fold(slots, t), t, one_hot)
        torch.testing.assert_close(got, apply_slots(slots, t, one_hot), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("path", [Q_PROJ, EMBEDDING])
def test_chunks_of_rows_do_not_change_a_norm(path, monkeypatch):
    t = MODEL.targets()[path]
    slots = random_slots(t, "two_terms", "magnitude")
    whole = fold(slots, t).scale
    for scratch in (1, 64, 64 * 5):
        monkeypatch.setattr(fold_module, "SCRATCH", scratch)
        torch.testing.assert_close(fold(slots, t).scale, whole, rtol=0, atol=1e-7)


def test_a_norm_needs_bounded_scratch_and_leaves_the_base_alone(monkeypatch):
    monkeypatch.setattr(fold_module, "SCRATCH", 64 * 4)
    t = MODEL.targets()[Q_PROJ]
    before, sizes, addmm = t.weight().clone(), [], torch.addmm

    def watch(rows, *args):
        sizes.append(rows.numel())
        return addmm(rows, *args)

    monkeypatch.setattr(torch, "addmm", watch)
    fold(random_slots(t, "terms", "magnitude"), t)
    assert max(sizes) <= 64 * 4 and torch.equal(t.weight(), before)


def test_absent_slots_fold_to_nothing_and_present_identities_stay():
    t = MODEL.targets()[Q_PROJ]
    assert fold(Slots(), t) == Folded()
    only_gain = fold(Slots(gain=torch.ones(64)), t)
    assert torch.equal(only_gain.scale, torch.zeros(64)) and only_gain.bias is None  # it scales y, bias and all
    only_scale = fold(Slots(scale=torch.ones(64)), t)
    assert torch.equal(only_scale.bias, torch.zeros(64))  # t has a base bias, which s must leave alone
    assert fold(Slots(scale=torch.ones(64)), PLAIN.targets()[Q_PROJ]).bias is None


def test_results_are_float32_whatever_the_file_holds():
    t = MODEL.targets()[Q_PROJ]
    slots = random_slots(t, "two_terms", "shared", "magnitude", "bias", "gain", "rotation")
    half = replace(
        slots,
        terms=tuple(Term(term.A.half(), term.B.bfloat16()) for term in slots.terms),
        shared=SharedTerm(slots.shared.A, slots.shared.B, slots.shared.d.half(), slots.shared.e.half()),
        gain=slots.gain.half(),
        rotation=slots.rotation.half(),
    )
    folded = fold(half, t)
    for name in {field.name for field in fields(Folded)} - {"structure", "tokens"}:  # not beside a magnitude; of the vocabulary
        value = getattr(folded, name)
        for tensor in (value.d, value.e) if isinstance(value, SharedTerm) else (value,):
            assert tensor.dtype == torch.float32
    assert folded.A.shape == (11, 64) and folded.B.shape == (64, 11)
    assert folded.shared.A is half.shared.A  # packed once, whole: no copy per module


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_structure_is_its_definition_in_float32(name):
    t = MODEL.targets()[Q_PROJ]
    slots = random_slots(t, name, "scale", "terms", "base_bias", "rotation")
    made = {f.name: getattr(slots.structure, f.name) for f in fields(slots.structure)}
    numbers = {n: v.half() for n, v in made.items() if isinstance(v, torch.Tensor) and v.is_floating_point()}
    slots = replace(slots, structure=replace(slots.structure, **numbers))
    folded, x = fold(slots, t), inputs(t)
    assert all(getattr(folded.structure, n).dtype == torch.float32 for n in numbers)
    torch.testing.assert_close(apply_folded(folded, t, x), apply_slots(slots, t, x), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("path", [Q_PROJ, EMBEDDING])
def test_a_base_weight_in_the_file_must_be_the_served_one(path):
    model = FakeModel(dtype=torch.bfloat16)
    t = model.targets()[path]
    assert needs_base_weight(Slots(base_weight=t.weight())) and not needs_base_weight(random_slots(t, "terms"))
    fold(Slots(base_weight=t.weight().float()), t)  # the file may hold it in float32
    changed = t.weight().clone()
    changed[-1, -1] += 1
    with pytest.raises(AdapterError, match="wrong_base.*base_weight"):
        fold(Slots(base_weight=changed), t)


def test_a_bias_for_a_layer_that_has_none_is_refused():
    slots = random_slots(MODEL.targets()[O_PROJ], "base_bias")
    with pytest.raises(AdapterError, match=r"\[wrong_base\].*o_proj base_bias: the base layer has no bias"):
        fold(slots, PLAIN.targets()[O_PROJ])
    assert fold(slots, MODEL.targets(1, 2)[O_PROJ], adds_bias=False).bias.eq(0).all()  # its bias is on rank 0


def test_a_dora_scale_follows_its_magnitude_and_its_base():
    for seed in (0, 1):
        t = FakeModel(seed=seed).targets()[Q_PROJ]
        slots = replace(random_slots(MODEL.targets()[Q_PROJ], "terms"), magnitude=torch.linspace(1, 2, 64))
        want = slots.magnitude / row_norms(slots, t)
        for factor in (1, 3):
            got = fold(replace(slots, magnitude=factor * slots.magnitude), t).scale
            torch.testing.assert_close(got.double(), factor * want - 1, rtol=0, atol=1e-6)


def test_a_gated_input_scale_becomes_the_gain_of_up_proj():
    targets = MODEL.targets()
    up, down, gate = (targets[path] for path in (UP, DOWN, "model.layers.0.mlp.gate_proj"))
    x = inputs(up)
    act = torch.nn.functional.silu(apply_slots(Slots(), gate, x))
    for up_slots in (Slots(), random_slots(up, "terms", "scale", "gain", "bias")):
        modules = {DOWN: random_slots(down, "input_scale", "scale")}
        if up_slots != Slots():
            modules[UP] = up_slots
        moved = fold_gates(modules, targets)
        assert moved[DOWN].input_scale is None and modules[DOWN].input_scale is not None
        want = apply_slots(modules[DOWN], down, act * apply_slots(up_slots, up, x))
        up_y = apply_folded(fold(moved[UP], up), up, x)
        got = apply_folded(fold(moved[DOWN], down), down, act * up_y)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_an_input_scale_stays_where_it_must():
    targets = MODEL.targets()
    beside_terms = {DOWN: random_slots(targets[DOWN], "input_scale", "terms")}  # A reads the unscaled input
    assert fold_gates(beside_terms, targets) == beside_terms
    elsewhere = {O_PROJ: random_slots(targets[O_PROJ], "input_scale")}
    assert fold_gates(elsewhere, targets) == elsewhere
    with pytest.raises(AdapterError, match="bad_shape.*down_proj input_scale"):
        fold_gates({DOWN: Slots(input_scale=torch.ones(3))}, targets)


def test_an_adapter_folds_in_module_order_and_sums_once():
    targets = MODEL.targets(0, 2)
    whole = MODEL.targets()
    names = {O_PROJ: ("terms", "magnitude"), Q_PROJ: ("terms", "magnitude"), EMBEDDING: ("magnitude",)}
    modules = {path: random_slots(whole[path], *picked) for path, picked in names.items()}
    sums = []
    folded = fold_adapter(Adapter("DORA", modules), targets, lambda part: sums.append(part) or 2 * part)
    assert [len(part) for part in sums] == [128]  # o_proj and the embedding split their inputs; q_proj does not
    assert list(folded) == sorted(targets[path].module for path in modules)
    assert all(folded[t.module][0] is t for t in map(targets.get, modules))


def test_an_unknown_module_is_refused():
    with pytest.raises(AdapterError, match="unknown_key.*model.layers.9.mlp"):
        fold_adapter(Adapter("LORA", {"model.layers.9.mlp": Slots()}), MODEL.targets())


def test_agree_passes_results_errors_and_other_ranks_refusals():
    assert agree(lambda: 7, lambda own: own) == 7
    heard = []
    with pytest.raises(ZeroDivisionError):
        agree(lambda: 1 / 0, lambda own: heard.append(own) or own)
    assert str(heard.pop()) == "adapter '' refused [bad_config]: ZeroDivisionError: division by zero"
    theirs = AdapterError("wrong_base", "not mine")
    with pytest.raises(AdapterError) as refusal:
        agree(lambda: 7, lambda own: heard.append(own) or theirs)
    assert refusal.value is theirs and heard == [None]


def test_a_zero_row_gives_no_number():
    """m / 0 is not hidden here; packing refuses it by name."""
    model = FakeModel()
    model.weights[Q_PROJ][3] = 0
    assert math.isinf(fold(Slots(magnitude=torch.ones(64)), model.targets()[Q_PROJ]).scale[3])
