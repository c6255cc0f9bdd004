"""An embedding and an output head, cut by vocabulary and unevenly: what the ranks give adds up to the whole."""

from dataclasses import replace

import pytest
import torch
from fakes import EMBEDDING, LM_HEAD, VOCAB, FakeModel, apply_slots, random_slots
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

from scute_sgl import image, ops, targets
from scute_sgl.fold import fold_adapter
from scute_sgl.plan import BatchPlan
from scute_sgl.pool import Pool
from scute_sgl.slots import Adapter

MODEL = FakeModel()
WHOLE = MODEL.targets()
TILE, RANK = 8, 8


def shards(path: str, ranks: int) -> list:
    """Every rank's part of a vocabulary padded to 128, as SGLang cuts it: its indices, and the target that it holds."""
    result, whole = [], WHOLE[path]
    for rank in range(ranks):
        held = VocabParallelEmbedding._get_indices(128, 128, VOCAB, VOCAB, rank, ranks)
        span = held.org_vocab_start_index, held.org_vocab_end_index
        weight = whole.weight()[slice(*span)]
        bias = None if whole.bias() is None else whole.bias()[slice(*span)]
        cut = {"inputs" if path == EMBEDDING else "outputs": span}
        result.append((held, replace(whole, **cut, weight=lambda w=weight: w, bias=lambda b=bias: b)))
    return result


def folds(path: str, slots, targets: list) -> list:
    """Every rank's folded tensors, norms summed over them as real ranks would."""
    parts = []
    for target in targets:
        fold_adapter(Adapter("", {path: slots}), {path: target}, lambda part: parts.append(part) or part)
    total = sum(parts) if parts else None
    return [fold_adapter(Adapter("", {path: slots}), {path: target}, lambda _: total) for target in targets]


def resident(folded: dict, block_bytes: int) -> tuple[Pool, int]:
    pool = Pool(1 << 16, 2, len(WHOLE), "cpu", torch.float32)
    pool.register("t", image.pack(folded, torch.float32), block_bytes=block_bytes)
    pool.ensure(["t"])
    return pool, pool.slot_of("t")


@pytest.mark.parametrize("names", [("terms",), ("terms", "magnitude"), ("scale", "gain")])
def test_an_embedding_s_ranks_add_up(names):
    slots, ids = random_slots(WHOLE[EMBEDDING], *names), torch.arange(VOCAB)
    found = shards(EMBEDDING, 2)
    assert [target.inputs for _, target in found] == [(0, 64), (64, 96)]  # uneven: ranks' images differ in size
    total = torch.zeros(VOCAB, WHOLE[EMBEDDING].out_features)
    for (_, target), folded in zip(found, folds(EMBEDDING, slots, [t for _, t in found]), strict=True):
        pool, slot = resident(folded, 1 << 13)
        plan = BatchPlan(128, pool)
        plan.build([slot] * VOCAB, TILE)
        outside = (ids < target.inputs[0]) | (ids >= target.inputs[1])
        local = (ids - target.inputs[0]).masked_fill(outside, 0)  # what the layer gives its embedding method
        y = target.weight()[local].clone()
        v = torch.empty(1, VOCAB, RANK)
        tables, planned = (pool.arena, pool.table), (plan.words, TILE, target.module)
        ops.lookup(local, *tables, *planned, 0, target.inputs[1] - target.inputs[0], y.dtype, v)
        ops.expand(v, None, plan.row_slot, *tables, pool.sets, *planned, [0, target.out_features], [0], y)
        total += y.masked_fill(outside[:, None], 0)  # as the layer does before it reduces
    one_hot = torch.eye(VOCAB, dtype=torch.float64)
    torch.testing.assert_close(total.double(), apply_slots(slots, WHOLE[EMBEDDING], one_hot), rtol=1e-5, atol=1e-5)


def test_a_head_s_padding_is_left_alone():
    t = WHOLE[LM_HEAD]
    slots = random_slots(t, "terms", "scale", "bias")
    x = torch.randn(5, t.in_features, generator=torch.Generator().manual_seed(1))
    columns = []
    found = shards(LM_HEAD, 2)
    for (held, target), folded in zip(found, folds(LM_HEAD, slots, [t for _, t in found]), strict=True):
        pool, slot = resident(folded, 1 << 13)
        plan = BatchPlan(8, pool)
        plan.build([slot] * len(x), TILE)
        width = target.outputs[1] - target.outputs[0]
        y = torch.full((len(x), held.num_elements_padded), 7.0)
        y[:, :width] = x @ target.weight().T + target.bias()
        v = torch.empty(1, len(x), RANK)
        tables, planned = (pool.arena, pool.table), (plan.words, TILE, target.module)
        ops.shrink(x, *tables, *planned, 1, v)
        ops.expand(v, None, plan.row_slot, *tables, pool.sets, *planned, [0, width], [0], y)
        assert (y[:, width:] == 7).all()
        columns.append(y[:, :width])
    assert [part.shape[1] for part in columns] == [64, 32]
    torch.testing.assert_close(torch.cat(columns, 1).double(), apply_slots(slots, t, x.double()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("vocabulary, ranks, adaptable", [(96, 2, True), (64, 2, False), (96, 4, False)])
def test_a_rank_that_would_hold_padding_alone_leaves_the_layer_out(vocabulary, ranks, adaptable):
    for rank in range(ranks):
        layer = VocabParallelEmbedding.__new__(VocabParallelEmbedding)
        torch.nn.Module.__init__(layer)
        layer.num_embeddings = layer.org_vocab_size = vocabulary
        layer.tp_size, layer.embedding_dim, layer.num_embeddings_per_partition = ranks, 64, 128 // ranks
        layer.shard_indices = layer._get_indices(128, 128, vocabulary, vocabulary, rank, ranks)
        _, _, parts = targets._vocabulary("model.embed_tokens", layer)
        assert bool(parts) == adaptable
