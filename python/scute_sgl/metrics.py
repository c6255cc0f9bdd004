"""Prometheus metrics under SGLang's /metrics, where it runs with --enable-metrics.

SGLang uses prometheus_client's multiprocess mode: every process writes its values to files in a folder, and the HTTP
server adds them up. That mode is chosen by an environment variable when prometheus_client is first imported, so it
is imported only when metrics are made. The scheduler of rank 0 tells of tenants, the process that tokenizes of
refusals. Loads and swap-ins write at once; the rows of a forward pass only count in a dictionary, from
which a thread writes once a second.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Iterable

FLUSH_SECONDS = 1.0
SWAP_IN_BUCKETS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)

# field of Pool.stats(): name and help of its gauge
GAUGES = {
    "resident": ("scute_tenants_resident", "Adapters on the device."),
    "arena_bytes": ("scute_arena_bytes", "Size of the arena."),
    "used": ("scute_arena_used_bytes", "Bytes of the arena that adapters on the device take."),
    "free": ("scute_arena_free_bytes", "Bytes of the arena that are free."),
    "shared_bytes": ("scute_arena_shared_bytes", "Bytes of the arena that hold matrices shared by adapters."),
}


class TenantMetrics:
    """What one scheduler tells of its adapters."""

    def __init__(self):
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        here = CollectorRegistry()  # the server collects from files; a registry for all would forbid a second engine

        def gauge(name: str, help: str):
            return Gauge(name, help, registry=here, multiprocess_mode="mostrecent")

        self._loaded = gauge("scute_tenants_loaded", "Loaded adapters, on the device or not.")
        self._gauges = {field: gauge(*named) for field, named in GAUGES.items()}
        self._swap_ins = Counter("scute_swap_ins", "Adapters copied to the device.", registry=here)
        self._evictions = Counter("scute_evictions", "Idle adapters that left the device for others.", registry=here)
        help = "Host time of a batch's preparation in which adapters were swapped in; a GPU copies on after it."
        self._seconds = Histogram("scute_swap_in_seconds", help, registry=here, buckets=SWAP_IN_BUCKETS)
        help = "Rows of forward passes, by the method of their adapter."
        self._rows = Counter("scute_rows", help, ["method"], registry=here)
        self.rows: collections.Counter[str] = collections.Counter()
        self._told: dict[str, int] = {}
        self._before = {"swap_ins": 0, "evictions": 0}
        threading.Thread(target=self._flush_for_ever, name="scute-metrics", daemon=True).start()

    def show(self, loaded: int, pool: dict[str, int]) -> None:
        """After a load, an unload or a swap-in: ``pool`` is ``Pool.stats()``."""
        self._loaded.set(loaded)
        for field, gauge in self._gauges.items():
            gauge.set(pool[field])
        self._swap_ins.inc(pool["swap_ins"] - self._before["swap_ins"])
        self._evictions.inc(pool["evictions"] - self._before["evictions"])
        self._before = {name: pool[name] for name in self._before}

    def swapped_in(self, seconds: float) -> None:
        self._seconds.observe(seconds)

    def count_rows(self, methods: Iterable[str], lengths: Iterable[int]) -> None:
        """Rows of one forward pass: for each request its method and its rows."""
        for method, rows in zip(methods, lengths, strict=True):
            self.rows[method] += rows

    def flush(self) -> None:
        """Write the rows counted since the last time."""
        for method, rows in dict(self.rows).items():
            self._rows.labels(method=method).inc(rows - self._told.get(method, 0))
            self._told[method] = rows

    def _flush_for_ever(self) -> None:
        while True:
            time.sleep(FLUSH_SECONDS)
            self.flush()


def refusal_counter():
    """f(code): count a refused load, unload or name; for the process that tokenizes."""
    from prometheus_client import CollectorRegistry, Counter

    help = "Refused loads and unloads, and requests for names that are not loaded, by code."
    refusals = Counter("scute_refusals", help, ["code"], registry=CollectorRegistry())
    return lambda code: refusals.labels(code=code).inc()
