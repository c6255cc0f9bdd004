"""The few agreements that tensor-parallel ranks reach while an adapter loads."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class Ranks:
    """This process among those that hold one base model. All of them load the same adapters in the same order."""

    def __init__(self):
        from sglang.srt.distributed import get_tp_group

        self._group = get_tp_group()
        self.rank, self.size = self._group.rank_in_group, self._group.world_size

    def all_ok(self, ok: bool) -> bool:
        return self._reduce(int(ok), dist.ReduceOp.MIN) == 1

    def max(self, value: int) -> int:
        return self._reduce(value, dist.ReduceOp.MAX)

    def sum(self, part: Tensor) -> Tensor:
        """Sum of a tensor on the serving device."""
        if self.size > 1:
            dist.all_reduce(part, group=self._group.device_group)
        return part

    def _reduce(self, value: int, op) -> int:
        if self.size == 1:
            return value
        word = torch.tensor(value, dtype=torch.int64)
        dist.all_reduce(word, op=op, group=self._group.cpu_group)
        return int(word)
