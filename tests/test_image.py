"""An image holds the folded tensors in the serving dtype, costs what they cost, and refuses what does not fit."""

from dataclasses import fields, is_dataclass, replace

import pytest
import torch
from fakes import EMBEDDING, LM_HEAD, STRUCTURES, FakeModel, every_combination, random_slots
from torch.nn.functional import pad

from scute_sgl import layout
from scute_sgl.errors import AdapterError
from scute_sgl.fold import fold, fold_adapter
from scute_sgl.image import pack, unpack
from scute_sgl.slots import Adapter, BlockAffine, Folded, Hadamard, Kronecker, Mix, SharedTerm, Slots, Sparse, Target

MODEL = FakeModel(layers=2)
TARGETS = MODEL.targets()
Q_PROJ = "model.layers.0.self_attn.q_proj"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def folded_module(path: str, *names: str):
    t = TARGETS[path]
    return {t.module: (t, fold(random_slots(t, *names), t))}


def wide(t: Target, inputs: int, outputs: int) -> Target:
    return replace(
        t, in_features=inputs, out_features=outputs, inputs=(0, inputs), outputs=(0, outputs), bias=lambda: None
    )


def padded(tensor, dim):
    extra = -tensor.shape[dim] % 8
    return pad(tensor, (0, extra) if dim == tensor.dim() - 1 else (0, 0, 0, extra))


def as_stored(folded: Folded, dtype) -> Folded:
    """What must come back: rounded once to the serving dtype, ranks padded with zeros."""
    stored = {f.name: getattr(folded, f.name) for f in fields(Folded) if f.name not in ("shared", "structure")}
    stored = {name: None if value is None else value.to(dtype).float() for name, value in stored.items()}
    if folded.A is not None:
        stored["A"], stored["B"] = padded(stored["A"], 0), padded(stored["B"], 1)
    shared = folded.shared
    if shared is not None:
        d, e = (v.to(dtype).float() for v in (shared.d, shared.e))
        A = padded(padded(shared.A.to(dtype).float(), 0), 1)
        shared = SharedTerm(A, padded(shared.B.to(dtype).float(), 1), padded(d, 0), e)
    structure = folded.structure
    if structure is not None:
        of = {f.name: getattr(structure, f.name) for f in fields(structure)}
        numbers = {n: v.to(dtype).float() for n, v in of.items() if isinstance(v, torch.Tensor) and v.is_floating_point()}
        structure = replace(structure, **numbers)
    if isinstance(structure, Hadamard):
        structure = Hadamard(padded(structure.A, 0), padded(structure.B, 1))
    return Folded(shared=shared, structure=structure, **stored)


def same(got, want) -> bool:
    if want is None or got is None:
        return got is want
    if isinstance(want, torch.Tensor):
        return torch.equal(got, want)
    if not is_dataclass(want):
        return got == want
    return all(same(getattr(got, f.name), getattr(want, f.name)) for f in fields(want))


def both_kinds(names: tuple[str, ...]) -> bool:
    """Terms of its own and one with shared matrices: no plan lists a row for both."""
    return "shared" in names and not {"terms", "two_terms"}.isdisjoint(names)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_combination_comes_back(dtype):
    for names in every_combination() + [(name, "terms", "base_bias") for name in STRUCTURES]:
        if both_kinds(names):
            continue
        folded = folded_module(Q_PROJ, *names)
        image = pack(folded, dtype)
        (module,) = folded
        assert same(unpack(image, {module: TARGETS[Q_PROJ]})[module], as_stored(folded[module][1], dtype)), names


@pytest.mark.parametrize("path", [EMBEDDING, LM_HEAD])
def test_embedding_and_head_come_back(path):
    folded = folded_module(path, "two_terms", "magnitude")
    (module,) = folded
    image = pack(folded, torch.float16)
    assert same(unpack(image, {module: TARGETS[path]})[module], as_stored(folded[module][1], torch.float16))


def test_entries_name_aligned_tensors_inside_the_image():
    adapter = {path: random_slots(TARGETS[path], "terms", "scale", "bias") for path in TARGETS if "gate" not in path}
    adapter[Q_PROJ] = random_slots(TARGETS[Q_PROJ], "terms", "sparse")
    folded = fold_adapter(Adapter("LORA", adapter), TARGETS)
    image = pack(folded, torch.bfloat16)
    offsets = torch.cat([image.entries[:, : layout.META], image.entries[:, layout.META + 1 :]], dim=1)
    present = offsets[offsets >= 0]
    assert image.entries.shape == (max(folded) + 1, layout.FIELDS) and image.entries.dtype == torch.int64
    assert (present % layout.ALIGN == 0).all() and present.unique().numel() == present.numel()
    assert present.max() < image.nbytes and image.nbytes % layout.BLOCK == 0
    gate = image.entries[TARGETS["model.layers.0.mlp.gate_proj"].module]
    assert gate[: layout.META].eq(-1).all() and gate[layout.META] == 0


def test_live_bits_rank_and_meta():
    delta, shared, rotated, structured = layout.DELTA, layout.SHARED, layout.ROTATED, layout.STRUCTURED
    cases = {
        ("terms",): (delta, 8, layout.pack_meta(8)),
        ("two_terms",): (delta, 16, layout.pack_meta(16)),
        ("bias",): (delta, 0, 0),
        ("gain",): (delta, 0, 0),
        ("shared",): (shared, 8, 0),
        ("input_scale",): (rotated, 0, layout.pack_meta(0, 1)),
        ("rotation",): (rotated, 0, layout.pack_meta(0, 8)),
        ("one_block", "terms"): (delta | rotated, 8, layout.pack_meta(8, 8, True)),
        ("one_block", "gain", "shared"): (delta | shared | rotated, 8, layout.pack_meta(0, 8, True)),
        (): (0, 0, 0),
        ("sparse",): (structured, 0, 0),
        ("mix", "base_bias"): (delta | structured, 0, 0),
        ("hadamard", "terms"): (delta | structured, 8, layout.pack_meta(8)),
        ("kronecker", "terms", "rotation"): (delta | rotated | structured, 8, layout.pack_meta(8, 8)),
    }
    for names, (live, rank, meta) in cases.items():
        folded = folded_module(Q_PROJ, *names)
        image = pack(folded, torch.float16)
        assert (image.live, image.rank_max, image.entries[max(folded), layout.META]) == (live, rank, meta), names


@pytest.mark.parametrize("rank", [8, 9, 16])
def test_an_image_costs_at_most_three_percent_more_than_its_tensors(rank):
    folded, own = {}, 0
    for module, (t, f) in enumerate((TARGETS[Q_PROJ], Folded()) for _ in range(64)):
        t = replace(wide(t, 64, 72), module=module)
        tensors = dict(A=torch.ones(rank, 64), B=torch.ones(72, rank), scale=torch.ones(72), bias=torch.ones(72))
        folded[module] = t, Folded(**tensors)
        own += 2 * (layout.round_up(rank, 8) * (64 + 72) + 2 * 72)
    image = pack(folded, torch.float16)
    assert own > 64 << 10 and own <= image.nbytes <= 1.03 * own


@pytest.mark.parametrize("name", ["A", "B", "scale", "bias", "rotation"])
@pytest.mark.parametrize("value", [7e4, float("nan"), float("inf")])
def test_what_is_not_finite_in_the_serving_dtype_is_refused_by_name(name, value):
    t = TARGETS[Q_PROJ]
    good = fold(random_slots(t, "terms", "scale", "bias", "rotation"), t)
    bad = getattr(good, name).clone()
    bad.view(-1)[5] = value
    folded = {t.module: (t, replace(good, **{name: bad}))}
    with pytest.raises(AdapterError, match=f"bad_config.*q_proj {name}: .*not finite in float16"):
        pack(folded, torch.float16)
    if value == 7e4:
        pack(folded, torch.bfloat16)


def test_sizes_that_the_layout_cannot_hold_are_refused():
    t = wide(TARGETS[Q_PROJ], 20, 8)
    for folded, hint in (
        (Folded(A=torch.zeros(8, 20), B=torch.zeros(8, 8)), "20 inputs on this rank"),
        (Folded(structure=Hadamard(torch.zeros(8, 20), torch.zeros(8, 8))), "20 inputs on this rank"),
        (Folded(A=torch.zeros(65536, 8), B=torch.zeros(8, 65536)), "rank 65536 exceeds"),
    ):
        with pytest.raises(AdapterError, match=f"bad_shape.*{hint}"):
            pack({0: (t, folded)}, torch.float16)


def test_a_structure_costs_its_own_size_and_its_header():
    t = wide(TARGETS[Q_PROJ], 4096, 4096)
    places = torch.arange(40_000)
    for s, own in (
        (Kronecker(torch.ones(64, 64), torch.ones(64, 8), torch.ones(8, 64)), 2 * (64 * 64 + 2 * 8 * 64)),
        (Sparse(places // 16, places % 4096, torch.ones(len(places)), (4096, 4096)), 4 * len(places) + 4 * 4097),
        (Mix(torch.ones(4096), torch.ones(4096), 64), 2 * 2 * 4096),
        (Hadamard(torch.ones(30, 4096), torch.ones(4096, 30)), 2 * 32 * 2 * 4096),
        (BlockAffine(torch.ones(64, 64, 64)), 2 * 64 * 4096),
        (Mix(torch.ones(2048), torch.ones(2048), 64, one_each=True), 2 * 4096),
    ):
        image = pack({0: (t, Folded(structure=s))}, torch.float16)
        assert own + 32 <= image.nbytes <= own + 32 + layout.ALIGN + layout.BLOCK


def test_blocks_without_room_for_their_inputs_are_refused():
    t = wide(TARGETS[Q_PROJ], 1032, 1032)
    with pytest.raises(AdapterError, match="too_large.*q_proj M: found blocks of 1032 inputs, want up to 1024"):
        pack({0: (t, Folded(structure=BlockAffine(torch.ones(1, 1032, 1032))))}, torch.float16)


def test_a_kronecker_product_without_room_for_its_sums_is_refused():
    for s in (
        Kronecker(torch.ones(1, 1024), torch.ones(8, 2)),
        Kronecker(torch.ones(1, 512), torch.ones(64, 9), torch.ones(9, 4)),
    ):
        t = wide(TARGETS[Q_PROJ], s.w1.shape[1] * s.inner[1], s.inner[0])
        with pytest.raises(AdapterError, match="too_large.*q_proj w1: found w1 of .*512 columns.*4096 columns times"):
            pack({0: (t, Folded(structure=s))}, torch.float16)


@pytest.mark.parametrize("name, key", [
    ("sparse", "values"), ("mix", "f2"), ("split", "w2"), ("hadamard", "A"), ("hadamard", "B"), ("block_affine", "M"),
])  # fmt: skip
def test_a_structure_that_is_not_finite_in_the_serving_dtype_is_refused_by_name(name, key):
    t = TARGETS[Q_PROJ]
    s = fold(random_slots(t, name), t).structure
    s = replace(s, **{key: getattr(s, key) * 1e7})
    with pytest.raises(AdapterError, match=f"bad_config.*q_proj {key}: .*not finite in float16"):
        pack({t.module: (t, Folded(structure=s))}, torch.float16)


@pytest.mark.parametrize("vocabulary", [129, 130_001])
def test_a_vocabulary_of_any_size_fits(vocabulary):
    t = replace(TARGETS[EMBEDDING], in_features=vocabulary, inputs=(0, vocabulary))
    head = wide(TARGETS[LM_HEAD], 64, vocabulary)
    folded = {
        t.module: (t, Folded(A=torch.ones(4, vocabulary), B=torch.ones(64, 4))),
        head.module: (head, Folded(A=torch.ones(4, 64), B=torch.ones(vocabulary, 4))),
    }
    image = pack(folded, torch.float16)
    back = unpack(image, {t.module: t, head.module: head})
    assert all(same(back[module], as_stored(f, torch.float16)) for module, (_, f) in folded.items())


def two_modules(first: SharedTerm, second: SharedTerm):
    paths = (Q_PROJ, "model.layers.1.self_attn.q_proj")
    slots = [Slots(shared=shared) for shared in (first, second)]
    return fold_adapter(Adapter("VERA", dict(zip(paths, slots))), TARGETS)


def test_shared_matrices_are_kept_once_by_content():
    one, other = (random_slots(TARGETS[Q_PROJ], "shared", seed=seed).shared for seed in (1, 2))
    copy = SharedTerm(one.A.clone(), one.B.clone(), other.d, other.e)
    image = pack(two_modules(one, copy), torch.float16)
    again = pack(two_modules(copy, one), torch.float16)
    assert image.shared.key == again.shared.key and len(image.shared.key) == 64
    assert image.nbytes < 1024 and image.shared.nbytes == layout.round_up(2 * 8 * (80 + 72), layout.BLOCK)
    assert image.shared.key != pack(two_modules(other, other), torch.float16).shared.key
    assert image.shared.key != pack(two_modules(one, copy), torch.bfloat16).shared.key
    with pytest.raises(AdapterError, match="bad_config.*layers.1.*other shared matrices than model.layers.0"):
        pack(two_modules(one, other), torch.float16)


def test_terms_beside_shared_matrices_are_refused():
    combinations = [names for names in every_combination() if both_kinds(names)]
    assert combinations
    adapters = [folded_module(Q_PROJ, *names) for names in combinations]
    for one, other in (("shared", "terms"), ("terms", "shared")):  # each in a module of its own
        adapters.append(folded_module(Q_PROJ, one) | folded_module("model.layers.1.self_attn.q_proj", other))
    for folded in adapters:
        with pytest.raises(AdapterError, match="unsupported_method.*terms of its own beside .* shared matrices"):
            pack(folded, torch.float16)


def test_equal_bytes_of_another_shape_are_another_set():
    t = TARGETS[Q_PROJ]
    keys = set()
    for inputs, outputs in ((64, 72), (72, 64)):
        shared = SharedTerm(torch.zeros(8, inputs), torch.zeros(outputs, 8), torch.ones(8), torch.ones(64))
        keys.add(pack({0: (t, Folded(shared=shared))}, torch.float16).shared.key)
    assert len(keys) == 2


def test_an_adapter_without_effect_is_an_empty_image():
    image = pack({}, torch.float16)
    assert image.nbytes == 0 and image.live == 0 and image.entries.shape == (0, layout.FIELDS)
