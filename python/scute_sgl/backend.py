"""What the layers need of the batch at hand: whose rows they see, and which ops have work.

One object for all layers, filled by the manager before each forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from sglang.srt.environ import envs
from sglang.srt.lora.backend.base_backend import BaseLoRABackend
from torch import Tensor

from scute_sgl import ops
from scute_sgl.graphs import Variant, with_variants
from scute_sgl.layout import linear_fits
from scute_sgl.plan import BatchPlan
from scute_sgl.pool import Pool

DECODE_TILE, EXTEND_TILE = 8, 64

_manager_at_work = False


@contextmanager
def built_by_manager() -> Iterator[None]:
    """Only inside is a ScuteBackend built: SGLang would otherwise run its stock LoRA layers under our name."""
    global _manager_at_work
    _manager_at_work = True
    try:
        yield
    finally:
        _manager_at_work = False


class Rows:
    """The rows of one kind of pass and their plan. Decoding has small tiles, and a small plan of its own."""

    def __init__(self, pool: Pool, tile_rows: int, capacity: int = 64):
        self.pool, self.tile_rows = pool, tile_rows
        self.plan = BatchPlan(capacity, pool)
        self._planned = -1

    def write(self, row_slots: Tensor) -> None:
        if len(row_slots) > self.plan.capacity:
            self.plan = BatchPlan(1 << (len(row_slots) - 1).bit_length(), self.pool)
        self.plan.write(row_slots)
        self.replan()

    def replan(self) -> None:
        """A forward pass begins: its first layer plans anew."""
        self._planned = -1

    def planned(self, rows: int) -> BatchPlan:
        """The plan laid out for a pass of ``rows`` rows; made by the first layer that asks."""
        if self._planned != rows:
            self.plan.run(rows, self.tile_rows)
            self._planned = rows
        return self.plan


class ScuteBackend(BaseLoRABackend):
    """``live`` tells a layer which ops to run, ``body`` and :meth:`head_rows` whose rows it sees."""

    name = "scute"
    supports_prefill_cuda_graph = False

    def __init__(self, max_loras_per_batch: int, device: torch.device, server_args=None, **kwargs):
        if not _manager_at_work:
            raise RuntimeError("scute's backend was built without scute's manager; the plugin's hooks are not in place")
        super().__init__(max_loras_per_batch, device)
        self.variant = Variant()
        # Whether anything but the output head reads the last norm's output.
        read = ("enable_return_hidden_states", "is_embedding")
        self.gives_hidden_states = any(getattr(server_args, name, False) for name in read)
        self.reached: set[int] = set()  # linear sites that a forward pass has run, live or not
        self._live = 0

    def start(self, pool: Pool, graph_rank: int) -> None:
        self.pool, self.graph_rank = pool, graph_rank
        self._decode, self._extend = Rows(pool, DECODE_TILE), Rows(pool, EXTEND_TILE)
        self._captured: Rows | None = None
        self._head = Rows(pool, EXTEND_TILE)
        self.body = self._decode
        self._head_slots: Tensor | None = None
        self._beside = torch.cuda.Stream(pool.device) if pool.device.type == "cuda" else None
        self._linear_runs = pool.dtype.itemsize == 2 and ops.linear_runs(pool.device)

    def fuses(self, x: Tensor) -> bool:
        """Whether the base's GEMM and adapters of this input are one op, linear. In graphs and out of them alike."""
        few = self.body.tile_rows == DECODE_TILE and linear_fits(x.shape[0], max(self.stride, self.graph_rank))
        return self._linear_runs and few and x.is_contiguous() and x.data_ptr() % 16 == 0

    @contextmanager
    def beside(self, work: Callable[[], Tensor], wanted: bool) -> Iterator[Tensor]:
        """Queues ``work``; the block's ops run beside it if that is ``wanted``, else after it. Gives work's result.

        They start when work could have, for it comes first in line: what it leaves of the GPU is theirs. What
        follows the block waits for both.
        """
        if self._beside is None or not wanted:
            yield work()
            return
        before, main = torch.cuda.Event(), torch.cuda.current_stream()
        before.record(main)
        result = work()
        self._beside.wait_event(before)
        with torch.cuda.stream(self._beside):
            yield result
        main.wait_stream(self._beside)

    @property
    def live(self) -> int:
        """LIVE bits that this forward pass serves: the batch's, or those of the graph being captured."""
        return self._live if self.variant.forced is None else self.variant.forced

    @property
    def stride(self) -> int:
        """Columns of partial sums per slice: what the batch's largest rank needs; in a graph, what any batch may."""
        return max(self.body.plan.rank_max, 8) if self.variant.forced is None else self.graph_rank

    def init_cuda_graph_batch_info(self, max_bs_in_cuda_graph: int, num_tokens_per_req: int) -> None:
        """Rows whose buffers graphs may capture: they are never replaced."""
        self._captured = Rows(self.pool, DECODE_TILE, max_bs_in_cuda_graph * num_tokens_per_req)
        self.body = self._captured

    init_decode_cuda_graph_batch_info = init_cuda_graph_batch_info  # its name from SGLang 0.5.23 on

    def capture_variants(self, graphs):
        """``graphs`` of a decode runner, with a graph for every variant (see graphs.py)."""
        return with_variants(graphs, self.variant, lambda: self._live, self._captured.replan)

    @property
    def fits_graph(self) -> bool:
        """Whether the batch can be replayed: its rows are in the captured buffers, and no rank is too large."""
        return not self._live or (self.body is self._captured and self.body.plan.rank_max <= self.graph_rank)

    def begin(self, slots: list[int], lengths: Sequence[int], head_lengths: Sequence[int] | None, decode: bool) -> None:
        """Prepare a batch: for each request its slot (-1: base) and rows, and how many of them the head sees (None: all)."""
        self._live = 0
        for slot in set(slots) - {-1}:
            self._live |= self.pool.live[slot]
        self.body = self._extend
        if decode:
            captured = self._captured is not None and sum(lengths) <= self._captured.plan.capacity
            self.body = self._captured if captured else self._decode
        if self._live:
            self.body.write(_repeat(slots, lengths))
            self._head_slots = None if head_lengths is None else _repeat(slots, head_lengths)

    def reset_batch_state(self) -> None:
        """An idle pass: no rows, no work."""
        super().reset_batch_state()
        self._live = 0

    def head_rows(self, rows: int) -> Rows:
        """Whose rows the output head sees: of an extend pass only some, and those perhaps in several calls."""
        if self._head_slots is None:
            return self.body
        call = self._lm_head_pass_idx  # set by SGLang's chunked log-probabilities
        begin = 0 if call is None else call * envs.SGLANG_LOGPROB_CHUNK_SIZE.get()
        slots = self._head_slots[begin : begin + rows]
        if len(slots) != rows or (call is None and rows != len(self._head_slots)):
            raise RuntimeError(f"the output head got {rows} rows from {begin} on, want {len(self._head_slots)} in all")
        self._head.write(slots)
        return self._head


def _repeat(slots: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """The slot of every row, on the host."""
    slot_of_request = torch.tensor(slots, dtype=torch.int32)
    return slot_of_request.repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
