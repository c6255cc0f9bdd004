"""Captured decoding in variants by what is live in the batch.

A CUDA graph freezes Python branches, so a graph that could rotate would always pay for rotations. Each
captured batch size therefore gets one graph per variant, and a batch replays the smallest that covers it. The
empty variant is the base model's own graph, kernel for kernel.

SGLang's runners keep their graphs in a backend object with three methods that know a graph only by its key.
:func:`with_variants` wraps those methods of one instance and extends the key; the runners notice nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from scute_sgl.layout import DELTA, ROTATED, SHARED, STRUCTURED

# Largest first: the smaller variants of a size then fit into the memory pool that it grew.
VARIANTS = (
    DELTA | SHARED | ROTATED | STRUCTURED,
    DELTA | SHARED | ROTATED,
    DELTA | ROTATED,
    DELTA | SHARED,
    DELTA,
    0,
)


def variant_of(live: int) -> int:
    """The smallest variant that can serve a batch with these LIVE bits."""
    return next(variant for variant in reversed(VARIANTS) if live & ~variant == 0)


class Variant:
    """Which ops a forward runs: forced while capturing or replaying a graph, else the batch's own bits."""

    def __init__(self):
        self.forced: int | None = None
        self.captured = self.replays = 0

    @contextmanager
    def forcing(self, live: int) -> Iterator[None]:
        self.forced = live
        try:
            yield
        finally:
            self.forced = None


def with_variants(graphs, variant: Variant, live_of: Callable[[], int], begin_pass: Callable[[], None]):
    """Capture every variant of each shape on ``graphs`` (a BaseCudaGraphBackend); returns the same object.

    ``live_of`` gives the LIVE bits of the batch that was prepared last. ``begin_pass`` runs before every forward
    of a capture, so that each, warm-ups and the captured one, plans its rows. Every variant exists at every
    captured size: the runner checks for a missing graph only when padding is disabled.
    """
    capture_one, replay, can_run = graphs.capture_one, graphs.replay, graphs.can_run

    def key(shape_key, live: int):
        return dataclasses.replace(shape_key, variant_label=f"{shape_key.variant_label or ''}@{live}")

    def capture_variants(shape_key, forward_fn, *args, **kwargs):
        def forward():
            begin_pass()
            return forward_fn()

        for live in VARIANTS:
            with variant.forcing(live):
                capture_one(key(shape_key, live), forward, *args, **kwargs)
                variant.captured += 1

    def replay_variant(shape_key, *args, **kwargs):
        variant.replays += 1
        return replay(key(shape_key, variant_of(live_of())), *args, **kwargs)

    def can_run_variant(forward_batch, shape_key, *args, **kwargs):
        return can_run(forward_batch, key(shape_key, variant_of(live_of())), *args, **kwargs)

    graphs.capture_one, graphs.replay, graphs.can_run = capture_variants, replay_variant, can_run_variant
    return graphs
