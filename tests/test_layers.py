"""Layers between two forward passes: what the backend tells them, and what it learns from them."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.layers.linear import ReplicatedLinear
from torch import nn

from scute_sgl import layout, targets
from scute_sgl.backend import ScuteBackend, built_by_manager
from scute_sgl.errors import AdapterError
from scute_sgl.fold import fold_adapter
from scute_sgl.image import pack
from scute_sgl.layers import attach
from scute_sgl.manager import ScuteManager
from scute_sgl.pool import Pool
from scute_sgl.slots import Adapter, Slots, Term

PATHS = ["model.layers.0.mlp.called", "model.layers.0.mlp.bypassed"]


@pytest.fixture
def manager():
    """One with a model of two layers, of which ``called`` has an adapter in slot 0."""
    root = nn.Module()
    root.model = nn.Module()
    root.model.layers = nn.ModuleList([nn.Module()])
    root.model.layers[0].mlp = mlp = nn.Module()
    mlp.called, mlp.bypassed = (ReplicatedLinear(16, 16, bias=False, params_dtype=torch.float32) for _ in range(2))
    for parameter in root.parameters():
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    sites = targets.find_sites(root)
    made = ScuteManager.__new__(ScuteManager)
    made.base_model, made.targets = root, {t.path: t for site in sites for t in site.targets}
    made.site_of = {t.module: site.module for site in sites for t in site.targets}
    with built_by_manager():
        made.lora_backend = ScuteBackend(8, torch.device("cpu"))
    pool = Pool(4096, 4, len(sites), "cpu", torch.float32, poison=True)
    adapter = Adapter("LORA", {PATHS[0]: Slots(terms=(Term(torch.ones(1, 16), torch.ones(16, 1)),))})
    pool.register("tenant", pack(fold_adapter(adapter, made.targets), torch.float32))
    pool.ensure(["tenant"])
    made.lora_backend.start(pool, graph_rank=64)
    attach(root, sites, made.lora_backend)
    return made


def call(manager, x: torch.Tensor, name: str = "called") -> torch.Tensor:
    layer = getattr(manager.base_model.model.layers[0].mlp, name)
    return layer.quant_method.apply(layer, x)


def test_an_idle_pass_after_a_live_one_is_the_bases(manager):
    x, backend = torch.ones(2, 16), manager.lora_backend
    base = call(manager, x)
    backend.begin([0, -1], [1, 1], None, decode=True)
    assert backend.live == layout.DELTA
    torch.testing.assert_close(call(manager, x), base + torch.tensor([[16.0], [0.0]]))
    backend.reset_batch_state()
    assert backend.live == 0 and torch.equal(call(manager, x), base)
    assert call(manager, x[:0]).shape == (0, 16)


def test_a_layer_that_the_model_never_calls_is_refused(manager):
    """Some models multiply by a layer's weight themselves; its adapter would be ignored without a word."""
    called, bypassed = (manager.targets[path] for path in PATHS)
    manager._check_reached("sql", [called, bypassed])  # before the first pass nothing is known
    call(manager, torch.ones(1, 16))
    manager._check_reached("sql", [called])
    with pytest.raises(AdapterError, match=r"adapter 'sql' refused \[wrong_base\]: model.layers.0.mlp.bypassed: .* does not call this layer"):
        manager._check_reached("sql", [called, bypassed])
    call(manager, torch.ones(1, 16), "bypassed")
    manager._check_reached("sql", [called, bypassed])
