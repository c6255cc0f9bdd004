"""What LoRA's variants refuse of their own fields and tensors: BD-LoRA, VeLoRA, activated LoRA, QALoRA.

Each refusal has its code, and its text names the key, what was found and what is allowed.
"""

import pytest
import torch
from small_files import EMBED, PATH, key, lora_config, lora_tensors, read, refused

BD = {"target_modules_bd_b": ["up_proj"], "nblocks": 2}
VARIANT = {"velora_config": {"num_groups": 8}}


@pytest.mark.parametrize("config, code, fragments", [
    ({"use_bdlora": BD, "use_dora": True}, "bad_config", ["use_bdlora: found beside use_dora"]),
    ({"use_bdlora": BD, "lora_bias": True}, "bad_config", ["lora_bias: found beside use_bdlora"]),
    (VARIANT | {"monteclora_config": {"num_samples": 8}}, "bad_config", ["monteclora_config", "beside velora_config"]),
    (VARIANT | {"target_modules": ["embed_tokens"]}, "bad_config", [EMBED, "velora_config", "no such embedding"]),
    ({"use_bdlora": True}, "bad_config", ["use_bdlora: found True", "object"]),
    ({"use_bdlora": BD | {"new": 1}}, "bad_config", ["new: found 1"]),
    ({"use_bdlora": BD | {"nblocks": 0}}, "bad_config", ["nblocks: found 0"]),
    ({"use_bdlora": BD | {"target_modules_bd_a": [1]}}, "bad_config", ["use_bdlora", "[1, 'up_proj']"]),
    ({"use_bdlora": BD | {"target_modules_bd_a": ["mlp"]}}, "bad_config", [PATH, "use_bdlora", "both"]),
    ({"use_bdlora": BD | {"target_modules_bd_b": ["q_proj"]}}, "bad_config", [PATH, "use_bdlora", "none"]),
    ({"use_bdlora": BD | {"nblocks": 3}}, "bad_config", [PATH, "use_bdlora", "nblocks=3", "divisor of 4"]),
    ({"use_bdlora": BD, "r": 16}, "bad_shape", [PATH, "lora_A.weight", "(4, 16)", "(16, 16)"]),
    ({"use_bdlora": BD}, "bad_shape", [PATH, "lora_B.weight", "(8, 4)", "(8, 2)"]),
    ({"use_bdlora": BD | {"match_strict": False, "target_modules_bd_b": ["q"]}}, "", []),
    ({}, "unknown_key", [PATH, "lora_velora_embed"]),
    (VARIANT, "", []),
])  # fmt: skip
def test_lora_variants(config, code, fragments):
    path = EMBED if config.get("target_modules") == ["embed_tokens"] else PATH
    tensors = lora_tensors(path) | ({} if "use_bdlora" in config else {key("lora_velora_embed", path): torch.ones(8)})
    if not code:
        assert read(lora_config(**config), tensors).modules[PATH].terms[0].A.shape == (4, 16)
        return
    with refused(code, *fragments):
        read(lora_config(**config), tensors)


TOKENS = {"alora_invocation_tokens": [3, 31], "task_type": "CAUSAL_LM"}
QALORA = {"use_qalora": True, "qalora_group_size": 4}


@pytest.mark.parametrize("tokens", [[], 3, "35", {"3": 5}, [3, "5"], [True], [2.0], [[3]], [-1], [3, 32], [1] * 1025])
def test_invocation_tokens_that_no_prompt_can_have(tokens):
    with refused("bad_config", "alora_invocation_tokens: found", "list of 1 to 1024 token ids below 32"):
        read(lora_config(**TOKENS | {"alora_invocation_tokens": tokens}), lora_tensors())


def test_without_a_base_any_token_may_be_in_its_vocabulary():
    tokens = TOKENS | {"alora_invocation_tokens": [3, 10**6]}
    assert read(lora_config(**tokens), lora_tensors(), None).invocation == (3, 10**6)
    with refused("bad_config", "alora_invocation_tokens", "-1"):
        read(lora_config(**tokens | {"alora_invocation_tokens": [-1]}), lora_tensors(), None)


@pytest.mark.parametrize("config, fragments", [
    ({"use_dora": True}, ["alora_invocation_tokens: found beside use_dora"]),
    (QALORA, ["alora_invocation_tokens: found beside use_qalora"]),
    (VARIANT, ["velora_config: found beside alora_invocation_tokens"]),
    ({"kasa_config": {}}, ["alora_invocation_tokens: found beside kasa"]),
    ({"init_lora_weights": "pissa"}, ["alora_invocation_tokens: found beside pissa"]),
    ({"init_lora_weights": "mica"}, ["init_lora_weights: found mica beside alora_invocation_tokens"]),
    ({"task_type": None}, ["task_type: found None", "want CAUSAL_LM"]),
    ({"target_modules": ["embed_tokens"]}, [EMBED, "alora_invocation_tokens", "no such embedding"]),
])  # fmt: skip
def test_activated_lora_that_peft_does_not_define(config, fragments):
    path = EMBED if "target_modules" in config else PATH
    with refused("bad_config", *fragments):
        read(lora_config(**TOKENS | config), lora_tensors(path))


def test_a_bias_of_the_base_holds_before_the_invocation_too():
    bias = {key("base_layer.bias"): torch.ones(8)}
    assert read(lora_config(bias="lora_only", **TOKENS), lora_tensors()).method == "ALORA"
    with refused("bad_config", PATH, "bias: found beside alora_invocation_tokens", "before the invocation"):
        read(lora_config(bias="lora_only", **TOKENS), lora_tensors() | bias)


@pytest.mark.parametrize("config, width, code, fragments", [
    (QALORA, 4, "", []),
    (QALORA, 16, "", []),  # a layer that is not quantised
    (QALORA, 8, "bad_shape", [PATH, "lora_A.weight: found (4, 8)", "(4, 16 / 4) with use_qalora", "quantised base"]),
    (QALORA | {"qalora_group_size": 5}, 3, "bad_shape", [PATH, "lora_A.weight: found (4, 3)", "16 / 5"]),
    (QALORA | {"qalora_group_size": 0}, 4, "bad_config", ["qalora_group_size: found 0"]),
    (QALORA | {"use_dora": True}, 4, "bad_config", ["use_qalora: found beside use_dora"]),
    (QALORA | {"lora_bias": True}, 4, "bad_config", ["lora_bias: found beside use_qalora"]),
    (QALORA | {"init_lora_weights": "olora"}, 4, "bad_config", ["use_qalora: found beside olora"]),
    ({"qalora_group_size": 4}, 4, "bad_shape", [PATH, "lora_A.weight", "found (4, 4), want (4, 16)"]),
])  # fmt: skip
def test_qalora(config, width, code, fragments):
    tensors = lora_tensors() | {key("lora_A.weight"): torch.arange(4.0 * width).view(4, width)}
    if not code:
        A = read(lora_config(**config), tensors).modules[PATH].terms[0].A
        assert torch.equal(A, tensors[key("lora_A.weight")].repeat_interleave(16 // width, 1))  # (16 / 4) / 4 is 1
        return
    with refused(code, *fragments):
        read(lora_config(**config), tensors)


def test_qalora_needs_the_base_to_tell_which_layers_are_pooled():
    with refused("bad_config", "use_qalora", "want the base"):
        read(lora_config(**QALORA), lora_tensors(), None)
