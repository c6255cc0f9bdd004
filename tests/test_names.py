"""Which adapter a request means, on every endpoint that can name one."""

from __future__ import annotations

import pytest
from servers import prompt


@pytest.mark.parametrize("name", ["lora", "tiny:lora", "default:lora"])
def test_names_of_a_tenant(server, kit, loaded, name):
    loaded("lora")
    want = kit.greedy("lora", prompt(5), 4)
    assert server.generate(prompt(5), name, n=4)["output_ids"] == want
    check_completions(server, name, want)


@pytest.mark.parametrize("name", ["tiny", "", "default"])
def test_names_of_the_base(server, kit, loaded, name):
    loaded("lora")
    want = kit.greedy(None, prompt(5), 4)
    assert server.generate(prompt(5), name, n=4)["output_ids"] == want
    check_completions(server, name, want)


@pytest.mark.parametrize("name", ["a:b", "org/sql", "o_proj", "tiny2:lora"])
def test_an_adapter_may_have_any_name_that_is_not_the_bases(server, kit, name):
    assert server.load(name, kit.adapter("lora"))[0] == 200
    want = kit.greedy("lora", prompt(5), 4)
    for model in (name, f"tiny:{name}"):
        check_completions(server, model, want)
    assert server.ok(f"/v1/models/{name}")["id"] == name
    assert server.unload(name)[0] == 200


@pytest.mark.parametrize("name", ["nobody", "tiny:nobody", "tiny:", "junk:lora", "a/../../b", "lora:lora"])
def test_other_names_are_not_found(server, loaded, name):
    loaded("lora")
    assert server.call("/generate", {"input_ids": prompt(5), "lora_path": name})[0] == 404
    assert server.call("/generate", {"input_ids": prompt(5), "lora_path": name, "stream": True})[0] == 404
    assert server.call("/generate", {"input_ids": [prompt(5)] * 2, "lora_path": ["lora", name]})[0] == 404
    other = [
        ("/v1/score", {"query": prompt(5), "items": [[5]], "label_token_ids": [7]}),
        ("/v1/embeddings", {"input": "w5"}),
        ("/v1/rerank", {"query": "w5", "documents": ["w6"]}),
        ("/api/chat", {"messages": [{"role": "user", "content": "w5"}]}),
        ("/api/generate", {"prompt": "w5"}),
    ]
    for path, body in [*completions(name, prompt(5), 4), *((p, b | {"model": name}) for p, b in other)]:
        status, reply = server.call(path, body)
        assert status == 404 and "refused [not_found]" in str(reply), path


@pytest.mark.parametrize("model", [5, ["lora"], {"lora": 1}])
def test_a_name_is_text(server, model):
    """Rerank's schema has no model, so nothing but the plugin looks at its type."""
    status, reply = server.call("/v1/rerank", {"model": model, "query": "w5", "documents": ["w6"]})
    assert status == 400 and "found no text, want a name" in str(reply)


def test_models_are_listed_and_answered_one_by_one(server, loaded):
    loaded("lora", "dora")
    base, *adapters = server.ok("/v1/models")["data"]
    assert [card["id"] for card in adapters] == ["lora", "dora"] and adapters[0]["parent"] == base["id"]
    for card in (base, *adapters):
        answer = server.ok(f"/v1/models/{card['id']}")
        assert answer | {"created": 0} == card | {"created": 0}
    assert server.ok("/v1/models/tiny:dora")["id"] == "dora"
    status, reply = server.call("/v1/models/nobody")
    assert status == 404 and "adapter 'nobody' refused [not_found]" in str(reply)


def test_lists_of_adapters(server, kit, loaded):
    loaded("lora", "oft")
    answers = server.generate([prompt(5)] * 3, ["lora", None, "oft"], n=4)
    assert [a["output_ids"] for a in answers] == [kit.greedy(a, prompt(5), 4) for a in ("lora", None, "oft")]
    for paths in (["lora"], ["lora"] * 4, []):
        assert server.call("/generate", {"input_ids": [prompt(5)] * 3, "lora_path": paths})[0] == 400
    assert server.call("/generate", {"input_ids": prompt(5), "lora_path": ["lora"]})[0] == 400


def test_model_and_lora_path_may_not_contradict(server, loaded):
    loaded("lora", "oft")
    body = {"model": "lora", "prompt": prompt(5), "max_tokens": 2}
    assert server.call("/v1/completions", body | {"lora_path": "lora"})[0] == 200
    assert server.call("/v1/completions", body | {"lora_path": "oft"})[0] == 400


def test_an_id_in_the_body_chooses_nothing(server, kit, loaded):
    loaded("lora")
    assert server.generate(prompt(5), None, n=4, lora_id="0" * 32)["output_ids"] == kit.greedy(None, prompt(5), 4)


def check_completions(server, model: str, want: list[int]) -> None:
    for path, body in completions(model, prompt(5), len(want)):
        if model or path != "/v1/messages":  # SGLang asks for a name there
            words = reply_text(server.ok(path, body)).split()
            # Responses keeps back some of its tokens.
            assert words and words == [f"w{i}" for i in want][: len(words)], path


def completions(model: str, ids: list[int], n: int) -> list[tuple[str, dict]]:
    """The endpoints that complete a prompt, greedily."""
    text = " ".join(f"w{i}" for i in ids)
    messages = [{"role": "user", "content": text}]
    return [
        ("/v1/completions", {"model": model, "prompt": ids, "max_tokens": n, "temperature": 0}),
        ("/v1/chat/completions", {"model": model, "messages": messages, "max_tokens": n, "temperature": 0}),
        ("/v1/messages", {"model": model, "messages": messages, "max_tokens": n, "temperature": 0}),
        ("/v1/responses", {"model": model, "input": text, "max_output_tokens": n, "temperature": 0}),
    ]


def reply_text(reply: dict) -> str:
    if "choices" in reply:
        choice = reply["choices"][0]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
    else:
        content = reply["content"] if "content" in reply else reply["output"][0]["content"]
        text = content[0]["text"]
    return text.strip()
