"""Greedy answers of a tenant alone and in mixed batches of the same size: captured decoding on a GPU, and the CPU's.

Which rows a GEMM of the base has depends on the batch's size and on whether a tenant rotates inputs, and on a GPU whose
GEMM it is on whether there is a tenant. Where all are equal, so is every bit; see "Neighbours" in docs/exactness.md.
"""

import numpy as np
import pytest
import torch
from gpu_worker import Worker, write_base
from make_adapters import write_adapter

STEPS = 16
# By the graph variant that they need: s b A B, shared matrices, rotations.
DELTA, SHARED, ROTATED = ["lora", "dora", "lora_embed_head", "ia3"], ["vera_all", "vera_seed"], ["oft"]
PLACES = [*DELTA, *SHARED, *ROTATED, None]  # a row for each tenant, and one of the base
TENANTS = PLACES[:-1]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


@pytest.fixture(scope="module")
def greedy(tmp_path_factory):
    """greedy(tenants) -> logits (rows, steps, vocabulary) with these tenants at their places and the base elsewhere."""
    root = tmp_path_factory.mktemp("greedy")
    base = write_base(root / "base", hidden=1024 if DEVICE == "cuda" else 256)
    worker = Worker("scute", base, DEVICE)
    known = {}

    def run(tenants: list[str]) -> np.ndarray:
        rows = tuple(tenant if tenant in tenants else None for tenant in PLACES)
        if rows not in known:
            known[rows] = worker.greedy(list(rows), STEPS)
        return known[rows]

    try:
        for tenant in TENANTS:
            worker.load(tenant, write_adapter(base, root / tenant, tenant))
        yield run
    finally:
        worker.close()


@pytest.mark.parametrize("tenant", TENANTS)
def test_neighbours_that_add_no_rotations_change_no_bit(greedy, tenant):
    group = TENANTS if tenant in ROTATED else DELTA + SHARED
    place = PLACES.index(tenant)
    assert not np.array_equal(greedy([])[place], greedy([tenant])[place])
    assert np.array_equal(greedy([tenant])[place], greedy(group)[place])


@pytest.mark.parametrize("tenants", [DELTA, DELTA + SHARED], ids=["delta", "shared"])
def test_tenants_without_rotations_change_no_bit_of_the_base(greedy, tenants):
    fewest = [] if DEVICE == "cpu" else DELTA[:1]
    assert np.array_equal(greedy(fewest)[len(TENANTS) :], greedy(tenants)[len(TENANTS) :])


@pytest.mark.parametrize("tenant", DELTA + SHARED)
def test_rotations_beside_a_row_change_tokens_only_where_the_base_s_own_rounding_could(greedy, tenant):
    """What stacked inputs do to the logits of the base's row tells how far two candidates may be from a tie."""
    place = PLACES.index(tenant)
    alone, mixed = greedy([tenant])[place], greedy(TENANTS)[place]
    differ = (alone.argmax(-1) != mixed.argmax(-1)).nonzero()[0]
    if len(differ):  # from this step on the inputs differ
        step = differ[0]
        rounding = np.abs(greedy([])[-1, : step + 1] - greedy(TENANTS)[-1, : step + 1]).max()
        lost = alone[step].max() - alone[step, mixed[step].argmax()]
        assert lost <= 10 * rounding, f"step {step}: {lost:.1e} below the best token, the base moved by {rounding:.1e}"
