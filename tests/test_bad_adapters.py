"""What must not be loaded, over HTTP: refused with its code and what is wrong, and nothing else changes."""

from __future__ import annotations

import base64
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from make_adapters import edit_config
from safetensors.torch import load_file, save_file
from servers import prompt

WEIGHTS = "adapter_model.safetensors"
Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj."


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    """Spoils an adapter's tensors."""

    def spoil(folder: Path) -> None:
        found = load_file(folder / WEIGHTS)
        change(found)
        save_file({key: tensor.contiguous() for key, tensor in found.items()}, folder / WEIGHTS)

    return spoil


def config(**fields) -> Callable[[Path], None]:
    return lambda folder: edit_config(folder, **fields)


def cut(keep: int) -> Callable[[Path], None]:
    return lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:keep])


def only_a_pickle(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "adapter_model.bin").write_bytes(pickle.dumps({}))


def rank_of_a_giant(found: dict[str, torch.Tensor]) -> None:
    for key, tensor in found.items():
        found[key] = tensor.repeat(300, 1) if "lora_A" in key else tensor.repeat(1, 300)


SPOILED = {  # what is done to a good LoRA: (how, code, what the refusal says)
    "truncated": (cut(-8), "unsafe_file", "truncated?"),
    "cut in its header": (cut(60), "unsafe_file", "not a well-formed safetensors file"),
    "not safetensors": (lambda f: (f / WEIGHTS).write_bytes(pickle.dumps([1] * 99)), "unsafe_file", "not a well-formed"),
    ".bin": (only_a_pickle, "unsafe_file", "adapter_model.bin: a pickle can run code"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "not_found", f"no {WEIGHTS}"),
    "no config": (lambda folder: (folder / "adapter_config.json").unlink(), "not_found", "no adapter_config.json"),
    "config is not JSON": (lambda f: (f / "adapter_config.json").write_text("{"), "bad_config", "not valid JSON"),
    "wrong base shapes": (
        tensors(lambda t: t.update({Q_PROJ + "lora_A.weight": torch.ones(8, 63)})),
        "bad_shape", "model.layers.0.self_attn.q_proj lora_A.weight: found (8, 63), want (8, 64)",
    ),
    "another rank than its config": (config(r=4), "bad_shape", "found (8, 96), want (4, 96)"),
    "NaN": (tensors(lambda t: t[Q_PROJ + "lora_B.weight"][3].fill_(torch.nan)), "bad_shape", "lora_B.weight: found NaN"),
    "missing tensor": (
        tensors(lambda t: t.pop(Q_PROJ + "lora_B.weight")),
        "missing_tensor", "model.layers.0.self_attn.q_proj lora_B.weight: not in the file",
    ),
    "unknown key": (
        tensors(lambda t: t.update({Q_PROJ + "lora_C.weight": torch.ones(1)})),
        "unknown_key", Q_PROJ + "lora_C.weight: the base has no adaptable module",
    ),
    "a key of no form": (
        tensors(lambda t: t.update({"lora_A": torch.ones(1)})), "unknown_key", "lora_A: not a tensor of this method",
    ),
    "unknown module": (
        tensors(lambda t: t.update({Q_PROJ.replace("q_proj", "seq_proj") + "lora_A.weight": torch.ones(8, 64)})),
        "unknown_key", "the base has no adaptable module 'model.layers.0.self_attn.seq_proj'",
    ),
    "a fused layer that the base has as parts": (
        tensors(lambda t: t.update({Q_PROJ.replace("q_proj", "qkv_proj") + "lora_A.weight": torch.ones(8, 64)})),
        "unknown_key", "the base has no adaptable module 'model.layers.0.self_attn.qkv_proj'",
    ),
    "a bias that the base lacks": (
        tensors(lambda t: t.update({Q_PROJ + "base_layer.bias": torch.ones(64)})),
        "wrong_base", "model.layers.0.self_attn.q_proj base_bias: the base layer has no bias",
    ),
    "another base weight": (
        tensors(lambda t: t.update({Q_PROJ + "base_layer.weight": torch.ones(64, 64)})),
        "wrong_base", "model.layers.0.self_attn.q_proj base_weight: the base weight in the file differs",
    ),
    "unknown peft_type": (config(peft_type="NEWLORA"), "unsupported_method", "peft_type=NEWLORA; supported: "),
    "no peft_type": (config(peft_type=...), "unsupported_method", "peft_type=None"),
    "unknown config field": (config(invented={"a": 1}), "bad_config", "invented: found {'a': 1}, want null"),
    "larger than the arena": (
        lambda f: (tensors(rank_of_a_giant)(f), edit_config(f, r=2400)),
        "too_large", "the arena has 8388608: raise --scute-arena-mb",
    ),
    "a file that no arena could hold": (
        lambda folder: open(folder / WEIGHTS, "ab").truncate(1 << 34),
        "too_large", f"found {1 << 34} bytes, want at most",
    ),
}  # fmt: skip

TENANTS = ["lora", "dora", "vera"]


@pytest.fixture
def before(server, loaded):
    """Tenants that stay loaded: before() tells whether they still answer the same bytes."""
    loaded(*TENANTS)

    def ask():
        return [server.logprobs(prompt(5), name, n=4) for name in [None, *TENANTS]]

    answers = ask()
    return lambda: all(a == b and torch.equal(x, y) for (a, x), (b, y) in zip(answers, ask(), strict=True))


@pytest.mark.parametrize("what", SPOILED)
def test_a_bad_adapter_is_refused_and_changes_nothing(server, kit, before, tmp_path, what):
    spoil, code, text = SPOILED[what]
    folder = Path(shutil.copytree(kit.adapter("lora"), tmp_path / "sql"))
    spoil(folder)
    status, reply = server.load("sql", str(folder))
    assert status == (404 if code == "not_found" else 400), reply
    message = reply["error_message"]
    assert message.startswith(f"adapter 'sql' refused [{code}]: ") and text in message, message
    assert not reply["success"] and list(reply["loaded_adapters"]) == TENANTS
    assert before() and list(server.state()["tenants"]) == TENANTS


def test_what_a_file_says_in_no_characters_is_refused_in_text(server, kit, before, tmp_path):
    """JSON may hold half of a surrogate pair, which no reply can."""
    folder = Path(shutil.copytree(kit.adapter("lora"), tmp_path / "sql"))
    edit_config(folder, peft_type="\ud800")
    status, reply = server.load("sql", str(folder))
    assert status == 400 and "peft_type=\\ud800" in reply["error_message"] and before()


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1}, {"temperature": 1, "top_p": 0.5, "n": 2}])
@pytest.mark.parametrize("tokens", [1, 4])
def test_an_overflow_ends_its_own_requests_only(server, kit, before, tmp_path, sampling, tokens):
    """Every value of the file is finite, so only the products show it; a sampler that meets NaN ends the server."""
    folder = Path(shutil.copytree(kit.adapter("lora"), tmp_path / "huge"))
    tensors(lambda found: found.update({key: tensor * 1e30 for key, tensor in found.items()}))(folder)
    assert server.load("huge", str(folder))[0] == 200
    body = {"sampling_params": {"max_new_tokens": tokens} | sampling, "return_logprob": True}
    try:
        status, reply = server.call("/generate", body | {"input_ids": prompt(5), "lora_path": "huge"})
        assert status == 400 and "adapter 'huge' refused [bad_config]: found logits that are not finite" in str(reply)
        body["sampling_params"] |= {"n": 1}
        answers = [server.call("/generate", body | {"input_ids": prompt(5), "lora_path": name})[0] for name in TENANTS]
        assert answers == [200] * len(TENANTS) and before()
    finally:
        assert server.unload("huge")[0] == 200


@pytest.mark.parametrize(
    ("name", "path", "status", "code"),
    [
        ("lora", "lora", 409, "in_use"),
        ("new", "/nowhere", 404, "not_found"),
        ("new", "org/repo", 404, "not_found"),  # a hub id; nothing is downloaded
        ("new", "", 404, "not_found"),
        ("default", "lora", 400, "bad_config"),
        ("tiny", "lora", 400, "bad_config"),
        ("tiny:new", "lora", 400, "bad_config"),
        ("", "lora", 400, "bad_config"),
    ],
)
def test_a_bad_name_or_path_is_refused(server, kit, before, name, path, status, code):
    found, reply = server.load(name, kit.adapter(path) if path == "lora" else path)
    assert found == status and reply["error_message"].startswith(f"adapter '{name}' refused [{code}]: "), reply
    assert list(reply["loaded_adapters"]) == TENANTS and before()


def test_tensors_over_the_network_are_refused(server, before):
    """They are a pickle."""
    body = {"lora_name": "sql", "config_dict": {}, "serialized_named_tensors": [base64.b64encode(pickle.dumps({})).decode()]}
    status, reply = server.call("/load_lora_adapter_from_tensors", body)
    assert status == 400 and "adapter 'sql' refused [unsafe_file]" in str(reply) and before()


@pytest.mark.parametrize("way", ["disk", "tensor", "distributed", "ipc"])
def test_a_changed_base_is_refused_while_a_fold_depends_on_it(server, kit, before, way):
    weights = [("model.norm.weight", torch.zeros(64))]
    body = {
        "disk": {"model_path": kit.base()},
        "tensor": {"serialized_named_tensors": [base64.b64encode(pickle.dumps(weights)).decode()]},
        "distributed": {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[64]]},
        "ipc": {"zmq_handles": {}},
    }
    in_session = way != "disk" and server.call("/begin_weight_update", {})[0] == 200  # as newer releases want it
    status, reply = server.call(f"/update_weights_from_{way}", body[way])
    if in_session:
        server.ok("/end_weight_update", {})
    text = "adapter 'dora' refused [in_use]: its folded tensors depend on"
    if in_session and way == "distributed":
        text = "weight_update_group"  # those releases first receive the weights, and nobody sends any here
    assert status == 400 and text in reply["message"], reply
    assert before()


@pytest.mark.parametrize("ids", [[-1], [5, -3, 7], [], [[]], [[5], []], [[], [5]], [[5], [-1]]])
@pytest.mark.parametrize("name", [None, "alora"])
def test_prompts_that_would_end_the_server_are_refused(server, before, loaded, ids, name):
    loaded("alora")
    body = {"input_ids": ids, "lora_path": name, "sampling_params": {"max_new_tokens": 2}}
    status, reply = server.call("/generate", body)
    assert status == 400 and "input_ids" in str(reply), reply
    assert before()
