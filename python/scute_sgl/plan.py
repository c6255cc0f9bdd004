"""Which row of a batch belongs to which tenant, at fixed addresses that CUDA graphs may capture.

A plan's inner offsets depend on the number of rows that it is laid out for (layout.py), and a graph captured for a
bucket of rows is replayed for any smaller batch. So the work is split. :meth:`BatchPlan.write` runs before the
forward pass and knows the batch: it writes every row's slot, with -1 in all rows past the batch's end.
:meth:`BatchPlan.run` runs inside the forward pass and knows its rows, padding included: it lays the plan out for
exactly those. A captured graph holds that launch, so its layout is its bucket's own, and no layout has to suit all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from scute_sgl import layout, ops
from scute_sgl.pool import Pool


class BatchPlan:
    """The row -> slot table and the work list of one batch, for at most ``capacity`` rows.

    After :meth:`run`, ``row_slot`` int32 (rows,) and ``words`` int32 (plan_size(rows),) are what ops take: views of
    the same two buffers in every batch. After :meth:`write`, on the host, ``live`` is the union of the batch's LIVE
    bits and ``rank_max`` the columns of v that its largest rank needs; both 0 for a batch of the base alone.

    Writing costs 4 bytes a row of capacity: decoding deserves a plan of its own, as large as its largest bucket.
    """

    def __init__(self, capacity: int, pool: Pool):
        self.capacity, self.pool = capacity, pool
        self._row_slot = torch.full((capacity,), -1, dtype=torch.int32, device=pool.device)
        self._words = torch.zeros(layout.plan_size(capacity), dtype=torch.int32, device=pool.device)
        self.row_slot, self.words = self._row_slot[:0], self._words[: layout.plan_size(0)]
        self.live = self.rank_max = 0

    def build(self, row_slots: Sequence[int] | Tensor, tile_rows: int) -> None:
        """Write a batch and plan it as it is, without padding: for eager passes."""
        self.write(row_slots)
        self.run(len(row_slots), tile_rows)

    def write(self, row_slots: Sequence[int] | Tensor) -> None:
        """Say whose rows they are: each row's slot or -1, a sequence or a host int tensor (rows,).

        On the stream of the forward pass. It does not wait for the device: torch hands a pinned buffer out again
        only after the copy from it is done, so the next batch may be written meanwhile. ValueError for more
        rows than the capacity.
        """
        rows = torch.as_tensor(row_slots, dtype=torch.int32)
        self._check(len(rows))
        staged = torch.full((self.capacity,), -1, dtype=torch.int32, pin_memory=self.pool.device.type == "cuda")
        staged[: len(rows)] = rows
        self._row_slot.copy_(staged, non_blocking=True)
        self.live = self.rank_max = 0
        for slot in rows.unique().tolist():
            if slot >= 0:
                self.live |= self.pool.live[slot]
                self.rank_max = max(self.rank_max, self.pool.ranks[slot])

    def run(self, rows: int, tile_rows: int) -> None:
        """Plan the written batch for a forward pass of ``rows`` rows; may be captured. ValueError as in write."""
        self._check(rows)
        self.row_slot, self.words = self._row_slot[:rows], self._words[: layout.plan_size(rows)]
        ops.plan(self.row_slot, self.pool.slots, tile_rows, self.words)

    def _check(self, rows: int) -> None:
        if rows > self.capacity:
            raise ValueError(f"the batch has {rows} rows, the plan holds {self.capacity}")
