"""Activated LoRA on a real server: from the last invocation in the prompt on the adapter holds, before it the base.

Expected are PEFT's answers. The server cuts prefill into chunks of 16 tokens and mixes them with decoding, and it
retracts running requests at every fifth pass, so that they are prefilled again.
"""

from __future__ import annotations

import json
import re
from array import array
from types import SimpleNamespace

import make_adapters
import numpy
import peft_answers
import pytest
import torch
from adapters_plain import INVOCATION
from servers import TOLERANCE, VOCABULARY, Server, log_table

from scute_sgl import invocation
from scute_sgl.invocation import NEVER, Activated, cache_tokens, find, mark, split

ADAPTER = "alora"
FLAGS = ["--chunked-prefill-size", "16", "--enable-mixed-chunk", "--max-loras-per-batch", "8", "--scute-arena-mb", "8"]
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "5"}


def text(seed: int, length: int) -> list[int]:
    """Random tokens without an invocation."""
    ids = torch.randint(7, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))
    return ids.tolist()


def invoked(seed: int, *at: int, length: int = 40) -> list[int]:
    ids = text(seed, length)
    for begin in at:
        ids[begin : begin + len(INVOCATION)] = INVOCATION
    return ids


# Where the invocation begins: in the middle, at the beginning, at the end, twice, nowhere, only a half of it.
PROMPTS = {
    "middle": invoked(1, 13),
    "beginning": invoked(2, 0),
    "end": invoked(3, 38),
    "twice": invoked(4, 5, 30),
    "three in a row": invoked(5, 14, 16, 18),
    "absent": text(6, 40),
    "half": [*text(7, 39), INVOCATION[0]],
    "on the edge of a chunk": invoked(8, 16, length=32),
    "across two chunks": invoked(9, 31, length=80),
}


@pytest.fixture(scope="module")
def chunked(kit, tmp_path_factory):
    log = tmp_path_factory.mktemp("alora") / "server.log"
    with Server(kit.base(), log, *FLAGS, env=RETRACT) as server:
        for name in (ADAPTER, "alora_head", "lora", "dora", "lora_head"):
            status, reply = server.load(name, kit.adapter(name))
            assert status == 200, reply
        yield server


@pytest.mark.parametrize("adapter", [ADAPTER, "alora_head"])
@pytest.mark.parametrize("where", PROMPTS)
def test_alone_it_equals_peft(chunked, kit, adapter, where):
    ids = PROMPTS[where]
    served = chunked.logprobs(ids, adapter)
    assert kit.error(adapter, served, prompt=len(ids)) <= TOLERANCE
    begin = find(ids, INVOCATION)
    effect = (served[1] - kit.logprobs(None, served[0])).abs().amax(1).tolist()
    assert max(effect[:begin], default=0) <= TOLERANCE and (begin == NEVER or max(effect[begin:]) > 0.05)


def test_mixed_with_others_it_equals_peft(chunked, kit):
    tenants = [ADAPTER, None, "lora", "alora_head", "dora", ADAPTER, "lora_head", "alora_head", ADAPTER]
    prompts = list(PROMPTS.values())
    for tenant, ids, served in zip(tenants, prompts, chunked.logprobs(prompts, tenants, n=20), strict=True):
        assert kit.error(tenant, served, prompt=len(ids)) <= TOLERANCE, (tenant, ids)
    assert re.search(r"#retracted_reqs: [1-9]", chunked.log.read_text(errors="replace"))


def test_without_log_probabilities_the_head_sees_one_row(chunked, kit):
    """And what is generated is what PEFT's own generate gives."""
    prompts = list(PROMPTS.values())
    for adapter in (ADAPTER, "alora_head"):
        answers = chunked.generate(prompts, [adapter] * len(prompts), n=24)
        for ids, answer in zip(prompts, answers, strict=True):
            assert answer["output_ids"] == peft_answers.peft_generate(kit.base(), kit.adapter(adapter), ids, 24)


def test_generated_invocations_change_nothing(chunked, kit, tmp_path):
    """What follows is the base's if the prompt lacks the tokens, whatever it says."""
    ids = text(11, 20)
    said = kit.greedy(None, ids, 12)
    folder = tmp_path / "said"
    make_adapters.write_adapter(kit.base(), folder, ADAPTER)
    make_adapters.edit_config(folder, alora_invocation_tokens=said[3:5])
    status, reply = chunked.load("said", str(folder))
    assert status == 200, reply
    before = chunked.state()["not_invoked"]
    assert chunked.generate(ids, "said", n=12)["output_ids"] == said
    assert peft_answers.peft_generate(kit.base(), str(folder), ids, 12) == said
    assert chunked.state()["not_invoked"] == before + 1
    # As a prompt the same tokens invoke it, though their keys and values are in the cache as the base's.
    again = [*ids, *said]
    served = chunked.logprobs(again, "said", n=4)
    expected = peft_answers.peft_logprobs(kit.base(), str(folder), served[0], len(again))
    assert (served[1] - expected).abs().max() <= TOLERANCE
    assert chunked.unload("said")[0] == 200


def answered(server, kit, ids: list[int], n: int = 4) -> int:
    """How many tokens of the prompt came from the prefix cache; the answer is PEFT's."""
    answer = server.generate(ids, ADAPTER, n=n, return_logprob=True, top_logprobs_num=VOCABULARY)
    answer["meta_info"]["input_top_logprobs"] = [None]
    _, table = log_table(ids, answer)
    want = kit.logprobs(ADAPTER, ids + answer["output_ids"], prompt=len(ids))[len(ids) - 1 : -1]
    assert (table - want).abs().max() <= TOLERANCE
    return answer["meta_info"]["cached_tokens"]


def test_prefixes_are_reused_on_the_same_side_of_the_invocation_only(chunked, kit):
    ids = invoked(21, 30)
    assert answered(chunked, kit, ids) == 0
    assert answered(chunked, kit, [*ids, *text(22, 9)]) >= 39  # a hit that ends after the start
    assert answered(chunked, kit, [*ids[:24], *invoked(23, 11, length=20)]) == 24  # before it, which is elsewhere now
    assert answered(chunked, kit, [*ids[:35], *INVOCATION, 9]) == 30  # the old start lies before the new one
    assert answered(chunked, kit, ids[:30]) >= 29  # and without any
    assert answered(chunked, kit, [*ids[:33], *text(24, 9)]) >= 33  # the hit after the start is still there


def test_turns_of_a_conversation_equal_peft(chunked, kit):
    """Every turn invokes the adapter anew, so what it said before is the base's to read in the next one."""
    ids = text(31, 18)
    for turn in range(4):
        ids = [*ids, *INVOCATION, *text(32 + turn, 3)]
        answered(chunked, kit, ids)
        ids = [*ids, *chunked.generate(ids, ADAPTER, n=6)["output_ids"]]


def test_inspect_tells_the_tokens(kit, capsys):
    from scute_sgl import cli

    assert cli.main(["inspect", kit.adapter(ADAPTER), "--model", kit.base(), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["method"] == "ALORA" and row["servable"] and row["invocation_tokens"] == INVOCATION
    assert cli.main(["inspect", kit.adapter(ADAPTER), "--model", kit.base()]) == 0
    assert "alora begins where a prompt has the tokens 5 6 for the last time" in capsys.readouterr().out


# Without a server


@pytest.mark.parametrize(
    ("prompt", "tokens", "begin"),
    [
        ([5, 6, 7, 5, 6], [5, 6], 3),
        ([5, 5, 5], [5, 5], 1),
        ([5, 6], [5, 6], 0),
        ([6, 5], [5, 6], NEVER),
        ([5], [5, 6], NEVER),
        ([], [5], NEVER),
        ([1, 2, 5, 6, 5], [5, 6, 7], NEVER),
    ],
)
def test_find(prompt, tokens, begin):
    assert find(array("q", prompt), tokens) == find(prompt, tokens) == begin


def test_find_equals_peft_on_random_prompts():
    from peft.tuners.lora.variants import calculate_alora_offsets

    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        prompt = torch.randint(0, 3, (1, 12), generator=generator)
        tokens = torch.randint(0, 3, (int(torch.randint(1, 5, (1,), generator=generator)),), generator=generator).tolist()
        config = {"x": SimpleNamespace(alora_invocation_tokens=tokens)}
        (offset,) = calculate_alora_offsets(config, "x", prompt)
        assert find(prompt[0].tolist(), tokens) == (NEVER if offset is None else 12 - offset), (prompt, tokens)


def rows_of(uids, lengths, prefixes, heads):
    """For each row of a batch its id, and for each row that the head sees."""
    uids, lengths, seen = split(uids, lengths, prefixes, heads)
    body = [uid for uid, n in zip(uids, lengths, strict=True) for _ in range(n)]
    return body, None if seen is None else [uid for uid, n in zip(uids, seen, strict=True) for _ in range(n)]


def test_rows_of_every_chunk_and_head_are_those_after_the_start():
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        requests = []
        for name in "abc":
            prefix, rows = (int(n) for n in torch.randint(0, 6, (2,), generator=generator))
            first = int(torch.randint(0, 14, (1,), generator=generator))
            uid = (name, Activated.at(NEVER if first > 12 else first, name), None)[first % 3]
            requests.append((uid, rows + 1, prefix, 1 + first % (rows + 1)))
        want = [
            [None if p < getattr(uid, "first", 0) else uid for p in range(prefix, prefix + rows)]
            for uid, rows, prefix, _ in requests
        ]
        body, head = rows_of(*zip(*requests))
        assert body == sum(want, [])
        assert head == sum((mine[len(mine) - seen :] for mine, (*_, seen) in zip(want, requests)), [])


def test_a_request_without_rows_stays_one():
    uids = [Activated.at(2, "a"), Activated.at(NEVER, "b")]
    assert split(uids[:1], [0], [0], [0]) == (("a",), (0,), (0,))
    assert split(uids, [0, 3], [2, 0], None) == (("a", None), (0, 3), None)


def test_a_decoding_row_is_the_adapters_unless_it_was_never_invoked():
    uids = [Activated.at(7, "a"), None, Activated.at(NEVER, "b"), "c"]
    assert rows_of(uids, [1] * 4, None, None) == (["a", None, None, "c"], None)


def test_a_request_is_marked_once_from_its_prompt_alone():
    tenants = {"a": SimpleNamespace(invocation=(5, 6)), "p": SimpleNamespace(invocation=())}

    def request(uid, ids, embeds=None):
        return SimpleNamespace(lora_id=uid, extra_key=uid, origin_input_ids=array("q", ids), input_embeds=embeds)

    req = request("a", [1, 5, 6, 2])
    assert mark(req, tenants) is False and req.lora_id == req.extra_key == "a"
    assert req.lora_id.first == req.extra_key.first == 1
    req.origin_input_ids = array("q", [0])
    assert mark(req, tenants) is False and req.lora_id.first == 1
    assert mark(request("a", [1, 5]), tenants) is True
    assert mark(request("a", [5, 6], embeds=[[0.0]]), tenants) is True
    for uid in ("p", "gone", None):
        req = request(uid, [5, 6])
        assert mark(req, tenants) is False and type(req.lora_id) is type(uid)


def test_cache_tokens_differ_from_the_start_on():
    ids = array("q", [4, 5, 6, 7])
    assert cache_tokens(ids, None) is ids and cache_tokens(ids, "a") is ids
    assert cache_tokens(ids, Activated.at(4, "a")) is ids and cache_tokens(ids, Activated.at(NEVER, "a")) is ids
    assert cache_tokens(ids, Activated.at(1, "a")) == array("q", [4, -6, -7, -8]) and ids[1] == 5
    assert numpy.asarray(invocation.cache_tokens(ids, Activated.at(0, "a"))).max() < 0
