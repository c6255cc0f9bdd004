"""Every method's whole result from the parts of 2, 4 and 8 ranks; what cannot be cut is refused."""

from dataclasses import replace

import pytest
import torch
from fakes import STRUCTURES, EMBEDDING, FakeModel, apply_folded, apply_slots, every_combination, random_slots

from scute_sgl.errors import AdapterError
from scute_sgl.fold import fold, fold_adapter
from scute_sgl.shard import shard
from scute_sgl.slots import Adapter, BlockAffine, Folded, Hadamard, Kronecker, Mix, Slots, Sparse, Target, Term

MODEL = FakeModel()
WHOLE = MODEL.targets()
O_PROJ, Q_PROJ = "model.layers.0.self_attn.o_proj", "model.layers.0.self_attn.q_proj"


def from_shards(slots: Slots, path: str, tp: int, x: torch.Tensor) -> torch.Tensor:
    """Row-parallel partials summed, columns concatenated by their ranges; norms reduced as over real ranks."""
    targets = [MODEL.targets(rank, tp)[path] for rank in range(tp)]
    parts = [shard(slots, t) for t in targets]
    squares = []
    for rank, (part, t) in enumerate(zip(parts, targets)):
        fold(part, t, sum_over_tp=lambda own: squares.append(own) or own, adds_bias=rank == 0)
    total = sum(squares) if squares else None
    result = torch.zeros(len(x), WHOLE[path].out_features, dtype=torch.float64)
    for rank, (part, t) in enumerate(zip(parts, targets)):
        folded = fold(part, t, sum_over_tp=lambda _: total, adds_bias=rank == 0)
        y = apply_folded(folded, t, x[:, slice(*t.inputs)])
        if t.inputs != (0, t.in_features):
            result += y
        else:
            result[:, slice(*t.outputs)] = y  # replicated heads write the same columns again
    return result


def combinations(kind: str) -> list[tuple[str, ...]]:
    """Each slot alone, and rich mixtures; blocks of 8 inputs divide every shard here."""
    alone = [combo for combo in every_combination() if len(combo) == 1]
    alone += [(name,) for name in STRUCTURES if kind != "row" or name not in ("mix", "pairs")]
    rich = [
        ("two_terms", "magnitude", "bias", "gain", "rotation"),
        ("terms", "shared", "scale", "base_bias", "gain", "one_block"),
        ("terms", "magnitude", "base_bias", "bias", "input_scale"),
        ("terms", "scale", "base_bias", "rotation", "split"),
    ]
    if kind != "embedding":
        return alone + rich
    without = {"shared", "rotation", "one_block", "input_scale", *STRUCTURES}
    return [tuple(n for n in combo if n not in without) for combo in alone + rich if set(combo) - without]


@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("path", WHOLE, ids=lambda path: path.split(".")[-1])
def test_shards_rebuild_the_whole_result(path, tp):
    t = WHOLE[path]
    x = torch.randn(4, t.in_features, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for names in combinations(t.kind):
        if t.kind == "embedding" and {"bias", "base_bias"} & set(names):
            continue  # its output is reduced before the adapter part: every rank adds the whole bias
        slots = random_slots(t, *names)
        torch.testing.assert_close(from_shards(slots, path, tp, x), apply_slots(slots, t, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_shards_of_a_gated_input_scale_rebuild_the_whole_mlp(tp):
    """(IA)3's vector on down_proj moves to up_proj, whose outputs are the same rank's inputs of down_proj."""
    gate, up, down = (WHOLE[f"model.layers.0.mlp.{name}_proj"] for name in ("gate", "up", "down"))
    modules = {up.path: random_slots(up, "gain"), down.path: random_slots(down, "input_scale")}
    x = torch.randn(4, up.in_features, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    act = torch.nn.functional.silu(apply_slots(Slots(), gate, x))
    want = apply_slots(modules[down.path], down, act * apply_slots(modules[up.path], up, x))
    got = torch.zeros_like(want)
    for rank in range(tp):
        targets = MODEL.targets(rank, tp)
        folded = fold_adapter(Adapter("IA3", modules), targets, adds_bias=rank == 0)
        own = {name: targets[f"model.layers.0.mlp.{name}_proj"] for name in ("gate", "up", "down")}
        parts = {name: folded.get(t.module, (t, Folded()))[1] for name, t in own.items()}
        y = {name: apply_folded(parts[name], own[name], x) for name in ("gate", "up")}
        assert parts["down"].rotation is None
        got += apply_folded(parts["down"], own["down"], torch.nn.functional.silu(y["gate"]) * y["up"])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_an_embedding_bias_is_whole_on_every_rank():
    slots = random_slots(WHOLE[EMBEDDING], "bias")
    for rank in range(2):
        t = MODEL.targets(rank, 2)[EMBEDDING]
        torch.testing.assert_close(fold(shard(slots, t), t, adds_bias=rank == 0).bias, slots.bias)


def test_parts_are_views_and_shared_matrices_stay_whole():
    slots = random_slots(WHOLE[Q_PROJ], "terms", "shared", "scale")
    part = shard(slots, MODEL.targets(1, 4)[Q_PROJ])
    assert part.shared.A is slots.shared.A and part.shared.B is slots.shared.B and part.shared.d.shape == (5,)
    assert part.terms[0].B.data_ptr() == slots.terms[0].B[16:].data_ptr()
    assert part.terms[0].A.shape == (3, 64) and part.shared.e.shape == part.scale.shape == (16,)


def test_replicated_kv_heads_hold_the_same_part():
    path = "model.layers.0.self_attn.k_proj"
    slots = random_slots(WHOLE[path], "terms", "scale")
    parts = [shard(slots, MODEL.targets(rank, 8)[path]) for rank in range(8)]
    for rank in range(8):
        assert torch.equal(parts[rank].scale, slots.scale[8 * (rank // 4) : 8 * (rank // 4) + 8])


def test_a_block_that_straddles_shards_is_refused():
    blocks = torch.eye(16).expand(4, 16, 16)
    for slots in (Slots(rotation=blocks), Slots(rotation=blocks[:1])):
        shard(slots, MODEL.targets(0, 4)[O_PROJ])  # 16 inputs a rank
        shard(slots, MODEL.targets(0, 8)[Q_PROJ])  # its input is whole
        with pytest.raises(AdapterError, match=r"bad_shape.*o_proj rotation.*blocks of 16.*shards of 8 inputs"):
            shard(slots, MODEL.targets(0, 8)[O_PROJ])


def test_a_mix_is_not_cut_through_its_sums_or_its_groups():
    slots = random_slots(WHOLE[O_PROJ], "mix")
    shard(slots, MODEL.targets()[O_PROJ])
    with pytest.raises(AdapterError, match="unsupported_method.*o_proj.*a part of each sum.*--tp-size 1"):
        shard(slots, MODEL.targets(0, 2)[O_PROJ])
    wide = replace(random_slots(WHOLE[Q_PROJ], "mix").structure, group=16)
    shard(Slots(structure=wide), MODEL.targets(1, 4)[Q_PROJ])
    with pytest.raises(AdapterError, match="bad_shape.*q_proj.*groups of 16 straddle.*shards of 8 outputs"):
        shard(Slots(structure=wide), MODEL.targets(0, 8)[Q_PROJ])


@pytest.mark.parametrize("path", [Q_PROJ, O_PROJ])
def test_blocks_that_straddle_shards_are_refused(path):
    generator = torch.Generator().manual_seed(0)
    slots = Slots(structure=BlockAffine(torch.randn(4, 16, 16, generator=generator)))
    x = torch.randn(4, 64, dtype=torch.float64, generator=generator)
    torch.testing.assert_close(
        from_shards(slots, path, 4, x), apply_slots(slots, WHOLE[path], x), rtol=1e-5, atol=1e-4
    )
    with pytest.raises(AdapterError, match="bad_shape.*M: blocks of 16 outputs and inputs straddle .*shards"):
        shard(slots, MODEL.targets(1, 8)[path])


@pytest.mark.parametrize("path, w1, w2", [(Q_PROJ, (4, 2), (16, 32)), (O_PROJ, (2, 4), (32, 16))])
@pytest.mark.parametrize("rank", [0, 3])
def test_a_kronecker_product_that_straddles_shards_is_a_term(path, w1, w2, rank):
    generator = torch.Generator().manual_seed(0)
    split = [torch.randn(*shape, generator=generator) for shape in ((w2[0], rank), (rank, w2[1]))]
    second = split if rank else [torch.randn(*w2, generator=generator)]
    slots = Slots(structure=Kronecker(torch.randn(*w1, generator=generator), *second))
    x = torch.randn(4, 64, dtype=torch.float64, generator=generator)
    for tp in (4, 8):
        parts = [shard(slots, MODEL.targets(rank, tp)[path]) for rank in range(tp)]
        assert {part.structure is None and bool(part.terms) for part in parts} == {tp == 8}
        got, want = from_shards(slots, path, tp, x), apply_slots(slots, WHOLE[path], x)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)


def test_a_rank_without_any_value_of_a_sparse_matrix_has_its_structure_too():
    """Its live bits, and what each rank's arena decides by them, are the other ranks'."""
    S = Sparse(torch.tensor([0, 1]), torch.tensor([5, 6]), torch.ones(2), (64, 64))
    part = shard(Slots(structure=S), MODEL.targets(1, 2)[Q_PROJ]).structure
    assert part.shape == (32, 64) and len(part.values) == len(part.rows) == 0


def test_what_a_structure_cannot_be_beside_is_refused():
    for name in ("magnitude", "gain"):
        with pytest.raises(AdapterError, match="unsupported_method.*q_proj.*magnitude or a gain beside a structure"):
            shard(random_slots(WHOLE[Q_PROJ], name, "terms", "sparse"), WHOLE[Q_PROJ])


def test_the_one_block_stays_and_others_are_cut():
    t = MODEL.targets(3, 4)[O_PROJ]
    assert shard(Slots(rotation=torch.zeros(1, 8, 8)), t).rotation.shape == (1, 8, 8)
    blocks = torch.arange(8.0)[:, None, None].expand(8, 8, 8)
    assert shard(Slots(rotation=blocks), t).rotation[:, 0, 0].tolist() == [6, 7]


BAD = {
    "A": dict(terms=(Term(torch.zeros(3, 63), torch.zeros(64, 3)),)),
    "B": dict(terms=(Term(torch.zeros(3, 64), torch.zeros(64, 4)),)),
    "scale": dict(scale=torch.zeros(65)),
    "magnitude": dict(magnitude=torch.zeros(64, 1)),
    "bias": dict(bias=torch.zeros(1)),
    "base_bias": dict(base_bias=torch.zeros(32)),
    "gain": dict(gain=torch.zeros(0)),
    "input_scale": dict(input_scale=torch.zeros(128)),
    "base_weight": dict(base_weight=torch.zeros(64, 65)),
    "rotation": dict(rotation=torch.zeros(3, 16, 16)),
    "rotation ": dict(rotation=torch.zeros(1, 24, 24)),
    "structure": dict(structure=Kronecker(torch.zeros(8, 8), torch.zeros(8, 9))),
    "structure ": dict(structure=Sparse(*torch.zeros(3, 1, dtype=torch.long), (64, 63))),
    "structure  ": dict(structure=Mix(torch.zeros(33), torch.zeros(33), 2, one_each=True)),
    "structure   ": dict(structure=Hadamard(torch.zeros(3, 65), torch.zeros(64, 3))),
    "M": dict(structure=BlockAffine(torch.zeros(16, 4, 5))),
    "B  ": dict(structure=Hadamard(torch.zeros(3, 64), torch.zeros(64, 4))),
}


@pytest.mark.parametrize("key", BAD)
def test_a_tensor_of_another_shape_is_refused_by_name(key):
    with pytest.raises(AdapterError, match=f"bad_shape.*q_proj {key.strip()}: found .*want ") as refusal:
        shard(Slots(**BAD[key]), MODEL.targets(0, 2)[Q_PROJ])
    assert refusal.value.key == key.strip()


def test_shared_matrices_smaller_than_the_layer_are_refused():
    t = WHOLE[Q_PROJ]
    good = random_slots(t, "shared").shared
    for bad in (replace(good, A=good.A[:, :63]), replace(good, B=good.B[:63]), replace(good, B=good.B[:, :4])):
        with pytest.raises(AdapterError, match="bad_shape.*shared A and B"):
            shard(Slots(shared=bad), t)
    with pytest.raises(AdapterError, match="bad_shape.* d: "):
        shard(Slots(shared=replace(good, d=torch.zeros(4))), t)


def test_what_an_embedding_cannot_do_is_refused():
    t: Target = WHOLE[EMBEDDING]
    for names in ("shared", "input_scale", "rotation", "kronecker"):
        with pytest.raises(AdapterError, match="unsupported_method"):
            shard(random_slots(t, names), t)
    with pytest.raises(AdapterError, match="bad_config.*want one"):
        shard(random_slots(WHOLE[Q_PROJ], "input_scale", "rotation"), WHOLE[Q_PROJ])
