"""scute_sgl.lang: adapters by call, in programs of SGLang's frontend, against the same requests made directly."""

from __future__ import annotations

import pytest
import sglang as sgl
from servers import prompt
from sglang.lang.backend.base_backend import BaseBackend

from scute_sgl import lang

GREEDY = {"max_tokens": 6, "temperature": 0}
TENANTS = ["lora", "dora", "ia3", "oft"]


@pytest.fixture(scope="module")
def backend(server):
    return sgl.RuntimeEndpoint(f"http://127.0.0.1:{server.port}")


def words(ids: list[int]) -> str:
    return " ".join(f"w{i}" for i in ids) + " "


def directly(server, text: str, adapter: str | None) -> str:
    sampling = {"max_new_tokens": 6, "temperature": 0}
    return server.ok("/generate", {"text": text, "lora_path": adapter, "sampling_params": sampling})["text"]


def test_calls_of_one_program_choose_their_own_adapters(server, backend, loaded):
    loaded(*TENANTS)

    @sgl.function
    def program(s, text):
        s += text
        for adapter in [*TENANTS, None]:
            s += lang.gen(str(adapter), adapter=adapter, **GREEDY)
            s += " "
        s += sgl.gen("plain", **GREEDY)

    text = words(prompt(3))
    state = program.run(text, backend=backend)
    assert state.error() is None
    for name, adapter in [*((name, name) for name in TENANTS), ("None", None), ("plain", None)]:
        want = directly(server, text, adapter)
        assert state[name] == want, name
        assert adapter is None or want != directly(server, text, None)
        text += want + " "


def test_forks_choose_their_own_adapters(server, backend, loaded):
    loaded(*TENANTS)

    @sgl.function
    def program(s, text):
        s += text
        forks = s.fork(len(TENANTS) + 1)
        for fork, adapter in zip(forks, [*TENANTS, None]):
            fork += lang.gen("answer", adapter=adapter, **GREEDY)
        s["answers"] = [fork["answer"] for fork in forks]

    text = words(prompt(4))
    assert program.run(text, backend=backend)["answers"] == [directly(server, text, a) for a in [*TENANTS, None]]


@pytest.mark.parametrize("call", ["select", "gen with choices"])
def test_a_choice_is_the_adapters(kit, backend, loaded, call):
    """Of words on which the adapter and the base disagree."""
    loaded("dora")
    ids, of_adapter, of_base = disagreement(kit, "dora")
    choices = [f"w{of_base}", f"w{of_adapter}"]

    @sgl.function
    def program(s, adapter):
        s += words(ids)
        if call == "select":
            s += lang.select("choice", choices, adapter=adapter)
        else:
            s += lang.gen("choice", choices=choices, adapter=adapter)

    assert program.run("dora", backend=backend)["choice"] == f"w{of_adapter}"
    assert program.run(None, backend=backend)["choice"] == f"w{of_base}"


def disagreement(kit, adapter: str) -> tuple[list[int], int, int]:
    """A prompt, and two words of which the adapter clearly likes the first better and the base the second."""
    for seed in range(100):
        mine, base = (kit.logprobs(name, prompt(seed))[-1] for name in (adapter, None))
        first, second = (mine - base)[3:].argmax().item() + 3, (mine - base)[3:].argmin().item() + 3
        if mine[first] - mine[second] > 0.2 and base[second] - base[first] > 0.2:
            return prompt(seed), first, second
    raise AssertionError(f"{adapter} has too little effect")


def test_batches_and_streams_and_roles(server, backend, loaded):
    loaded("lora")

    @sgl.function
    def program(s, text):
        s += sgl.user(text)
        s += sgl.assistant(lang.gen("answer", adapter="lora", **GREEDY))

    texts = [words(prompt(seed)) for seed in (5, 6, 7)]
    answers = [state["answer"] for state in program.run_batch([{"text": text} for text in texts], backend=backend)]
    streamed = program.run(texts[0], backend=backend, stream=True)
    assert "".join(streamed.text_iter("answer")) == answers[0]
    for text, answer in zip(texts, answers):
        whole = program.run(text, backend=backend).text()
        assert answer == directly(server, whole[: whole.rindex(answer)], "lora")


@pytest.mark.filterwarnings("ignore:Error in stream_executor")
def test_an_unknown_adapter_is_the_states_error(backend):
    @sgl.function
    def program(s):
        s += "w5 "
        s += lang.gen("answer", adapter="nobody", **GREEDY)

    error = program.run(backend=backend).error()
    assert isinstance(error, RuntimeError) and "adapter 'nobody' refused [not_found]" in str(error)


def test_a_backend_that_cannot_choose_raises_at_once():
    @sgl.function
    def program(s, wrap):
        s += "w5 "
        s += wrap(lang.gen("answer", adapter="lora", **GREEDY))

    for wrap in (lambda call: call, sgl.assistant):
        with pytest.raises(ValueError, match="adapter 'lora': backend Other cannot select adapters"):
            program.run(wrap, backend=Other())


class Other(BaseBackend):
    pass


def test_only_a_name_is_an_adapter():
    with pytest.raises(TypeError, match="adapter must be the name of a loaded adapter or None, found 3"):
        lang.gen("answer", adapter=3)
