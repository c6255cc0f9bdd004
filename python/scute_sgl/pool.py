"""The arena on the device: which tenants are resident, and the tables that tell the ops where.

Every tenant owns one block of its own size; a shared set owns one for all its tenants. arena.py decides who stays
and where newcomers go. Nothing depends on time or on how far the device got: every decision follows from the
calls made and the sizes registered, so that all tensor-parallel ranks decide alike.

All device writes happen in ``ensure``, on the current stream, which must be the one that the forward passes run
on: what they read changes only between them. ``register`` and ``forget`` touch the host alone.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from scute_sgl import layout
from scute_sgl.arena import Move, Room, Set, Tenant, block_size, can_fit, choose, demand
from scute_sgl.errors import AdapterError
from scute_sgl.image import Image


class Pool:
    """Device tables for ops: ``arena`` uint8, ``table`` int64 (slots, modules, FIELDS), ``slots`` int32
    (slots, SLOT_FIELDS), ``sets`` int64 (slots, SET_FIELDS). ``live`` and ``ranks`` mirror on the host what each
    slot's image says (its ``live`` and ``rank_max``; 0 for a free slot).

    Absent offsets are -1 and META is 0 wherever a module has nothing. ``poison`` fills free memory with NaN, so
    that a test sees a read of it.
    """

    def __init__(
        self,
        arena_bytes: int,
        slots: int,
        modules: int,
        device: torch.device | str,
        dtype: torch.dtype,
        poison: bool = False,
    ):
        self.device, self.dtype, self.poison = torch.device(device), dtype, poison
        self.room = Room(arena_bytes // layout.BLOCK * layout.BLOCK, slots)
        self.arena = torch.empty(self.room.nbytes, dtype=torch.uint8, device=device)
        self.table = torch.full((slots, modules, layout.FIELDS), -1, dtype=torch.int64, device=device)
        self.table[:, :, layout.META] = 0
        self.slots = torch.tensor([[0, -1, 0]] * slots, dtype=torch.int32, device=device)
        self.sets = torch.full((slots, layout.SET_FIELDS), -1, dtype=torch.int64, device=device)
        self.live, self.ranks = [0] * slots, [0] * slots
        self._tenants: dict[str, Tenant] = {}
        self._resident: dict[int, Tenant] = {}  # by slot
        self._sets: dict[str, Set] = {}  # by content
        self._leaving: list[Tenant] = []  # forgotten, until no batch names them
        self._step = self._swap_ins = self._evictions = 0
        self._erase(0, self.room.nbytes)

    def register(self, uid: str, image: Image, pinned: bool = False, block_bytes: int = 0) -> None:
        """Make a tenant known; its image moves to the device when a batch first names it.

        ``block_bytes``: the largest ``image.nbytes`` of all ranks, where they differ; equal sizes keep the ranks'
        arenas equal. AdapterError ``in_use`` (uid known already), ``too_large`` (it, or a tenant known before,
        would never fit beside the pinned ones), ``no_slot`` (pins leave no slot).
        """
        known = self._tenants.get(uid)
        if known is not None and not known.forgotten:
            raise AdapterError("in_use", f"{uid} is loaded already", adapter=uid)
        if image.dtype != self.dtype or len(image.entries) > self.table.shape[1]:
            have, want = (image.dtype, len(image.entries)), (self.dtype, self.table.shape[1])
            raise ValueError(f"image has dtype and modules {have}, the pool {want}")
        shared = None
        if image.shared is not None:
            new = Set(image.shared.key, image.shared, block_size(image.shared.nbytes))
            shared = self._sets.get(new.name, new)
        tenant = Tenant(uid, image, block_size(max(image.nbytes, block_bytes)), pinned, shared)
        self._check_limits(tenant)
        if known is not None:
            self._drop(known)
        self._tenants[uid] = tenant
        if shared is not None:
            self._sets[shared.name] = shared

    def forget(self, uid: str) -> None:
        """Unload. Batches may still name the tenant until an ``ensure`` lets it go. AdapterError ``not_found``."""
        tenant = self._tenants.get(uid)
        if tenant is None or tenant.forgotten:
            raise AdapterError("not_found", f"{uid} is not loaded", adapter=uid)
        tenant.forgotten, tenant.pinned = True, False
        if tenant.used:
            self._leaving.append(tenant)
        else:  # no batch ever named it: nothing to wait for
            self._drop(tenant)

    def can_hold(self, uids: Iterable[str | None]) -> bool:
        """Whether ``ensure(uids)`` would succeed now. None is the base and always fits; unknown uids do not.

        It depends on sizes and pins alone, not on where blocks lie: requests admitted together still fit together
        after other passes have come and gone.
        """
        tenants = [self._tenants.get(uid) for uid in set(uids) - {None}]
        if None in tenants:
            return False
        return all(t.slot >= 0 for t in tenants) or can_fit(tenants, self._resident.values(), self.room)

    def ensure(self, uids: Iterable[str | None]) -> list[str]:
        """Make these tenants resident, evicting idle ones as needed, and let forgotten ones go that no batch needs.

        Returns the names of the evicted.
        AdapterError ``not_found`` (unknown uid) and ``no_slot`` (see :meth:`can_hold`); both leave everything as it was.
        """
        names = sorted(set(uids) - {None})
        for uid in names:
            if uid not in self._tenants:
                raise AdapterError("not_found", f"{uid} is not loaded", adapter=uid)
        wanted = [self._tenants[uid] for uid in names]
        stale, evicted = [t for t in self._leaving if t not in wanted], []
        if stale or not all(t.slot >= 0 for t in wanted):
            if not self.can_hold(names):
                need = f"{len(names)} tenants of one batch need {demand(wanted)} bytes"
                raise AdapterError("no_slot", f"{need} of the arena's {self.room.nbytes}, and {self.room.slots} slots")
            residents = [t for t in self._resident.values() if t not in stale]
            evicted = self._apply(choose(wanted, residents, self.room), stale)
        self._step += 1
        for tenant in wanted:
            tenant.used = self._step
        return evicted

    def slot_of(self, uid: str | None) -> int:
        """Slot of a resident tenant, -1 for the base. KeyError otherwise: never the base by mistake."""
        if uid is None:
            return -1
        tenant = self._tenants.get(uid)
        if tenant is None or tenant.slot < 0:
            raise KeyError(f"{uid} is not resident")
        return tenant.slot

    @property
    def swap_ins(self) -> int:
        """Copies of a tenant to the device since the start."""
        return self._swap_ins

    @property
    def uid_to_slot(self) -> dict[str, int]:
        return {tenant.name: slot for slot, tenant in self._resident.items()}

    def stats(self) -> dict[str, int]:
        """Bytes of the arena, its tenants and sets; swap-ins and evictions since the start."""
        used = demand(self._resident.values())
        return {
            "resident": len(self._resident),
            "arena_bytes": self.room.nbytes,
            "used": used,
            "free": self.room.nbytes - used,
            "shared_bytes": sum(s.size for s in self._resident_sets()),
            "swap_ins": self._swap_ins,
            "evictions": self._evictions,
        }

    def decisions(self) -> bytes:
        """Everything decided so far that ranks must have decided alike, and the slot table that the ops read."""
        known = self._tenants.values()
        tenants = sorted((t.name, t.slot, t.offset, t.size, t.used, t.pinned, t.forgotten) for t in known)
        sets = sorted((s.name, s.row, s.offset, s.size) for s in self._sets.values())
        host = (self._step, self._swap_ins, self._evictions, tenants, sets, self.live, self.ranks)
        return repr(host).encode() + self.slots.cpu().numpy().tobytes()

    def _check_limits(self, tenant: Tenant) -> None:
        """Refuse what would leave a request waiting for ever: too large a tenant, too many or too large pins."""
        known = [t for t in self._tenants.values() if not t.forgotten] + [tenant]
        pinned = [t for t in known if t.pinned]
        if tenant.pinned and len(pinned) >= self.room.slots:
            raise AdapterError("no_slot", f"pins would take all {self.room.slots} slots", adapter=tenant.name)
        for other in known if tenant.pinned else [tenant]:
            need = demand([*pinned, other])
            if need > self.room.nbytes:
                what = "it" if other is tenant else "an adapter loaded before"  # uids mean nothing to users
                hint = f"{what} and {len(pinned) - other.pinned} pinned adapters beside it need {need} bytes"
                hint += f", the arena has {self.room.nbytes}: raise --scute-arena-mb"
                raise AdapterError("too_large", hint, adapter=tenant.name)

    def _apply(self, move: Move, stale: list[Tenant]) -> list[str]:
        old_sets = [s for s in self._resident_sets() if s not in move.keep_sets]
        coming = {block for block, _ in move.place}
        going = [t for t in self._resident.values() if t not in move.keep]
        evicted = [t.name for t in going if t not in stale and t not in coming]
        self._evictions += len(evicted)
        for tenant in going:
            self._clear(tenant)
        for tenant in stale:
            self._leaving.remove(tenant)
            self._drop(tenant)
        for old in old_sets:
            self._erase(old.offset, old.size)
            old.offset = old.row = -1
        for block, offset in move.place:
            block.offset = offset
            if isinstance(block, Set):
                self._load_set(block)
            else:
                self._load(block)
        return evicted

    def _load(self, tenant: Tenant) -> None:
        image = tenant.image
        tenant.slot = slot = min(set(range(self.room.slots)) - self._resident.keys())
        self._resident[slot] = tenant
        self._swap_ins += 1
        self.live[slot], self.ranks[slot] = image.live, image.rank_max
        row = torch.full(self.table.shape[1:], -1, dtype=torch.int64)
        row[:, layout.META] = 0
        row[: len(image.entries)] = torch.where(image.entries >= 0, image.entries + tenant.offset, -1)
        row[: len(image.entries), layout.META] = image.entries[:, layout.META]
        word = torch.tensor([image.live, tenant.shared.row if tenant.shared else -1, image.rank_max], dtype=torch.int32)
        self._copy(self.arena[tenant.offset : tenant.offset + image.nbytes], image.data)
        self._copy(self.table[slot], row)
        self._copy(self.slots[slot], word)

    def _load_set(self, block: Set) -> None:
        block.row = min(set(range(self.room.slots)) - {s.row for s in self._resident_sets()})
        data = block.data
        row = torch.tensor([block.offset, block.offset + data.b, data.rank8, data.inputs, data.outputs])
        self._copy(self.arena[block.offset : block.offset + data.nbytes], data.data)
        self._copy(self.sets[block.row], row)

    def _clear(self, tenant: Tenant) -> None:
        """Take a tenant off the device: its slot is nobody's before another gets it."""
        slot = tenant.slot
        self.slots[slot, layout.LIVE] = 0
        self.slots[slot, layout.SHARED_SET] = -1
        self.slots[slot, layout.RANK] = 0
        self.table[slot] = -1
        self.table[slot, :, layout.META] = 0
        self._erase(tenant.offset, tenant.size)
        self.live[slot] = self.ranks[slot] = 0
        tenant.slot = tenant.offset = -1
        del self._resident[slot]

    def _drop(self, tenant: Tenant) -> None:
        """Let go of the host image, and of the shared set with its last tenant."""
        if not self._is_replaced(tenant):
            del self._tenants[tenant.name]
        others = [*self._tenants.values(), *self._resident.values()]
        if tenant.shared and all(t.shared is not tenant.shared for t in others):
            self._sets.pop(tenant.shared.name, None)

    def _is_replaced(self, tenant: Tenant) -> bool:
        """Whether its uid was registered anew after it was forgotten."""
        return self._tenants.get(tenant.name) is not tenant

    def _resident_sets(self) -> list[Set]:
        return [s for s in self._sets.values() if s.offset >= 0]

    def _copy(self, target: Tensor, source: Tensor) -> None:
        """Host to device without waiting; torch keeps a pinned buffer from reuse until the copies from it are done."""
        if self.device.type == "cuda" and not source.is_pinned():
            source = source.pin_memory()
        target.copy_(source, non_blocking=True)

    def _erase(self, offset: int, size: int) -> None:
        if self.poison:
            self.arena[offset : offset + size].view(self.dtype).fill_(float("nan"))
