"""The projections that a served model has, on one rank of several."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, ReplicatedLinear, RowParallelLinear
from torch import nn
from transformers import LlamaConfig, OPTConfig

from scute_sgl import targets
from scute_sgl.errors import AdapterError

HIDDEN, MLP, HEADS, KV_HEADS, SIZE = 64, 96, 8, 2, 8

CONFIG = LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=8)


class SiluAndMul(nn.Module):
    pass


def model(rank: int = 0, ranks: int = 1) -> nn.Module:
    """A decoder layer as SGLang builds it on this rank."""
    place = {"tp_rank": rank, "tp_size": ranks}
    attention, mlp, layer = nn.Module(), nn.Module(), nn.Module()
    attention.qkv_proj = QKVParallelLinear(HIDDEN, SIZE, HEADS, KV_HEADS, bias=True, **place)
    attention.o_proj = RowParallelLinear(HEADS * SIZE, HIDDEN, bias=True, **place)
    mlp.gate_up_proj = MergedColumnParallelLinear(HIDDEN, [MLP, MLP], bias=False, **place)
    mlp.down_proj = RowParallelLinear(MLP, HIDDEN, bias=False, **place)
    mlp.act_fn = SiluAndMul()
    layer.self_attn, layer.mlp = attention, mlp
    root = nn.Module()
    root.model = nn.Module()
    root.model.layers = nn.ModuleList([layer])
    for name, parameter in root.named_parameters():
        nn.init.normal_(parameter)
    return root


def of(root: nn.Module) -> dict:
    return {target.path.rpartition(".")[2]: target for site in targets.find_sites(root) for target in site.targets}


def test_paths_and_rows_follow_the_model():
    sites = targets.find_sites(model())
    found = [target for site in sites for target in site.targets]
    assert [t.module for t in found] == list(range(7))
    assert [t.path.removeprefix("model.layers.0.") for t in found] == [
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
        "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
    ]  # fmt: skip
    assert sites[0].columns == [0, 64, 80, 96] and sites[2].columns == [0, 96, 192]
    shape = targets.base_shape(model(), sites, torch.float32, CONFIG)
    assert shape["model.layers.0.self_attn.k_proj"] == (HIDDEN, 16) and shape["model.layers.0.mlp.down_proj"] == (MLP, HIDDEN)
    assert of(model())["down_proj"].gated_by == "model.layers.0.mlp.up_proj" and of(model())["o_proj"].gated_by == ""


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_rank_names_what_it_holds(ranks):
    for rank in range(ranks):
        found = of(model(rank, ranks))
        size, kv = HEADS * SIZE // ranks, max(1, KV_HEADS // ranks) * SIZE
        kv_rank = rank // max(1, ranks // KV_HEADS)  # with more ranks than KV heads, some hold the same
        assert found["q_proj"].outputs == (rank * size, (rank + 1) * size)
        assert found["k_proj"].outputs == found["v_proj"].outputs == (kv_rank * kv, (kv_rank + 1) * kv)
        assert found["o_proj"].inputs == (rank * size, (rank + 1) * size) and found["o_proj"].outputs == (0, HIDDEN)
        assert found["up_proj"].outputs == (rank * MLP // ranks, (rank + 1) * MLP // ranks)
        for target in found.values():
            want = target.outputs[1] - target.outputs[0], target.inputs[1] - target.inputs[0]
            assert target.weight().shape == want, target.path


def test_weights_and_biases_are_views_of_the_layer():
    root = model()
    qkv, found = root.model.layers[0].self_attn.qkv_proj, of(root)
    assert torch.equal(found["k_proj"].weight(), qkv.weight[64:80]) and torch.equal(found["k_proj"].bias(), qkv.bias[64:80])
    assert found["k_proj"].weight().data_ptr() == qkv.weight[64:80].data_ptr()
    assert found["up_proj"].bias() is None


def test_layers_that_adapters_could_not_change_exactly_stay_out():
    root = model()
    attention = root.model.layers[0].self_attn
    attention.kv_b_proj = ReplicatedLinear(HIDDEN, HIDDEN, bias=False)  # multi-head latent attention
    root.model.layers[0].mlp.gate = ReplicatedLinear(HIDDEN, 4, bias=True, skip_bias_add=True)
    assert sorted(of(root)) == ["down_proj", "gate_proj", "up_proj"]


def test_a_linear_layer_of_any_name_is_adaptable():
    root = model()
    root.model.layers[0].mlp.in_proj_ba = ReplicatedLinear(HIDDEN, 24, bias=False)
    assert of(root)["in_proj_ba"].out_features == 24 and of(root)["in_proj_ba"].path == "model.layers.0.mlp.in_proj_ba"


def test_experts_stay_out_and_the_layers_around_them_do_not():
    root = model()
    root.model.layers[0].mlp = nn.Module()
    root.model.layers[0].mlp.experts = nn.ParameterDict({"w13_weight": torch.zeros(4, 2 * MLP, HIDDEN)})
    assert sorted(of(root)) == ["k_proj", "o_proj", "q_proj", "v_proj"]
    shape = targets.base_shape(root, targets.find_sites(root), torch.float32, CONFIG)
    assert shape.unlisted == "model.layers.0.mlp.experts"


def test_every_matrix_is_listed_or_known_to_be_missing():
    root = model()
    assert targets.base_shape(root, targets.find_sites(root), torch.float32, CONFIG).unlisted == ""
    root.score = nn.Linear(HIDDEN, 2)
    assert targets.base_shape(root, targets.find_sites(root), torch.float32, CONFIG).unlisted == "score"


def test_layers_are_counted_as_hugging_face_orders_them():
    """OPT's attention begins with k there; SGLang fuses q, k, v."""
    opt = OPTConfig(
        vocab_size=64, hidden_size=16, word_embed_proj_dim=16, ffn_dim=32, num_hidden_layers=1, num_attention_heads=2
    )
    layers = targets.huggingface_layers(opt)
    names = [path.removeprefix("model.decoder.").removeprefix("layers.0.self_attn.") for path in layers]
    assert names[:6] == ["embed_tokens", "embed_positions", "k_proj", "v_proj", "q_proj", "out_proj"]
    assert layers["model.decoder.layers.0.fc1"] == (16, 32) and layers["model.decoder.embed_tokens"] == (64, 16)
    shape = targets.base_shape(model(), targets.find_sites(model()), torch.float32, CONFIG)
    assert [*shape.counted()][1:] == [*shape, "lm_head"] and shape.counted() is shape.counted()
    with pytest.raises(AdapterError, match=r"order of Hugging Face's model.*cannot be made"):
        targets.huggingface_layers(object())


def test_quantised_layers_stop_the_start():
    root = model()
    root.model.layers[0].mlp.down_proj.quant_method = type("Fp8LinearMethod", (), {})()
    with pytest.raises(ValueError, match="model.layers.0.mlp.down_proj is Fp8LinearMethod"):
        targets.find_sites(root)
