"""Adapters as near the identity as trained ones are, from PEFT's file to the ops, against their fold in float64.

The oracle starts from the fold before its values are rounded to the serving dtype.
"""

from __future__ import annotations

import pytest
import torch
from make_adapters import NEAR, make_base, write_adapter
from ops_cases import DEVICES
from ops_checks import ulp
from peft_answers import load_base
from torch import Tensor

from scute_sgl import image, ops
from scute_sgl.checkpoint import read_adapter
from scute_sgl.fold import fold_adapter
from scute_sgl.plan import BatchPlan
from scute_sgl.pool import Pool
from scute_sgl.slots import BaseShape, Folded, Target

ROWS, TILE_ROWS = 64, 8
DTYPES = [torch.float16, torch.bfloat16]


@pytest.fixture(scope="module")
def folded(tmp_path_factory):
    """{adapter: {row of the table: (target, folded)}}, on a base whose weights 16 bits hold exactly."""
    root = tmp_path_factory.mktemp("near")
    base = make_base("llama_16bit", root)
    model = load_base(base)
    linears = {path: m.weight.detach() for path, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    shapes = BaseShape(
        {"model.embed_tokens": tuple(model.model.embed_tokens.weight.shape)}
        | {path: (W.shape[1], W.shape[0]) for path, W in linears.items()},
        dtype=torch.float32,
        vocab_size=model.config.vocab_size,
    )
    targets = {path: target(path, module, W) for module, (path, W) in enumerate(linears.items())}
    return {
        name: fold_adapter(read_adapter(write_adapter(base, root / name, name), shapes), targets) for name in NEAR
    }


def target(path: str, module: int, W: Tensor) -> Target:
    outputs, inputs = W.shape
    gate = path.replace("down_proj", "up_proj") if path.endswith("down_proj") else ""
    return Target(
        path, module, "replicated", inputs, outputs, (0, inputs), (0, outputs), lambda: W, lambda: None, gated_by=gate
    )


class Served:
    """One adapter in a pool, and the ops on batches of it alone."""

    def __init__(self, modules: dict[int, tuple[Target, Folded]], dtype: torch.dtype, device: str):
        packed = image.pack(modules, dtype)
        self.pool = Pool(1 << 20, 2, max(modules) + 1, device, dtype, poison=True)
        self.pool.register("adapter", packed)
        self.pool.ensure(["adapter"])
        self.plan = BatchPlan(ROWS, self.pool)
        self.plan.build([self.pool.slot_of("adapter")] * ROWS, TILE_ROWS)

    def rotate(self, module: int, x: Tensor) -> Tensor:
        out = x.new_empty(1, *x.shape)
        ops.rotate(x, self.plan.row_slot, self.pool.arena, self.pool.table, module, 1, out)
        return out[0]

    def add(self, module: int, x: Tensor, y: Tensor) -> Tensor:
        pool, plan, columns, y = self.pool, self.plan, [0, y.shape[1]], y.clone()
        v, shared_v = torch.full((2, 1, ROWS, max(plan.rank_max, 8)), torch.nan, device=x.device)
        tables, slots = (pool.arena, pool.table), plan.row_slot
        ops.shrink(x, *tables, plan.words, TILE_ROWS, module, 1, v)
        ops.project(x, slots, *tables, pool.sets, plan.words, TILE_ROWS, module, 1, 0, shared_v)
        ops.expand(v, shared_v, slots, *tables, pool.sets, plan.words, TILE_ROWS, module, columns, [0], y)
        return y


def turned(f: Folded, x: Tensor, of=lambda t: t) -> Tensor:
    """x (R - I) in float64; ``of=torch.abs`` sums absolute terms."""
    x, change = of(x.double()), of(f.rotation.double())
    return x * change if change.dim() == 1 else (x.view(len(x), -1, 1, change.shape[-1]) @ change).view_as(x)


def added(f: Folded, x: Tensor, outputs: int, of=lambda t: t) -> Tensor:
    """What an adapter adds to y + y * scale, likewise."""
    x, total = of(x.double()), torch.zeros(len(x), outputs, dtype=torch.float64)
    if f.bias is not None:
        total += of(f.bias.double())
    if f.A is not None:
        total += x @ of(f.A.double()).T @ of(f.B.double()).T
    if f.shared is not None:
        A, B, d, e = (of(t.double()) for t in (f.shared.A, f.shared.B, f.shared.d, f.shared.e))
        total += ((x @ A[:, : x.shape[1]].T) * d) @ B[:outputs].T * e
    return total


def judge(got: Tensor, want: Tensor, terms: Tensor, factors: int) -> float:
    """Asserts that ``got`` is within an ulp; returns the share that is not, where its terms cancel.

    A product of ``factors`` stored numbers is off by half an epsilon for each. Where an output is as large as the sum
    of its absolute terms that hides in its ulp; where it is smaller it may not, whatever the arithmetic.
    """
    error, limit = (got.cpu().double() - want).abs(), ulp(want, got.dtype)
    stored = factors * torch.finfo(got.dtype).eps / 2 * terms
    assert (error <= limit + torch.where(want.abs() < terms, stored, 0)).all()
    return (error > limit).double().mean().item()


@pytest.mark.parametrize("dtype", DTYPES, ids=["float16", "bfloat16"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NEAR)
def test_is_within_an_ulp_of_the_unrounded_fold(folded, name, device, dtype):
    served, generator = Served(folded[name], dtype, device), torch.Generator().manual_seed(0)
    shares = []
    for module, (t, f) in folded[name].items():
        x = torch.randn(ROWS, t.in_features, generator=generator).to(dtype)
        y = torch.randn(ROWS, t.out_features, generator=generator).to(dtype)
        if f.rotation is not None:
            want, terms = x.double() + turned(f, x), turned(f, x, torch.abs)
            shares.append(judge(served.rotate(module, x.to(device)), want, terms, factors=1))
        scaled = y.double() if f.scale is None else y.double() * (1 + f.scale.double())
        want, terms = scaled + added(f, x, t.out_features), added(f, x, t.out_features, torch.abs)
        factors = 4 if f.shared is not None else 2
        shares.append(judge(served.add(module, x.to(device), y.to(device)), want, terms, factors))
    share = sum(shares) / len(shares)
    assert share <= (0 if name.startswith("ia3") else 0.025), f"{share:.2%} of the outputs are past an ulp"
