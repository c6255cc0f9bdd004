"""An adapter's own norms: the layers behind them read x * w' / w, in the fold, on a server and by PEFT."""

from dataclasses import replace

import pytest
import torch
from adapters_embed import WITH_NORMS
from fakes import FakeModel, apply_folded, apply_slots, every_combination, random_slots
from servers import TOLERANCE, Server, prompt
from small_files import BASE, PATH, key, lora_config, lora_tensors, read, refused

from scute_sgl import layout
from scute_sgl.config import norm_before, norms_of
from scute_sgl.fold import fold, fold_adapter
from scute_sgl.image import pack, unpack
from scute_sgl.slots import Adapter, BaseShape, Slots

MODEL = FakeModel()
Q_PROJ, O_PROJ = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.o_proj"
NORM, LAST = "model.layers.0.input_layernorm", "model.norm"
AFTER = "model.layers.0.post_attention_layernorm"


def targets(weight, rank=0, tp=1):
    """Those of the fake model, behind norms of this weight."""
    found = MODEL.targets(rank, tp)
    return {p: replace(t, norm=norm_before(p, "llama"), norm_weight=lambda: weight) for p, t in found.items()}


def weights(seed, spread=0.3):
    return 1 + spread * torch.randn(64, generator=torch.Generator().manual_seed(seed))


def test_every_combination_of_slots_behind_a_norm_is_its_definition():
    t = MODEL.targets()[Q_PROJ]
    x = torch.randn(3, t.in_features, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    for names in every_combination():
        if "shared" not in names:  # refused
            slots = random_slots(t, *names, "norm")
            want = apply_slots(slots, t, x)
            got = apply_folded(fold(slots, t), t, x)
            torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6, msg=lambda text: f"{names}: {text}")


@pytest.mark.parametrize("names", [(), ("terms",), ("magnitude", "terms"), ("right",), ("input_scale",), ("one_block",)])
@pytest.mark.parametrize("tp", [1, 2])
def test_all_readers_get_the_ratio_of_trained_and_base_weight(names, tp):
    before, after = weights(1), weights(2)
    x = torch.randn(3, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    modules = {Q_PROJ: random_slots(MODEL.targets()[Q_PROJ], *names)} if names else {}
    norms, total = {NORM: after, AFTER: before}, []
    parts = [targets(before, rank, tp) for rank in range(tp)]
    for part in parts:  # the products of all ranks, as a sum over them
        fold_adapter(Adapter("", modules, norms), part, lambda mine: total.append(mine) or mine)
    whole = sum(total) if total else None
    for rank, part in enumerate(parts):
        folded = fold_adapter(Adapter("", modules, norms), part, lambda _: whole, adds_bias=rank == 0)
        assert [t.norm for t, _ in folded.values()] == [NORM] * 3 + [AFTER] * 2
        for t, f in folded.values():
            if t.norm == AFTER:
                assert not f.rotation.any()  # unchanged
                continue
            slots = replace(modules.get(t.path, Slots()), norm=after.double() / before.double())
            want = apply_slots(slots, MODEL.targets()[t.path], x)[:, slice(*t.outputs)]
            torch.testing.assert_close(apply_folded(f, t, x), want, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_readers_of_one_norm_keep_one_copy(dtype):
    before, after = weights(1), weights(2)
    part = targets(before)
    folded = fold_adapter(Adapter("", {}, {NORM: after, AFTER: 2 * before, LAST: after}), part)
    image = pack(folded, dtype)
    places = image.entries[sorted(folded), layout.ROTATION]
    assert [places.tolist().count(place) for place in places] == [3, 3, 3, 2, 2, 1]
    assert image.nbytes == 3 * 64 * dtype.itemsize + -(3 * 64 * dtype.itemsize) % layout.BLOCK
    found = unpack(image, {t.module: t for t, _ in folded.values()})
    assert all(torch.equal(found[m].rotation, f.rotation.to(dtype).float()) for m, (_, f) in folded.items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_file_of_float32_is_rounded_as_the_base_s_norm_is(dtype):
    """As PEFT's load does: an untrained norm of such a file changes nothing."""
    exact = weights(1)
    (rotation,) = {f.rotation.abs().max().item() for _, f in fold_adapter(
        Adapter("", {}, {NORM: exact}), targets(exact.to(dtype))).values()}  # fmt: skip
    assert rotation == 0


def test_a_zero_has_a_ratio_only_if_it_stays_zero():
    before, after = weights(1), weights(2)
    before[7] = after[7] = 0
    fold_adapter(Adapter("", {}, {NORM: after}), targets(before))
    after[7] = 0.5
    with refused("wrong_base", NORM, "input 7: found 0.5 over the base's 0"):
        fold_adapter(Adapter("", {}, {NORM: after}), targets(before))


def test_matrices_that_tenants_share_cannot_take_a_norm():
    slots = {Q_PROJ: random_slots(MODEL.targets()[Q_PROJ], "shared")}
    with refused("unsupported_method", Q_PROJ, "shared", NORM):
        fold_adapter(Adapter("VERA", slots, {NORM: weights(2)}), targets(weights(1)))
    slots = {O_PROJ: random_slots(MODEL.targets()[O_PROJ], "shared")}
    fold_adapter(Adapter("VERA", slots, {NORM: weights(2)}), targets(weights(1)))


def test_a_norm_counts_only_if_all_its_readers_are_targets():
    found = targets(weights(1))
    assert norms_of(found.values()) == {NORM: 64, AFTER: 64, LAST: 64}
    del found["model.layers.0.self_attn.v_proj"], found["lm_head"]
    assert norms_of(found.values()) == {AFTER: 64}
    with refused("unknown_key", LAST, "no adaptable layer"):
        fold_adapter(Adapter("", {}, {LAST: weights(1)}), found)
    assert norm_before(Q_PROJ, "gemma2") == norm_before(Q_PROJ, None) == norm_before(O_PROJ, "llama") == ""


NORMED = BaseShape(BASE, dtype=torch.float32, vocab_size=32, norms={LAST: 16})
SAVED = {key("weight", LAST): torch.ones(16)}


def test_a_norm_is_read_with_and_without_a_base():
    for base in (NORMED, None):
        adapter = read(lora_config(modules_to_save=["norm"]), lora_tensors() | SAVED, base)
        assert list(adapter.modules) == [PATH] and list(adapter.norms) == [LAST]


Q_NORM = "model.layers.0.self_attn.q_norm"


@pytest.mark.parametrize("config, tensors, code, fragments", [
    ({"modules_to_save": ["lm_head"]}, {key("weight", "lm_head"): torch.ones(32, 16)}, "bad_config",
     ["modules_to_save: found ['lm_head']", "only norms"]),
    ({"modules_to_save": ["norm", "embed_tokens"]}, SAVED, "bad_config", ["modules_to_save", "only norms"]),
    ({"modules_to_save": "norm"}, SAVED, "bad_config", ["modules_to_save"]),
    ({"modules_to_save": [3]}, SAVED, "bad_config", ["modules_to_save"]),
    ({"modules_to_save": ["norm"]}, {}, "missing_tensor", ["modules_to_save", "'norm'"]),
    ({"modules_to_save": ["norm"]}, {key("weight", LAST): torch.ones(8)}, "bad_shape", [LAST, "(8,)", "(16)"]),
    ({"modules_to_save": ["norm"]}, SAVED | {key("bias", LAST): torch.ones(16)}, "unknown_key", [LAST, "bias"]),
    ({"modules_to_save": ["q_norm"]}, {key("weight", Q_NORM): torch.ones(16)}, "unknown_key",
     [f"{Q_NORM}.weight", "no adaptable module", "plain RMSNorm that adaptable layers alone read"]),
])  # fmt: skip
def test_refusals(config, tensors, code, fragments):
    with refused(code, *fragments):
        read(lora_config(**config), lora_tensors() | tensors, NORMED)


LN = {"peft_type": "LN_TUNING", "target_modules": None}


@pytest.mark.parametrize("config, tensors, code, fragments", [
    ({}, {key("ln_tuning_layers.weight"): torch.ones(8, 16)}, "unsupported_method", [PATH, "not a norm"]),
    ({}, {key("ln_tuning_layers.weight", LAST): torch.ones(1, 16)}, "bad_shape", [LAST, "(1, 16)", "(16)"]),
    ({}, {key("ln_tuning_layers.bias", LAST): torch.ones(16)}, "missing_tensor", [LAST, "weight"]),
    ({}, {key("ln_tuning_layers.weight", Q_NORM): torch.ones(16)}, "unknown_key", [Q_NORM]),
    ({}, {}, "missing_tensor", ["no tensor of LN_TUNING"]),
    ({"target_modules": ["input_layernorm"]}, {key("ln_tuning_layers.weight", LAST): torch.ones(16)}, "unknown_key",
     [LAST, "leave it out"]),
    ({"bias": "all"}, {key("ln_tuning_layers.weight", LAST): torch.ones(16)}, "bad_config", ["bias"]),
])  # fmt: skip
def test_refusals_of_ln_tuning(config, tensors, code, fragments):
    with refused(code, *fragments):
        read(LN | config, tensors, NORMED)


def test_a_mixed_batch_on_norms_that_are_not_one_equals_peft(kit, tmp_path):
    base, tenants = "llama_norms", [*WITH_NORMS, "ln_tuning", "ln_tuning_near", "lora"]
    flags = ["--scute-arena-mb", "16", "--max-loras-per-batch", "16"]
    with Server(kit.base(base), tmp_path / "server.log", *flags) as server:
        for tenant in tenants:
            status, reply = server.load(tenant, kit.adapter(tenant, base))
            assert status == 200, reply
        status, reply = server.load("refused", kit.adapter("vera_q_saves_norms", base))
        assert status == 400 and "[unsupported_method]" in reply["error_message"]
        rows = [None, *tenants, None]
        prompts = [prompt(i) for i in range(len(rows))]
        for tenant, served in zip(rows, server.logprobs(prompts, rows)):
            assert kit.error(tenant, served, base) <= TOLERANCE, tenant
            assert tenant is None or kit.effect(tenant, served, base) > (0.002 if "near" in tenant else 0.05), tenant
        for tenant, ids, answer in zip(rows, prompts, server.generate(prompts, rows, n=8)):
            assert answer["output_ids"] == kit.greedy(tenant, ids, 8, base), tenant


def test_hidden_states_that_are_given_out_keep_the_last_norm_the_base_s(kit, tmp_path):
    with Server(kit.base(), tmp_path / "server.log", "--enable-return-hidden-states") as server:
        status, reply = server.load("last", kit.adapter("ln_tuning_last"))
        assert status == 400 and "[unknown_key]" in reply["error_message"] and LAST in reply["error_message"]
        assert server.load("one", kit.adapter("ln_tuning_one"))[0] == 200
        assert kit.error("ln_tuning_one", server.logprobs(prompt(1), "one")) <= TOLERANCE
