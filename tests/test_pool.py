"""The arena's promises: LRU, pins, shared sets, forgotten tenants, and refusals that change nothing."""

from itertools import permutations

import pytest
import torch
from pool_cases import KB, MODULES, check, image_of, pool_of, set_of, state

from scute_sgl import layout
from scute_sgl.errors import AdapterError
from scute_sgl.pool import Pool


def test_the_arena_is_reserved_and_a_tenant_owns_its_image_and_no_more():
    pool = pool_of(64 * KB + 100)
    assert pool.arena.numel() == 64 * KB and pool.stats()["free"] == 64 * KB
    for i, nbytes in enumerate((256, 4 * KB, 17 * KB)):
        pool.register(f"t{i}", image_of(nbytes, i))
        before = pool.stats()["used"]
        pool.ensure([f"t{i}", None])
        assert pool.stats()["used"] - before == nbytes and pool.slot_of(f"t{i}") == i
        check(pool)
    assert pool.slot_of(None) == -1 and pool.stats()["swap_ins"] == 3


def test_the_least_recently_used_idle_tenant_goes_first():
    pool = pool_of(4 * KB, slots=8)
    for i in range(6):
        pool.register(f"t{i}", image_of(KB, i))
    for i in (0, 1, 2, 3, 0):
        pool.ensure([f"t{i}"])
    pool.ensure(["t4", "t2"])  # t1 is oldest; t2 is in the batch
    assert set(pool.uid_to_slot) == {"t0", "t2", "t3", "t4"} and pool.slot_of("t4") == 1
    pool.ensure(["t5"])
    assert set(pool.uid_to_slot) == {"t0", "t2", "t4", "t5"} and pool.stats()["evictions"] == 2
    check(pool)


def test_no_more_are_evicted_than_stand_in_the_way():
    pool = pool_of(6 * KB)
    for i in range(6):
        pool.register(f"t{i}", image_of(KB, i))
        pool.ensure([f"t{i}"])
    for i in (0, 2, 4):
        pool.ensure([f"t{i}"])  # oldest first: t1, t3, t5, t0, t2, t4
    pool.register("big", image_of(2 * KB, 9))
    pool.ensure(["big"])  # t0 and t1 are the least recent neighbours; t3 and t5 are older, but between others
    assert set(pool.uid_to_slot) == {"t2", "t3", "t4", "t5", "big"}
    check(pool)


def test_a_batch_fits_if_its_bytes_do():
    pool = pool_of(4 * KB)
    for uid, size in {"a": KB, "b": KB, "c": KB, "d": KB, "wide": 2 * KB}.items():
        pool.register(uid, image_of(size))
    pool.ensure(["a"]), pool.ensure(["b"]), pool.ensure(["c"]), pool.ensure(["d"])
    before = state(pool)
    assert not pool.can_hold({"a", "b", "d", "wide"})
    with pytest.raises(AdapterError, match="no_slot.*4 tenants of one batch need 5120 bytes of the arena's 4096"):
        pool.ensure({"a", "b", "d", "wide"})
    assert state(pool) == before
    assert pool.can_hold({"b", "d", "wide"})  # b lies in the middle of the only gap: the batch is packed anew
    pool.ensure({"b", "d", "wide"})
    assert set(pool.uid_to_slot) == {"b", "d", "wide"}
    check(pool)


def test_what_was_admitted_together_survives_passes_of_others():
    """A prefill names only newcomers and may evict the running ones: the next decoding pass names them all."""
    pool = pool_of(8 * KB)
    sizes = {"a": 2 * KB, "b": KB, "c": 2 * KB, "d": KB, "e": 2 * KB}
    for number, (uid, size) in enumerate(sizes.items()):
        pool.register(uid, image_of(size, number))
    assert pool.can_hold(sizes)
    for order in permutations(sizes):
        for uid in order:
            pool.ensure([uid])
        pool.ensure(sizes)
        check(pool)


def test_slots_limit_too_and_are_reused_lowest_first():
    pool = pool_of(64 * KB, slots=3)
    for i in range(5):
        pool.register(f"t{i}", image_of(KB, i))
    pool.ensure(["t0"]), pool.ensure(["t1"]), pool.ensure(["t2"])
    assert not pool.can_hold({"t0", "t1", "t2", "t3"}) and pool.can_hold({"t1", "t2", "t3"})
    pool.forget("t0"), pool.forget("t2")
    pool.ensure(["t3"])
    assert pool.slot_of("t3") == 0
    pool.ensure(["t4"])
    assert pool.slot_of("t4") == 2 and pool.stats()["evictions"] == 0
    check(pool)


def test_pinned_tenants_stay_and_others_still_fit_beside_them():
    pool = pool_of(4 * KB, slots=4)
    for i in range(4):
        pool.register(f"t{i}", image_of(KB, i), pinned=i == 1)
        pool.ensure([f"t{i}"])
    pool.register("wide", image_of(3 * KB, 9))
    assert pool.can_hold({"wide"})  # only if the pin, which sits in the middle, moves while it is idle
    pool.ensure(["wide"])
    assert set(pool.uid_to_slot) == {"wide", "t1"}
    check(pool)
    assert not pool.can_hold({"wide", "t0"}) and pool.can_hold({"t0", "t2"})
    pool.ensure(["t0", "t2"])
    assert set(pool.uid_to_slot) == {"t0", "t1", "t2"}
    check(pool)


def test_what_could_never_run_is_refused_at_register():
    pool = pool_of(4 * KB, slots=2)
    with pytest.raises(AdapterError, match="too_large.*need 4352 bytes.*arena has 4096: raise --scute-arena-mb"):
        pool.register("big", image_of(4 * KB + 256))
    with pytest.raises(AdapterError, match="too_large"):
        pool.register("vera", image_of(3 * KB, shared=set_of(2 * KB, 1)))
    with pytest.raises(AdapterError, match="too_large"):
        pool.register("elsewhere", image_of(KB), block_bytes=5 * KB)  # another rank's part is larger
    pool.register("wide", image_of(3 * KB))
    with pytest.raises(AdapterError, match="too_large.*an adapter loaded before and 1 pinned"):
        pool.register("pin", image_of(2 * KB), pinned=True)
    pool.register("pin", image_of(KB), pinned=True)
    with pytest.raises(AdapterError, match="no_slot"):
        pool.register("pin too", image_of(256), pinned=True)
    with pytest.raises(AdapterError, match="in_use"):
        pool.register("wide", image_of(KB))
    assert pool.can_hold({"wide", "pin"}) and not pool.can_hold({"big"})
    with pytest.raises(ValueError, match="image has dtype"):
        Pool(KB, 1, MODULES, "cpu", torch.bfloat16).register("t", image_of(256))


def test_block_bytes_keep_ranks_with_smaller_parts_in_step():
    ranks = [pool_of(8 * KB), pool_of(8 * KB)]
    for rank, pool in enumerate(ranks):
        pool.register("a", image_of(KB if rank else 2 * KB, 1), block_bytes=2 * KB)
        pool.register("b", image_of(KB, 2))
        pool.ensure(["a"]), pool.ensure(["b"])
        check(pool)
    assert ranks[0]._tenants["b"].offset == ranks[1]._tenants["b"].offset == 2 * KB


def test_shared_sets_are_kept_once_and_go_with_their_last_tenant():
    pool = pool_of(16 * KB)
    common, other = set_of(2 * KB, 1), set_of(KB, 2)
    for i, shared in enumerate((common, common, other)):
        pool.register(f"v{i}", image_of(256, i, shared, live=layout.SHARED))
    pool.ensure(["v0", "v1", "v2"])
    stats = pool.stats()
    assert stats["shared_bytes"] == 3 * KB and stats["used"] == 3 * KB + 3 * 256
    check(pool)
    pool.forget("v0")
    pool.ensure(["v1", "v2"])
    assert pool.stats()["shared_bytes"] == 3 * KB
    pool.forget("v1")
    pool.ensure(["v2"])
    assert pool.stats()["shared_bytes"] == KB and len(pool._sets) == 1
    check(pool)


def test_a_resident_set_is_not_copied_for_a_newcomer():
    pool = pool_of(4 * KB)
    shared = set_of(2 * KB, 1)
    pool.register("v0", image_of(KB, 0, shared))
    pool.register("v1", image_of(2 * KB, 1, shared))
    pool.ensure(["v0"])
    at = pool._sets[shared.key].offset
    pool.ensure(["v1"])  # v0, the set's only resident tenant, has to go
    assert pool.uid_to_slot == {"v1": 0} and pool._sets[shared.key].offset == at
    check(pool)


def test_a_forgotten_tenant_serves_the_batches_that_still_name_it():
    pool = pool_of(8 * KB)
    for uid in "abc":
        pool.register(uid, image_of(KB))
    pool.ensure(["a", "b"])
    pool.forget("a")
    with pytest.raises(AdapterError, match="not_found"):
        pool.forget("a")
    assert pool.slot_of("a") == 0 and pool.can_hold({"a", "b"})
    pool.ensure(["a", "b"])
    pool.ensure(["c"])
    assert set(pool.uid_to_slot) == {"b", "c"} and not pool.can_hold({"a"})
    with pytest.raises(AdapterError, match="not_found"):
        pool.ensure(["a"])
    with pytest.raises(KeyError):
        pool.slot_of("a")
    check(pool)
    pool.register("unused", image_of(KB))
    pool.forget("unused")  # no batch ever named it, so its memory is free at once
    assert "unused" not in pool._tenants and not pool._leaving


def test_a_uid_may_come_back_with_another_image():
    pool = pool_of(8 * KB)
    pool.register("a", image_of(KB, 1))
    pool.ensure(["a"])
    pool.forget("a")
    pool.register("a", image_of(2 * KB, 2))
    pool.ensure([None])
    assert pool.uid_to_slot == {} and not pool._leaving
    pool.ensure(["a"])
    assert pool.stats()["used"] == 2 * KB
    check(pool)


def test_the_base_always_fits():
    pool = pool_of(8 * KB)
    assert pool.can_hold({None}) and pool.can_hold([]) and not pool.can_hold({"unknown"})
