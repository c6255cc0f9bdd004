"""What 16 bits leave of a fold: small effects survive its rounding, and what PEFT's own rounding loses is not applied."""

from dataclasses import replace

import pytest
import torch
from fakes import FakeModel, random_slots, row_norms

from scute_sgl.fold import fold, fold_adapter, needs_base_weight
from scute_sgl.linalg import without_singular
from scute_sgl.methods import hra
from scute_sgl.slots import Adapter, FromWeight, Slots, Term

MODEL = FakeModel()
Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_trained_vectors_survive_sixteen_bits(dtype):
    """s - 1 of 0.2% rms: as s most would round to 1, as s - 1 they keep the dtype's own precision."""
    t = MODEL.targets()[Q_PROJ]
    slots = random_slots(t, "terms", "magnitude", "gain", near=True)
    norms = row_norms(slots, t)
    want = slots.magnitude.double() / norms * slots.gain.double() - 1
    got = fold(slots, t).scale.to(dtype).double()
    normal = want.abs() > torch.finfo(torch.float16).tiny
    assert 1e-3 < want.square().mean().sqrt() < 4e-3
    assert ((got - want).abs() / want.abs())[normal].max() <= 2**-8
    as_s = ((1 + want).to(dtype).double() - 1 - want).norm() / want.norm()
    assert (got - want).norm() / want.norm() <= 2**-8 and as_s > 2**-4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_near_rotations_survive_sixteen_bits(dtype):
    t = MODEL.targets()[Q_PROJ]
    for name in ("input_scale", "rotation", "one_block"):
        slots = random_slots(t, name, near=True)
        want = slots.input_scale.double() - 1 if name == "input_scale" else slots.rotation.double() - torch.eye(8)
        got = fold(slots, t).rotation.to(dtype).double()
        assert (got - want).norm() / want.norm() <= 2**-8


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_term_near_what_it_replaces_survives_sixteen_bits(dtype):
    """A trained PiSSA adapter is its initial one and a hundredth more: apart, both would round before they cancel."""
    t = MODEL.targets()[Q_PROJ]
    initial = without_singular(t.weight(), slice(-4, None))
    random = torch.Generator().manual_seed(1)
    A = -initial.A + 0.01 * torch.randn(4, 64, generator=random)
    B = initial.B + 0.01 * torch.randn(64, 4, generator=random)
    source = FromWeight(lambda W, b0: ((without_singular(W, slice(-4, None)),), None), cancels=True)
    want = B @ A + initial.B @ initial.A

    def error(source):
        slots = Slots(terms=(Term(A, B),), from_weight=source)
        folded = fold_adapter(Adapter("PISSA", {Q_PROJ: slots}), MODEL.targets())[t.module][1]
        torch.testing.assert_close(folded.B.double() @ folded.A.double(), want, rtol=0, atol=1e-7)
        return ((folded.B.to(dtype).double() @ folded.A.to(dtype).double() - want).norm() / want.norm()).item()

    assert error(source) < torch.finfo(dtype).eps
    assert error(replace(source, cancels=False)) > 4 * error(source)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_reflections_that_nearly_undo_each_other_survive_sixteen_bits(dtype):
    """HRA starts from pairs of equal columns."""
    t, random = MODEL.targets()[Q_PROJ], torch.Generator().manual_seed(1)
    u = torch.randn(64, 3, generator=random)
    U = torch.cat([u, u + 0.003 * torch.randn(64, 3, generator=random)], dim=1)[:, [0, 3, 1, 4, 2, 5]]
    config = {"peft_type": "HRA", "r": 6, "target_modules": ["q_proj"]}
    folded = fold_adapter(hra.read(config, {f"base_model.model.{Q_PROJ}.hra_u": U}, None), MODEL.targets())[t.module][1]
    H = torch.eye(64).double()
    for k in range(6):
        v = U[:, k].double() / U[:, k].double().norm()
        H = H - 2 * H @ torch.outer(v, v)
    want = t.weight().double() @ (H - torch.eye(64))
    for given, tolerance in ((torch.float32, 1e-6), (dtype, torch.finfo(dtype).eps)):
        got = folded.B.to(given).double() @ folded.A.to(given).double()
        assert (got - want).norm() / want.norm() < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_the_base_s_dtype_loses_of_a_sparse_matrix_is_not_applied(dtype):
    """As PEFT adds it: in bf16 a small value beside a large weight leaves nothing."""
    model = FakeModel(dtype=dtype)
    t = model.targets()[Q_PROJ]
    S = random_slots(t, "rounded").structure
    S = replace(S, values=S.values * 1e-2)
    assert needs_base_weight(Slots(structure=S)) and not needs_base_weight(Slots(structure=replace(S, rounded=False)))
    folded = fold(Slots(structure=S), t).structure
    changed = t.weight().clone()
    changed[S.rows, S.columns] = (changed[S.rows, S.columns].float() + S.values).to(dtype)
    assert torch.equal(t.weight()[S.rows, S.columns].float() + folded.values, changed[S.rows, S.columns].float())
    assert not folded.rounded and (folded.values == 0).any() == (dtype != torch.float32)
