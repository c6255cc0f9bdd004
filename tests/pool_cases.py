"""Images of any size, small poisoned pools, and everything that must hold in a pool between two batches."""

import torch

from scute_sgl import layout
from scute_sgl.image import Image, SharedSet
from scute_sgl.pool import Pool

KB = 1024
MODULES = 3


def image_of(nbytes: int, seed: int = 0, shared: SharedSet | None = None, live: int = layout.DELTA) -> Image:
    entries = torch.full((MODULES - 1, layout.FIELDS), -1, dtype=torch.int64)
    entries[:, layout.META] = 0
    entries[1, layout.SCALE], entries[1, layout.META] = 16, layout.pack_meta(8)
    return Image(some_bytes(nbytes, seed), entries, torch.float16, live, rank_max=8 + 8 * (seed % 3), shared=shared)


def set_of(nbytes: int, seed: int) -> SharedSet:
    return SharedSet(f"key {seed} {nbytes}", some_bytes(nbytes, seed), b=16, rank8=8, inputs=8, outputs=8)


def some_bytes(nbytes: int, seed: int) -> torch.Tensor:
    assert nbytes % layout.BLOCK == 0
    return torch.randint(1, 100, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def pool_of(nbytes: int, slots: int = 8) -> Pool:
    return Pool(nbytes, slots, MODULES, "cpu", torch.float16, poison=True)


def check(pool: Pool) -> None:
    """Everything that must hold between two batches."""
    blocks = [*pool._resident.values(), *pool._resident_sets()]
    assert {s.name for s in pool._resident_sets()} == {t.shared.name for t in pool._resident.values() if t.shared}
    rest = pool.arena.clone()
    end = 0
    for block in sorted(blocks, key=lambda block: block.offset):
        data = block.image.data if hasattr(block, "image") else block.data.data
        assert block.offset >= end and block.offset % layout.BLOCK == 0
        end = block.offset + block.size
        assert torch.equal(pool.arena[block.offset : block.offset + len(data)], data)
        rest[block.offset : block.offset + len(data)] = 255  # bytes of NaN: only free memory is left to look at
    assert end <= pool.room.nbytes and rest.view(torch.float16).isnan().all()
    assert sum(block.size for block in blocks) == pool.stats()["used"]
    for slot in range(pool.room.slots):
        tenant = pool._resident.get(slot)
        if tenant is None:
            assert pool.slots[slot].tolist() == [0, -1, 0] and pool.live[slot] == pool.ranks[slot] == 0
            assert pool.table[slot, :, : layout.META].eq(-1).all() and pool.table[slot, :, layout.META].eq(0).all()
            continue
        shared = tenant.shared.row if tenant.shared else -1
        assert pool.slots[slot].tolist() == [tenant.image.live, shared, tenant.image.rank_max]
        assert (pool.live[slot], pool.ranks[slot]) == (tenant.image.live, tenant.image.rank_max)
        if tenant.shared:
            at = tenant.shared.offset
            assert pool.sets[shared].tolist() == [at, at + 16, 8, 8, 8]
        assert pool.table[slot, 1, layout.SCALE] == tenant.offset + 16 and pool.table[slot, 1, layout.META] == 8
        assert pool.table[slot, 0, : layout.META].eq(-1).all() and pool.table[slot, 2, : layout.META].eq(-1).all()


def state(pool: Pool):
    return pool.table.tolist(), pool.slots.tolist(), pool.arena.tolist(), pool.uid_to_slot, pool.stats()
