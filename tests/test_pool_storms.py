"""Random traffic: no overlap, no use of freed memory, one answer on every rank, little stranded."""

import random

import pytest
from pool_cases import KB, check, image_of, pool_of, set_of, state

from scute_sgl.errors import AdapterError
from scute_sgl.pool import Pool


def storm(pool: Pool, seed: int, steps: int, largest: int, verify: int) -> None:
    """Random registers, unloads, pins, shared sets and batches, each step held against the promises."""
    rng = random.Random(seed)
    sets = [set_of(2 * KB, i) for i in range(3)]
    known, count = [], 0
    for step in range(steps):
        while len(known) < 60 or rng.random() < 0.3:
            count += 1
            uid = f"t{count:05}"
            size = 256 * rng.randint(1, largest // 256)
            shared = rng.choice(sets) if rng.random() < 0.2 else None
            try:
                pool.register(uid, image_of(size, count, shared), pinned=rng.random() < 0.02)
                known.append(uid)
            except AdapterError as error:
                assert error.code in ("too_large", "no_slot")
        while len(known) > 55 or rng.random() < 0.3:
            pool.forget(known.pop(rng.randrange(len(known))))
        batch = set(rng.sample(known, rng.randint(1, 6)))
        in_place = {uid: place_of(pool, uid) for uid in batch & pool.uid_to_slot.keys()}
        pinned = {t.name for t in pool._resident.values() if t.pinned}
        if pool.can_hold(batch):
            pool.ensure(batch)
            assert batch | pinned <= pool.uid_to_slot.keys()
            if batch == in_place.keys():
                assert all(place_of(pool, uid) == place for uid, place in in_place.items())
        else:
            with pytest.raises(AdapterError, match="no_slot"):
                pool.ensure(batch)
        assert pool.can_hold({rng.choice(known)})  # whatever is registered can run when nothing else does
        if step % verify == 0:
            check(pool)


def place_of(pool: Pool, uid: str) -> tuple[int, int]:
    return pool.slot_of(uid), pool._tenants[uid].offset


@pytest.mark.parametrize("seed", range(4))
def test_storms_in_a_tight_arena_break_nothing(seed):
    storm(pool_of(40 * KB, slots=6), seed, steps=400, largest=16 * KB, verify=1)


def test_two_ranks_that_see_the_same_calls_agree():
    ranks = [pool_of(40 * KB, slots=8) for _ in range(2)]
    for pool in ranks:
        storm(pool, seed=7, steps=500, largest=12 * KB, verify=100)
    assert state(ranks[0]) == state(ranks[1])


@pytest.mark.parametrize("share", [16, 64])
def test_ten_thousand_loads_and_unloads_strand_at_most_a_tenth(share):
    """Free bytes left over whenever a load had to evict; the largest tenant takes 1 / share of the arena."""
    pool, rng = pool_of(256 * KB, slots=1024), random.Random(1)
    images = [image_of(256 * blocks) for blocks in range(1, 256 * KB // share // 256 + 1)]
    known, stranded, count, unloads = [], [], 0, 0
    while pool.stats()["swap_ins"] + unloads < 10_000:
        while len(known) < 4 * share:
            count += 1
            pool.register(f"t{count:05}", rng.choice(images))
            known.append(f"t{count:05}")
        if rng.random() < 0.5:
            pool.forget(known.pop(rng.randrange(len(known))))
            unloads += 1
        evictions = pool.stats()["evictions"]
        pool.ensure(rng.sample(known, 3))
        if pool.stats()["evictions"] > evictions:
            stranded.append(pool.stats()["free"] / pool.room.nbytes)
    check(pool)
    assert len(stranded) > 1_000 and sum(stranded) / len(stranded) <= 0.10
    assert share < 64 or max(stranded) <= 0.10


def test_with_nothing_idle_a_refusal_leaves_less_than_was_asked_for():
    """Every resident is in the batch, as under a full decode batch: only what the newcomer lacks may be free."""
    pool, rng = pool_of(256 * KB, slots=1024), random.Random(3)
    running, stranded = [], []
    for count in range(5_000):
        uid = f"t{count:05}"
        pool.register(uid, image_of(256 * rng.randint(1, 16)))
        if pool.can_hold([*running, uid]):
            running.append(uid)
        else:
            stranded.append(pool.stats()["free"] / pool.room.nbytes)
            pool.forget(uid)
            for _ in range(rng.randint(0, 4)):
                pool.forget(running.pop(rng.randrange(len(running))))
        pool.ensure(running)
    assert len(stranded) > 1_000 and max(stranded) < 16 * 256 / pool.room.nbytes
