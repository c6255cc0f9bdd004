"""Layers between two forward passes: what the backend tells them, what it learns from them, and their two ways to decode."""

from __future__ import annotations

from dataclasses import replace

import pytest
import test_targets
import torch
from fakes import random_slots
from sglang.srt.layers.linear import ReplicatedLinear
from torch import nn

from scute_sgl import layout, ops, targets
from scute_sgl.backend import ScuteBackend, built_by_manager
from scute_sgl.errors import AdapterError
from scute_sgl.fold import fold_adapter
from scute_sgl.image import pack
from scute_sgl.layers import attach
from scute_sgl.manager import ScuteManager
from scute_sgl.pool import Pool
from scute_sgl.slots import Adapter, Slots, Target, Term

PATHS = ["model.layers.0.mlp.called", "model.layers.0.mlp.bypassed"]
METHODS = {
    "lora": ("terms",), "dora": ("terms", "magnitude"), "ia3": ("gain", "bias"), "vera": ("shared",), "oft": ("rotation",),
    "lokr": ("split",), "hira": ("hadamard",), "several": ("rotation", "terms", "scale"),
}  # fmt: skip


def attached(root: nn.Module, sites: list, adapters: dict[str, Adapter]) -> ScuteBackend:
    """The layers with these adapters resident."""
    with built_by_manager():
        backend = ScuteBackend(8, torch.device("cpu"))
    found = {t.path: t for site in sites for t in site.targets}
    pool = Pool(1 << 20, 8, len(found), "cpu", torch.float32, poison=True)
    for name, adapter in adapters.items():
        pool.register(name, pack(fold_adapter(adapter, found), torch.float32))
    pool.ensure(adapters)
    backend.start(pool, graph_rank=64)
    attach(root, sites, backend)
    return backend


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
    adapter = Adapter("LORA", {PATHS[0]: Slots(terms=(Term(torch.ones(1, 16), torch.ones(16, 1)),))})
    made.lora_backend = attached(root, sites, {"tenant": adapter})
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


def slots_of(t: Target, name: str) -> Slots:
    made = random_slots(t, *METHODS[name])
    if made.shared is None:
        return made
    noise = torch.Generator().manual_seed(0)
    A, B = torch.randn(5, 112, generator=noise), torch.randn(104, 5, generator=noise)
    return replace(made, shared=replace(made.shared, A=A, B=B))  # every layer has the same


@pytest.fixture(scope="module")
def decoder():
    """Attention, whose layers have biases, and an MLP; a tenant of every method."""
    torch.manual_seed(0)
    root = test_targets.model()
    sites = targets.find_sites(root)
    paths = {t.path: t for site in sites for t in site.targets}
    adapters = {name: Adapter(name, {path: slots_of(t, name) for path, t in paths.items()}) for name in METHODS}
    return sites, attached(root, sites, adapters)


@pytest.mark.parametrize("names", [*([name] for name in METHODS), [*METHODS]], ids=" ".join)
def test_few_rows_in_one_op_get_what_the_others_get(decoder, monkeypatch, names):
    sites, backend = decoder
    slots = [backend.pool.slot_of(name) for name in [None, *names, names[0]]]
    backend.begin(slots, [1] * len(slots), None, decode=True)

    def run() -> list[torch.Tensor]:
        torch.manual_seed(1)
        layers = [site.layer for site in sites]
        inputs = [torch.randn(len(slots), layer.weight.shape[1]) for layer in layers]
        return [layer.quant_method.apply(layer, x, layer.bias) for layer, x in zip(layers, inputs)]

    apart = run()
    monkeypatch.setattr(ScuteBackend, "fuses", lambda self, x: True)
    monkeypatch.setattr(ops, "expand", None)  # not called
    for got, want in zip(run(), apart, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6 * want.abs().max().item())
