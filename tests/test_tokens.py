"""Own rows of the vocabulary: what readers refuse, what ranks hold, what an image keeps, and a server against PEFT."""

from dataclasses import replace

import pytest
import torch
from fakes import EMBEDDING, LM_HEAD, VOCAB, FakeModel
from servers import TOLERANCE, Server, prompt
from small_files import BASE, EMBED, HEAD, PATH, key, lora_config, lora_tensors, read, refused
from test_tp_vocabulary import shards

from scute_sgl import image, layout, ops
from scute_sgl.errors import NeedsBase
from scute_sgl.fold import fold_adapter, live_slots
from scute_sgl.plan import BatchPlan
from scute_sgl.pool import Pool
from scute_sgl.slots import Adapter, BaseShape, Slots, Term, Tokens

MODEL = FakeModel(bias=False)
WHOLE = MODEL.targets()
WIDTH = WHOLE[EMBEDDING].out_features
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def own(*ids, seed=0):
    ids = torch.tensor(sorted(ids), dtype=torch.int64)
    return Tokens(ids, torch.randn(len(ids), WIDTH, generator=torch.Generator().manual_seed(seed)))


def served(folded, dtype, block_bytes=1 << 14):
    pool = Pool(1 << 16, 2, len(WHOLE), "cpu", dtype)
    pool.register("t", image.pack(folded, dtype), block_bytes=block_bytes)
    pool.ensure(["t"])
    return pool


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ids", [(95, 3, 64, 63, 40), (95, 70), (1,)])  # of both ranks, of the second, of the first
def test_the_ranks_rows_and_logits_make_up_the_whole(ids, dtype):
    tokens = own(*ids)
    adapter = Adapter("", {EMBEDDING: Slots(tokens=tokens), LM_HEAD: Slots(tokens=tokens)})
    want = MODEL.weights[EMBEDDING].to(dtype).clone()
    want[tokens.ids] = tokens.rows.to(dtype)
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    total, logits, all_ids = torch.zeros_like(want), [], torch.arange(VOCAB)
    pairs = list(zip(shards(EMBEDDING, 2), shards(LM_HEAD, 2)))
    live = set()
    for (_, embedding), (_, head) in pairs:
        folded = fold_adapter(adapter, {EMBEDDING: embedding, LM_HEAD: head})
        pool = served(folded, dtype)
        live.add(pool.live[0])
        first, last = embedding.inputs
        local = (all_ids - first).masked_fill((all_ids < first) | (all_ids >= last), 0)
        y = MODEL.weights[EMBEDDING].to(dtype)[first:last][local]
        ops.token_rows(local, torch.zeros(VOCAB, dtype=torch.int32), pool.arena, pool.table, embedding.module, y)
        total += y.masked_fill(((all_ids < first) | (all_ids >= last))[:, None], 0)  # as the layer does
        part = x @ MODEL.weights[LM_HEAD].to(dtype)[slice(*head.outputs)].T
        ops.token_logits(x, torch.zeros(4, dtype=torch.int32), pool.arena, pool.table, head.module, part)
        logits.append(part)
    assert torch.equal(total, want)  # bit for bit
    assert live == {layout.DELTA}  # also of a rank without any of the tokens
    base = x @ MODEL.weights[LM_HEAD].to(dtype).T
    got, columns = torch.cat(logits, 1), tokens.ids
    exact = x.double() @ tokens.rows.to(dtype).double().T
    torch.testing.assert_close(got[:, columns].double(), exact, rtol=torch.finfo(dtype).eps, atol=2e-5)
    kept = torch.ones(VOCAB, dtype=torch.bool)
    kept[columns] = False
    torch.testing.assert_close(got[:, kept], base[:, kept])


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_image_keeps_the_rows_of_a_tied_pair_once(dtype):
    tokens = own(2, 50, 7)
    folded = fold_adapter(Adapter("", {EMBEDDING: Slots(tokens=tokens), LM_HEAD: Slots(tokens=tokens)}), WHOLE)
    packed = image.pack(folded, dtype)
    places = packed.entries[sorted(folded), layout.TOKENS]
    assert places[0] == places[1] >= 0 and packed.rank_max == 0 and packed.live == layout.DELTA
    assert packed.nbytes == layout.round_up(32 + 16 + 3 * WIDTH * dtype.itemsize, layout.BLOCK)
    assert live_slots([f for _, f in folded.values()]) == ["rows"]
    for found in image.unpack(packed, {t.module: t for t, _ in folded.values()}).values():
        assert torch.equal(found.tokens.ids, tokens.ids)
        assert torch.equal(found.tokens.rows, tokens.rows.to(dtype).float())


def test_a_head_behind_an_own_norm_has_rows_times_the_norm():
    before, after = torch.full((WIDTH,), 2.0), torch.full((WIDTH,), 3.0)
    targets = WHOLE | {LM_HEAD: replace(WHOLE[LM_HEAD], norm="model.norm", norm_weight=lambda: before)}
    tokens = own(5)
    modules = {EMBEDDING: Slots(tokens=tokens), LM_HEAD: Slots(tokens=tokens)}
    folded = fold_adapter(Adapter("", modules, {"model.norm": after}), targets)
    found = {t.path: f for t, f in folded.values()}
    torch.testing.assert_close(found[LM_HEAD].tokens.rows, 1.5 * tokens.rows)
    assert torch.equal(found[EMBEDDING].tokens.rows, tokens.rows)
    places = image.pack(folded, torch.float32).entries[sorted(folded), layout.TOKENS]
    assert places[0] != places[1]


def test_only_a_vocabulary_has_rows():
    q = "model.layers.0.self_attn.q_proj"
    with refused("unsupported_method", q, "embedding or output head"):
        fold_adapter(Adapter("", {q: Slots(tokens=own(1))}), WHOLE)
    with refused("bad_shape", LM_HEAD, "rows", "(1, 8)", f"(1, {WIDTH})"):
        fold_adapter(Adapter("", {LM_HEAD: Slots(tokens=Tokens(torch.tensor([1]), torch.ones(1, 8)))}), WHOLE)


def test_a_plan_without_ranks_serves_rows_beside_a_lora():
    """Rows need no room in v; those of a neighbour with a rank are none of theirs."""
    pool = Pool(1 << 16, 4, len(WHOLE), "cpu", torch.float32, poison=True)
    lora = Slots(terms=(Term(torch.ones(8, VOCAB), torch.ones(WIDTH, 8)),))
    for name, slots in {"rows": Slots(tokens=own(5)), "lora": lora}.items():
        pool.register(name, image.pack(fold_adapter(Adapter("", {EMBEDDING: slots}), WHOLE), torch.float32))
    pool.ensure(["rows", "lora"])
    plan = BatchPlan(8, pool)
    plan.build([pool.slot_of("rows"), -1, pool.slot_of("lora")], 8)
    ids, y, v = torch.tensor([5, 5, 5]), torch.zeros(3, WIDTH), torch.full((1, 3, 8), torch.nan)
    common, module = (pool.arena, pool.table), WHOLE[EMBEDDING].module
    ops.lookup(ids, *common, plan.words, 8, module, 0, VOCAB, y.dtype, v)
    ops.expand(v, None, plan.row_slot, *common, pool.sets, plan.words, 8, module, [0, WIDTH], [0], y)
    ops.token_rows(ids, plan.row_slot, *common, module, y)
    assert torch.equal(y, torch.stack([own(5).rows[0], torch.zeros(WIDTH), torch.full((WIDTH,), 8.0)]))


# Readers

TIED = BaseShape(BASE, dtype=torch.float32, vocab_size=32, tied=True)
ROWS, WRAPPED = "trainable_tokens_delta", "token_adapter.trainable_tokens_delta"
ALONE = {"peft_type": "TRAINABLE_TOKENS", "target_modules": ["embed_tokens"], "token_indices": [9, 3]}


def rows(count=2, seed=0, width=16):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def test_rows_are_put_in_the_order_of_their_ids():
    modules = read(ALONE, {key(ROWS, EMBED): rows()}).modules
    assert list(modules) == [EMBED] and modules[EMBED].tokens.ids.tolist() == [3, 9]
    assert torch.equal(modules[EMBED].tokens.rows, rows().flip(0))


def test_a_tied_head_follows_with_and_without_a_copy_in_the_file():
    for more in ({}, {key(ROWS, HEAD): rows()}):
        modules = read(ALONE, {key(ROWS, EMBED): rows()} | more, TIED).modules
        assert modules[EMBED].tokens is modules[HEAD].tokens
    with refused("wrong_base", HEAD, ROWS, "tied"):
        read(ALONE, {key(ROWS, EMBED): rows(), key(ROWS, HEAD): rows(seed=1)}, TIED)
    modules = read(ALONE | {"target_modules": ["lm_head"]}, {key(ROWS, HEAD): rows()}, TIED).modules
    assert list(modules) == [HEAD]


def test_lora_s_rows_are_no_target_of_its_terms():
    file = lora_tensors() | {key(WRAPPED, EMBED): rows()}
    config = lora_config(trainable_token_indices=[9, 3])
    assert sorted(read(config, file).modules) == sorted([EMBED, PATH])
    assert sorted(read(config, file, TIED).modules) == sorted([EMBED, HEAD, PATH])
    apart = lora_config(trainable_token_indices={"embed_tokens": [9, 3], "lm_head": [1]})
    modules = read(apart, file | {key(WRAPPED, HEAD): rows(1)}, TIED).modules
    assert modules[HEAD].tokens.ids.tolist() == [1] and modules[EMBED].tokens.ids.tolist() == [3, 9]
    both = lora_config(trainable_token_indices={"embed_tokens": [9, 3], "lm_head": [9, 3]})
    modules = read(both, file, TIED).modules
    assert modules[HEAD].tokens is modules[EMBED].tokens


def test_without_a_base_nobody_knows_whether_the_head_follows():
    with pytest.raises(NeedsBase):
        read(ALONE, {key(ROWS, EMBED): rows()}, None)


def test_a_tied_head_that_cannot_be_adapted_is_refused():
    no_head = BaseShape({k: v for k, v in BASE.items() if k != HEAD}, dtype=torch.float32, vocab_size=32, tied=True)
    with refused("wrong_base", "tied to the embedding"):
        read(ALONE, {key(ROWS, EMBED): rows()}, no_head)


@pytest.mark.parametrize("config, tensors, code, fragments", [
    ({"token_indices": [9, 32]}, {}, "wrong_base", ["token_indices", "32", "ends at 31"]),
    ({"token_indices": [9, -3]}, {}, "bad_config", ["token_indices", "-3"]),
    ({"token_indices": [9, True]}, {}, "bad_config", ["token_indices"]),
    ({"token_indices": [9, 9]}, {}, "bad_config", ["token_indices", "twice"]),
    ({"token_indices": {"a": [1]}}, {}, "bad_config", ["token_indices", "list"]),
    ({"token_indices": [9]}, {}, "bad_shape", [EMBED, ROWS, "(2, 16)", "(1, 16)"]),
    ({}, {key(ROWS, EMBED): rows(width=8)}, "bad_shape", [EMBED, ROWS, "(2, 8)", "(2, 16)"]),
    ({"target_modules": None}, {key(ROWS): rows()}, "unsupported_method", [PATH, ROWS, "embedding or output head"]),
    ({}, {key(ROWS, "score"): rows()}, "unknown_key", ["score"]),
    ({}, {key("bias", EMBED): rows(1)[0]}, "unknown_key", [EMBED, "bias"]),
    ({"modules_to_save": ["lm_head"]}, {}, "bad_config", ["modules_to_save", "only norms"]),
    ({"invented_number": 1}, {}, "bad_config", ["invented_number"]),
])  # fmt: skip
def test_refusals_alone(config, tensors, code, fragments):
    with refused(code, *fragments):
        read(ALONE | config, {key(ROWS, EMBED): rows()} | tensors)


TERMS = {key("lora_embedding_A", EMBED): torch.ones(4, 32), key("lora_embedding_B", EMBED): torch.ones(16, 4)}
ON_HEAD = {key("lora_A.weight", HEAD): torch.ones(4, 16), key("lora_B.weight", HEAD): torch.ones(32, 4)}


@pytest.mark.parametrize("indices, tensors, base, code, fragments", [
    ([3, 5], {}, BASE, "missing_tensor", ["trainable_token_indices", "'embed_tokens'"]),
    ({"lm_head": [3, 5]}, {key(WRAPPED, EMBED): rows()}, BASE, "unknown_key", [EMBED, WRAPPED, "lm_head"]),
    ({"embed_tokens": [3, 5], "lm_head": [1]}, {key(WRAPPED, EMBED): rows()}, TIED, "missing_tensor", ["'lm_head'"]),
    (None, {key(WRAPPED, EMBED): rows()}, BASE, "unknown_key", [EMBED, WRAPPED]),
    ([3, 5], {key(WRAPPED, EMBED): rows()} | TERMS, BASE, "unsupported_method", [EMBED, "other tensors"]),
    ([3, 5], {key(WRAPPED, EMBED): rows()} | ON_HEAD, TIED, "unsupported_method", [HEAD, "other changes"]),
    ("all", {key(WRAPPED, EMBED): rows()}, BASE, "bad_config", ["trainable_token_indices", "'all'"]),
    ([3, 3], {key(WRAPPED, EMBED): rows()}, BASE, "bad_config", ["trainable_token_indices", "twice"]),
])  # fmt: skip
def test_refusals_beside_lora(indices, tensors, base, code, fragments):
    config = lora_config(trainable_token_indices=indices, target_modules=["up_proj", "embed_tokens", "lm_head"])
    if indices is None:
        config["target_modules"] = ["up_proj"]
    with refused(code, *fragments):
        read(config, lora_tensors() | tensors, base)


@pytest.mark.parametrize("base", [None, BASE])
def test_ids_have_32_bits(base):
    for wrong in (1 << 31, 1 << 63, 10**30):
        with refused("bad_config", "trainable_token_indices", str(wrong), "token ids"):
            read(lora_config(trainable_token_indices=[3, wrong]), lora_tensors() | {key(WRAPPED, EMBED): rows()}, base)


# A server

NAMES = ["trainable_tokens", "trainable_tokens_near", "trainable_tokens_head", "lora_tokens", "lora_tokens_head"]
NAMES += ["lora_tokens_both", "dora_tokens"]


@pytest.mark.parametrize("base, more", [
    ("llama", ["trainable_tokens_both", "lora_embed_head", "vera"]),
    ("llama_norms", ["lora_tokens_saves_norms", "lora_embed", "ln_tuning"]),  # tied
])  # fmt: skip
def test_a_mixed_batch_equals_peft(kit, tmp_path, base, more):
    flags = ["--scute-arena-mb", "16", "--max-loras-per-batch", "16"]
    with Server(kit.base(base), tmp_path / "server.log", *flags) as server:
        for tenant in [*NAMES, *more]:
            status, reply = server.load(tenant, kit.adapter(tenant, base))
            assert status == 200, reply
        rows = [None, *NAMES, *more, None]
        prompts = [prompt(i) for i in range(len(rows))]
        for tenant, found in zip(rows, server.logprobs(prompts, rows)):
            assert kit.error(tenant, found, base) <= TOLERANCE, tenant
            assert tenant is None or kit.effect(tenant, found, base) > (0.002 if "near" in tenant else 0.05), tenant
        for tenant, ids, answer in zip(rows, prompts, server.generate(prompts, rows, n=8)):
            assert answer["output_ids"] == kit.greedy(tenant, ids, 8, base), tenant
            (alone, _) = server.logprobs(ids, tenant)
            assert alone[len(ids) :] == answer["output_ids"][: len(alone) - len(ids)], tenant
