"""Terms made of a base weight that ranks split: those of the whole; what needs all of it on one rank is refused."""

from dataclasses import replace

import pytest
import torch
from fakes import EMBEDDING, FakeModel, apply_folded, apply_slots, random_slots

from scute_sgl import linalg
from scute_sgl.errors import AdapterError
from scute_sgl.fold import fold_adapter
from scute_sgl.linalg import without_singular
from scute_sgl.slots import Adapter, Folded, FromWeight, Slots, Target

MODEL = FakeModel()
WHOLE = MODEL.targets()
O_PROJ, Q_PROJ = "model.layers.0.self_attn.o_proj", "model.layers.0.self_attn.q_proj"


class Waiting(Exception):
    """A rank asks for a sum whose parts are not all known yet."""


def fold_on_ranks(slots: Slots, path: str, tp: int) -> list[tuple[Target, Folded]]:
    """What fold_adapter gives on every rank, each of whose sums is over all of them."""
    totals: list[torch.Tensor] = []
    while True:
        asked, results = [], []
        for rank in range(tp):
            known = iter(totals)

            def sum_over_tp(part):
                if (total := next(known, None)) is None:
                    asked.append(part)
                    raise Waiting
                return total

            try:
                targets = MODEL.targets(rank, tp)
                folded = fold_adapter(Adapter("", {path: slots}), targets, sum_over_tp, adds_bias=rank == 0)
                results.append(folded[targets[path].module])
            except Waiting:
                pass
        if not asked:
            return results
        assert len(asked) == tp and not results, "ranks disagree on how many sums there are"
        totals.append(sum(asked))


@pytest.mark.parametrize("names", [
    ("right",), ("left",), ("right", "magnitude"), ("left", "magnitude", "bias"),
    ("right", "terms", "base_bias", "gain"),
])  # fmt: skip
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("path", [path for path in WHOLE if path != EMBEDDING], ids=lambda path: path.split(".")[-1])
def test_terms_of_a_split_weight_are_those_of_the_whole(path, tp, names):
    t = WHOLE[path]
    x = torch.randn(4, t.in_features, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    slots = random_slots(t, *names)
    result = torch.zeros(len(x), t.out_features, dtype=torch.float64)
    for own, folded in fold_on_ranks(slots, path, tp):
        y = apply_folded(folded, own, x[:, slice(*own.inputs)])
        if own.inputs != (0, own.in_features):
            result += y
        else:
            result[:, slice(*own.outputs)] = y
    torch.testing.assert_close(result, apply_slots(slots, t, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_term_of_all_of_a_weight_needs_it_on_one_rank(tp):
    """Refused before any sum, so that no rank waits for one."""
    for path in (Q_PROJ, O_PROJ, "model.layers.0.mlp.router"):  # only the last is whole on every rank
        t, slots = WHOLE[path], random_slots(WHOLE[path], "whole", "magnitude")
        if tp == 1 or path.endswith("router"):
            x = torch.randn(4, t.in_features, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
            ((own, folded), *_) = fold_on_ranks(slots, path, tp)
            torch.testing.assert_close(apply_folded(folded, own, x), apply_slots(slots, t, x), rtol=1e-5, atol=1e-5)
            continue
        with pytest.raises(AdapterError, match=r"unsupported_method.*_proj: .*all of the base weight.*--tp-size 1"):
            fold_adapter(Adapter("", {path: slots}), MODEL.targets(0, 2), lambda part: pytest.fail("a sum"))


def test_operands_that_do_not_fit_the_weight_are_refused():
    for name, bad in (("right", torch.ones(63, 2)), ("left", torch.ones(2, 65))):
        slots = random_slots(WHOLE[Q_PROJ], name)
        slots = replace(slots, from_weight=replace(slots.from_weight, **{name: bad}))
        with pytest.raises(AdapterError, match="bad_shape.*q_proj.*want 64"):
            fold_adapter(Adapter("", {Q_PROJ: slots}), MODEL.targets(0, 2))
    with pytest.raises(AdapterError, match="unsupported_method.*embed_tokens"):
        fold_adapter(Adapter("", {EMBEDDING: random_slots(WHOLE[EMBEDDING], "right")}), WHOLE)


def test_products_need_bounded_scratch(monkeypatch):
    """Chunks of rows change nothing, and the base weight stays as it is."""
    t = WHOLE[Q_PROJ]
    before, sizes, double = t.weight().clone(), [], torch.Tensor.double
    for name in ("right", "left", "whole"):
        slots = Slots(from_weight=FromWeight(lambda W, b0: ((without_singular(W, slice(-3, None)),), None)))
        slots = random_slots(t, name) if name != "whole" else slots
        whole = fold_adapter(Adapter("", {Q_PROJ: slots}), WHOLE)[t.module][1]
        with monkeypatch.context() as patch:
            patch.setattr(linalg, "SCRATCH", 64 * 5)
            patch.setattr(torch.Tensor, "double", lambda self: sizes.append(self.numel()) or double(self))
            chunked = fold_adapter(Adapter("", {Q_PROJ: slots}), WHOLE)[t.module][1]
        torch.testing.assert_close(chunked.B @ chunked.A, whole.B @ whole.A, rtol=1e-5, atol=1e-6)
    assert 0 < max(sizes) <= 64 * 5 and torch.equal(t.weight(), before)
