"""What the tensor-parallel ranks tell each other: that all of them loaded an adapter, or why not, and its norms.

Everything goes over the CPU group, in the scheduler's thread, as SGLang's own broadcast of requests does. The device
group is left to the forward passes: a collective of ours on the GPU could run beside one of a pass that is still in
flight, and two ranks whose GPUs start them in different order wait for each other for ever.
"""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch import Tensor

from scute_sgl.errors import AdapterError


class Ranks:
    """This process among those that hold one base model. All of them load the same adapters in the same order.

    Every method but the constructor is a collective where there are several ranks: all call it, or none.
    """

    def __init__(self, group=None):
        """``group``: SGLang's GroupCoordinator; by default that of tensor parallelism."""
        if group is None:
            from sglang.srt.distributed import get_tp_group

            group = get_tp_group()
        self._group, self.rank, self.size = group, group.rank_in_group, group.world_size

    def first_refusal(self, own: AdapterError | None) -> AdapterError | None:
        """The refusal of the lowest rank that has one, in its own words; None if all ranks are content."""
        if self.size == 1:
            return own
        refusing = self.min(self.size if own is None else self.rank)
        if refusing == self.size:
            return None
        words = [None if own is None else (own.code, own.hint, own.adapter, own.module, own.key)]
        dist.broadcast_object_list(words, src=self._group.ranks[refusing], group=self._group.cpu_group)
        if refusing == self.rank:
            return own
        code, hint, adapter, module, key = words[0]
        hint += f" (on tensor-parallel rank {refusing})"
        return AdapterError(code, hint, adapter=adapter, module=module, key=key)

    def min(self, value: int) -> int:
        return self._reduce(value, dist.ReduceOp.MIN)

    def max(self, value: int) -> int:
        return self._reduce(value, dist.ReduceOp.MAX)

    def sum(self, part: Tensor) -> Tensor:
        """Sum of a tensor, on the part's device; every rank gets the same bits."""
        if self.size == 1:
            return part
        total = part.to("cpu", copy=True)
        dist.all_reduce(total, group=self._group.cpu_group)
        return total.to(part.device)

    def check_equal(self, what: str, content: bytes) -> None:
        """RuntimeError on every rank, with the hashes of all, unless all ranks have the same content."""
        if self.size == 1:
            return
        digest = int.from_bytes(hashlib.sha256(content).digest()[:7], "big")
        digests = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(digests, torch.tensor([digest]), group=self._group.cpu_group)
        if len({int(d) for d in digests}) > 1:
            found = ", ".join(f"rank {rank} has {int(d):014x}" for rank, d in enumerate(digests))
            raise RuntimeError(f"tensor-parallel ranks disagree on {what}: {found}")

    def _reduce(self, value: int, op) -> int:
        if self.size == 1:
            return value
        word = torch.tensor(value, dtype=torch.int64)
        dist.all_reduce(word, op=op, group=self._group.cpu_group)
        return int(word)
