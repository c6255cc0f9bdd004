"""Where blocks go in the arena: pure functions of host state, the deciding half of pool.py.

Gaps are what lies between the blocks that stay, so they coalesce by themselves. A new block goes into the smallest
gap that holds it, larger blocks first. Where no gap does, idle tenants are evicted, least recently used first. If
that is not enough, because the batch's own residents lie in the way, all its blocks are loaded again, packed without
gaps: decisions fall between forward passes, when no block is in use. So a batch fits exactly if its bytes do, and
what was admitted on that ground stays so whatever is loaded or evicted in the meantime. Ties go by name: all ranks
come to the same answer.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache

from scute_sgl import layout
from scute_sgl.image import Image, SharedSet


@dataclass(eq=False)
class Set:
    """A shared set: resident while a resident tenant uses it, on the host while a registered one does."""

    name: str  # content hash
    data: SharedSet
    size: int
    offset: int = -1  # -1: not resident
    row: int = -1  # in the device's table of sets


@dataclass(eq=False)
class Tenant:
    name: str  # uid
    image: Image
    size: int
    pinned: bool
    shared: Set | None
    offset: int = -1
    slot: int = -1  # -1: not resident
    used: int = 0  # step of the last batch that named it
    forgotten: bool = False


@dataclass(frozen=True)
class Room:
    """What there is to share out."""

    nbytes: int
    slots: int


@dataclass(frozen=True)
class Move:
    """A change of residents: these tenants and sets stay, all others leave, and these come, sets first."""

    keep: set[Tenant]
    keep_sets: set[Set]
    place: list[tuple[Set | Tenant, int]]  # and their offsets


def block_size(nbytes: int) -> int:
    return max(layout.BLOCK, layout.round_up(nbytes, layout.BLOCK))


def demand(tenants: Iterable[Tenant]) -> int:
    """Bytes that these tenants need together, each shared set once."""
    unique = set(tenants)
    return sum(t.size for t in unique) + sum(s.size for s in sets_of(unique))


def sets_of(tenants: Iterable[Tenant]) -> list[Set]:
    return sorted({t.shared for t in tenants if t.shared}, key=lambda s: s.name)


def can_fit(wanted: Iterable[Tenant], residents: Iterable[Tenant], room: Room) -> bool:
    """Whether :func:`choose` finds a move: whether these and the resident pins fit together, wherever they lie."""
    needed = {*wanted, *(t for t in residents if t.pinned)}
    return len(needed) <= room.slots and demand(needed) <= room.nbytes


def choose(wanted: list[Tenant], residents: Collection[Tenant], room: Room) -> Move | None:
    """Evict the shortest run of least recently used tenants that makes room for ``wanted``.

    Of the run, those that are in nobody's way stay. None if they do not fit (:func:`can_fit`).
    """
    batch = set(wanted)
    idle = sorted((t for t in residents if not t.pinned and t not in batch), key=lambda t: (t.used, t.name))

    @cache
    def without(count: int) -> Move | None:
        victims = set(idle[:count])
        return _fit(wanted, [t for t in residents if t not in victims], room)

    # More evictions leave more room, but for rare anomalies of best fit, which cost an eviction and no more. Most
    # loads need few, so the search doubles its steps before it halves them.
    low, high = 0, 1
    while high < len(idle) and without(high - 1) is None:
        low, high = high, 2 * high
    high = min(high, len(idle))
    count = bisect_left(range(high), True, low, key=lambda count: without(count) is not None)
    move = without(count)
    return _repack(wanted, residents, room) if move is None else _spare(move, idle[:count], room)


def _fit(wanted: list[Tenant], keep: list[Tenant], room: Room, reuse: bool = True) -> Move | None:
    """Places for ``wanted`` while ``keep`` stays where it is; None if there are none.

    ``reuse``: what of ``wanted`` and its sets is resident stays in place too.
    """
    stay = set(keep) | ({t for t in wanted if t.slot >= 0} if reuse else set())
    new = [t for t in wanted if t not in stay]
    if len(stay) + len(new) > room.slots:
        return None
    keep_sets = {s for s in sets_of(stay.union(new) if reuse else stay) if s.offset >= 0}
    new_sets = [s for s in sets_of(new) if s not in keep_sets]
    gaps = _gaps([*stay, *keep_sets], room.nbytes)
    offsets = {}
    for block in sorted([*new, *new_sets], key=lambda block: (-block.size, block.name)):
        best = bisect_left(gaps, (block.size, 0))
        if best == len(gaps):
            return None
        size, offset = gaps.pop(best)
        offsets[block] = offset
        if size > block.size:
            insort(gaps, (size - block.size, offset + block.size))
    return Move(stay, keep_sets, [(block, offsets[block]) for block in [*new_sets, *new]])


def _repack(wanted: list[Tenant], residents: Collection[Tenant], room: Room) -> Move | None:
    """Last resort against fragmentation: everything leaves; the batch and the pins come back side by side."""
    needed = {*wanted, *(t for t in residents if t.pinned)}
    return _fit(sorted(needed, key=lambda t: t.name), [], room, reuse=False)


def _spare(move: Move, victims: list[Tenant], room: Room) -> Move:
    """Let victims stay, last used first, whose blocks no newcomer takes."""
    keep, keep_sets = set(move.keep), set(move.keep_sets)
    taken = [(offset, offset + block.size) for block, offset in move.place]
    slots = room.slots - sum(isinstance(block, Tenant) for block, _ in move.place)
    for victim in reversed(victims):
        if len(keep) >= slots:
            break
        its_set = {victim.shared} - keep_sets if victim.shared else set()
        spans = [(block.offset, block.offset + block.size) for block in (victim, *its_set)]
        if all(end <= low or high <= begin for begin, end in spans for low, high in taken):
            keep.add(victim)
            keep_sets |= its_set
    return Move(keep, keep_sets, move.place)


def _gaps(blocks: Iterable[Set | Tenant], nbytes: int) -> list[tuple[int, int]]:
    """(size, offset) of what these blocks leave free, sorted."""
    gaps, end = [], 0
    for offset, size in [*sorted((b.offset, b.size) for b in blocks), (nbytes, 0)]:
        if offset > end:
            gaps.append((offset - end, end))
        end = offset + size
    return sorted(gaps)
