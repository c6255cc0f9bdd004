"""Captured decoding on a GPU: replays against the same pass run eagerly, neighbours, storms, and the base's own graph.

SCUTE_REPLAYS sets the number of compared replays (500). Four runners share one GPU, each in its own process: ours
with and without programmatic dependent launch, and SGLang's without adapters twice.
"""

import os
from statistics import median

import pytest
import torch
from gpu_worker import SIZES, Worker, write_base
from make_adapters import write_adapter

from scute_sgl.graphs import VARIANTS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

REPLAYS = int(os.environ.get("SCUTE_REPLAYS", "500"))
ADAPTERS = [
    "lora", "lora_rank_pattern", "lora_embed_head", "dora", "dora_patterns", "ia3", "ia3_many_ff", "vera_all",
    "vera_seed", "oft", "oft_block_share", "oft_head", "lokr",
    "road", "shira", "supertuning_supra", "hira", "glora_lora", "miss_bat",
]  # fmt: skip
COMING = [  # with the residents no more than the rows of the largest graph
    "lora", "lora_embed_head", "dora", "ia3", "vera_all", "oft", "oft_head", "lokr", "road", "shira", "supertuning_supra",
]  # fmt: skip
RESIDENT = ["lora", "dora", "vera_all", "oft", "lokr"]  # one for every op, so that all batches with them use one variant


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("base"), hidden=1024)


@pytest.fixture(scope="module")
def folders(base, tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(base, root / name, name) for name in ADAPTERS}


@pytest.fixture(scope="module")
def workers(base):
    """Started side by side. Their graphs are captured before any adapter exists (bug log B71)."""
    running = {
        "pdl": Worker("scute", base, SCUTE_PDL="1"),
        "no_pdl": Worker("scute", base, SCUTE_PDL="0"),
        "base": Worker("none", base),
        "base again": Worker("none", base),
    }
    yield running
    for worker in running.values():
        worker.close()


@pytest.fixture(scope="module", params=["pdl", "no_pdl"])
def worker(workers, folders, request):
    ours = workers[request.param]
    for name, folder in folders.items():
        ours.load(name, folder)
    yield ours
    for name in folders:
        ours.unload(name)


def test_adapters_loaded_after_capture_take_effect(worker):
    assert min(worker.effects(ADAPTERS).values()) > 0.01


def test_replays_equal_the_same_pass_run_eagerly(worker):
    result = worker.replays(steps=REPLAYS, seed=1)
    assert result["mismatches"] == 0
    assert len(result["steps_by_label"]) == len(VARIANTS), "a variant was never replayed"


def test_a_row_does_not_depend_on_its_neighbours(worker):
    assert worker.neighbours(steps=200, seed=2) == {"mismatches": 0}


def test_loads_and_unloads_during_replays_change_no_answer(worker, folders):
    residents = {f"resident_{name}": folders[name] for name in RESIDENT}
    coming = {f"coming_{name}": folders[name] for name in COMING}
    for name, folder in residents.items():
        worker.load(name, folder)
    before = worker.state()["pool"]
    result = worker.storm(coming, list(residents), steps=300, seed=3)
    for name in residents:
        worker.unload(name)
    assert result["mismatches"] == 0
    assert result["pool"]["swap_ins"] > before["swap_ins"] + 100
    assert result["pool"]["evictions"] > before["evictions"]


@pytest.mark.parametrize("rows", SIZES)
def test_without_adapters_the_base_graph_is_replayed(workers, rows):
    assert workers["pdl"].kernels(rows) == workers["base"].kernels(rows)


def test_without_adapters_a_replay_takes_the_base_s_time(workers):
    """Or is no further from the middle of two engines of the base than these are from each other."""
    names, turns = ["base", "pdl", "base again"], []
    for turn in range(27):
        turns.append({name: workers[name].milliseconds(max(SIZES)) for name in names[turn % 3 :] + names[: turn % 3]})
    base, ours, again = (median(turn[name] for turn in turns) for name in names)
    middle = (base + again) / 2
    assert ours / middle <= 1 + max(0.005, abs(base - again) / middle), turns
