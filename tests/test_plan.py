"""Plans at fixed addresses: one buffer for every bucket, -1 past the batch, host facts that match the device's."""

import pytest
import torch
from fakes import FakeModel, apply_slots, random_slots

from scute_sgl import layout, ops, reference
from scute_sgl.fold import fold_adapter
from scute_sgl.image import Image, pack
from scute_sgl.plan import BatchPlan
from scute_sgl.pool import Pool
from scute_sgl.slots import Adapter, Slots

KINDS = {"a": layout.DELTA, "b": layout.SHARED, "c": layout.DELTA | layout.ROTATED}
RANKS = {"a": 8, "b": 16, "c": 64}


def pool_with_tenants() -> Pool:
    pool = Pool(4096, 4, 1, "cpu", torch.float16)
    for uid, live in KINDS.items():
        entries = torch.full((1, layout.FIELDS), -1, dtype=torch.int64)
        pool.register(uid, Image(torch.zeros(256, dtype=torch.uint8), entries, torch.float16, live, RANKS[uid]))
    pool.ensure(KINDS)
    pool.slots[pool.slot_of("b"), layout.SHARED_SET] = 0
    return pool


def expected(pool: Pool, slots: list[int], tile_rows: int, before: torch.Tensor) -> torch.Tensor:
    """``before``: a plan whose words stay where nothing is written."""
    return reference.plan(torch.tensor(slots, dtype=torch.int32), pool.slots, tile_rows, before)


@pytest.mark.parametrize("convert", [list, lambda rows: torch.tensor(rows, dtype=torch.int64)])
def test_an_eager_batch_is_planned_as_it_is(convert):
    pool = pool_with_tenants()
    plan = BatchPlan(16, pool)
    rows = [0, 2, 2, -1, 1, 0, 2]
    plan.build(convert(rows), tile_rows=2)
    assert plan.row_slot.tolist() == rows
    assert torch.equal(plan.words, expected(pool, rows, 2, torch.zeros_like(plan.words)))
    assert plan.live == layout.DELTA | layout.SHARED | layout.ROTATED == plan.words[2]
    assert plan.rank_max == 64


@pytest.mark.parametrize("bucket", [5, 8, 16])
def test_a_padded_pass_finds_nobody_in_the_padding(bucket):
    pool = pool_with_tenants()
    plan = BatchPlan(16, pool)
    plan.build([2] * 16, tile_rows=8)  # an earlier, larger batch leaves nothing behind
    words, slots = plan.words.data_ptr(), plan.row_slot.data_ptr()
    plan.write([0, 1, 0])
    assert (plan.live, plan.rank_max) == (layout.DELTA | layout.SHARED, 16)
    plan.run(bucket, tile_rows=8)
    assert plan.row_slot.tolist() == [0, 1, 0] + [-1] * (bucket - 3)
    assert plan.words.numel() == layout.plan_size(bucket)
    header, tiles = plan.words[:6].tolist(), plan.words[layout.PLAN_HEADER :][:4].tolist()
    workers = [1 + (layout.WORKERS - 2) * weight // 40 for weight in (16, 24)]  # a rank of 8 and one of 16
    assert header == [1, 1, layout.DELTA | layout.SHARED, sum(workers), 8, 16] and tiles == [0, 0, 2, 0]
    assert torch.equal(plan.words, expected(pool, [0, 1, 0] + [-1] * (bucket - 3), 8, plan.words))
    assert (plan.words.data_ptr(), plan.row_slot.data_ptr()) == (words, slots)


def test_the_base_alone_has_nothing_live():
    plan = BatchPlan(8, pool_with_tenants())
    for rows in ([-1, -1], []):
        plan.build(rows, tile_rows=8)
        assert (plan.live, plan.rank_max) == (0, 0) and plan.row_slot.tolist() == rows
    plan.build([-1] * 8, tile_rows=8)
    assert plan.words[:6].tolist() == [0] * 6


def test_more_rows_than_the_capacity_are_refused():
    plan = BatchPlan(8, pool_with_tenants())
    for attempt in (lambda: plan.write([0] * 9), lambda: plan.run(9, 8)):
        with pytest.raises(ValueError, match="the batch has 9 rows, the plan holds 8"):
            attempt()


def test_a_mixed_batch_through_arena_plan_and_ops_is_the_definition():
    """Slots -> fold -> image -> pool -> plan -> ops: what every layer does, rows of three tenants and the base."""
    model = FakeModel()
    t = model.targets()["model.layers.0.self_attn.q_proj"]
    methods = {
        "dora": random_slots(t, "two_terms", "magnitude", "bias"),
        "oft": random_slots(t, "rotation", "scale"),
        "vera": random_slots(t, "shared", "gain"),
        "lokr": random_slots(t, "split"),
        "road": random_slots(t, "mix"),
        "glora": random_slots(t, "hadamard", "terms", "bias"),
        "supra": random_slots(t, "rounded", "terms"),
    }
    pool = Pool(160 << 10, 8, t.module + 1, "cpu", torch.float32, poison=True)
    for uid, slots in methods.items():
        pool.register(uid, pack(fold_adapter(Adapter(uid, {t.path: slots}), model.targets()), torch.float32))
    pool.ensure(methods)
    names = ["oft", None, "dora", "vera", "lokr", "dora", None, "vera", "supra", "oft", "road", "lokr", "road", "glora"]
    plan = BatchPlan(32, pool)
    plan.write([pool.slot_of(name) for name in names])
    plan.run(16, tile_rows=8)  # two rows of padding

    x = torch.randn(16, t.in_features, generator=torch.Generator().manual_seed(3))
    rotated, v, shared_v = torch.empty(1, *x.shape), *torch.full((2, 1, 16, plan.rank_max), torch.nan)
    tables, slot, sets = (pool.arena, pool.table), plan.row_slot, pool.sets
    ops.rotate(x, slot, *tables, t.module, 1, rotated)
    y = rotated[0] @ t.weight().T + t.bias()
    ops.shrink(x, *tables, plan.words, 8, t.module, 1, v)
    ops.project(x, slot, *tables, sets, plan.words, 8, t.module, 1, 0, shared_v)
    ops.expand(v, shared_v, slot, *tables, sets, plan.words, 8, t.module, [0, t.out_features], [0], y)
    ops.structured(x, slot, *tables, t.module, [0, t.out_features], y)
    ops.reweigh(x, t.weight(), slot, *tables, t.module, [0, t.out_features], y)
    for row, name in enumerate(names + [None, None]):
        want = apply_slots(methods.get(name, Slots()), t, x[row : row + 1].double())
        torch.testing.assert_close(y[row : row + 1].double(), want, rtol=1e-5, atol=1e-5)
