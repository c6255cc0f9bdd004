"""Which projections of a loaded base model adapters may change, by the module paths that checkpoints use.

SGLang fuses q, k and v, and gate and up, into one layer each; a :class:`Site` is such a layer with the targets
that it holds. A layer of a kind that is not known here to call its linear method on plain activations stays out,
and an adapter that names it is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from sglang.srt.layers.utils import get_layer_id
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from transformers import PretrainedConfig

from scute_sgl.config import huggingface_layers, norm_before, norms_of
from scute_sgl.slots import BaseShape, Target

UNQUANTIZED = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
GATED_ACTIVATIONS = ("SiluAndMul", "GeluAndMul")  # act(gate) * up, element by element


@dataclass(frozen=True)
class Site:
    """One layer of the served model. Target i owns its output columns [columns[i], columns[i + 1])."""

    name: str
    layer: torch.nn.Module
    targets: tuple[Target, ...]

    @property
    def module(self) -> int:
        """Row of the device table of the first target; the others follow."""
        return self.targets[0].module

    @property
    def columns(self) -> list[int]:
        bounds = [0]
        for target in self.targets:
            bounds.append(bounds[-1] + target.outputs[1] - target.outputs[0])
        return bounds


@dataclass(frozen=True)
class _Part:
    """A slice of a layer: its HF name, full output features, and first output and number of them on this rank."""

    name: str
    outputs: int
    begin: int
    size: int


def find_sites(model: torch.nn.Module) -> list[Site]:
    """All adaptable layers in the model's order. ValueError for a quantised one: adapters would not be exact."""
    untie_head(model)
    applies = getattr(model, "should_apply_lora", lambda name: True)
    sites: list[Site] = []
    for name, layer in model.named_modules():
        if isinstance(layer, LinearBase):
            if not applies(name) or get_layer_id(name) is None:
                continue
            kind, inputs, parts = _linear(model, name, layer)
        else:
            kind, inputs, parts = _vocabulary(name, layer)
        if not parts:
            continue
        _check_unquantised(name, layer)
        first = sum(len(site.targets) for site in sites)
        sites.append(Site(name, layer, tuple(_targets(model, name, layer, kind, inputs, parts, first))))
    return sites


def base_shape(model: torch.nn.Module, sites: list[Site], dtype: torch.dtype, config: PretrainedConfig) -> BaseShape:
    """What readers may know of the model; ``sites`` are those of :func:`find_sites`, not yet attached; ``config`` is
    Hugging Face's."""
    shapes = {t.path: (t.in_features, t.out_features) for site in sites for t in site.targets}
    listed = {id(site.layer) for site in sites}
    unlisted = (name for name, layer in model.named_modules() if id(layer) not in listed and _has_matrix(layer))
    counted = functools.cache(lambda: huggingface_layers(config))  # few methods ask
    norms = norms_of(t for site in sites for t in site.targets)
    return BaseShape(
        shapes, dtype=dtype, vocab_size=config.vocab_size, unlisted=next(unlisted, ""), counted=counted, norms=norms,
        tied=bool(config.tie_word_embeddings),
    )  # fmt: skip


def _has_matrix(layer: torch.nn.Module) -> bool:
    return any(parameter.dim() > 1 for parameter in layer.parameters(recurse=False))


def untie_head(model: torch.nn.Module) -> None:
    """Give a tied output head a module of its own that shares the embedding's weight, so that it can be adapted alone."""
    head = getattr(model, "lm_head", None)
    if type(head) is not VocabParallelEmbedding:
        return
    untied = ParallelLMHead(
        num_embeddings=head.num_embeddings,
        embedding_dim=head.embedding_dim,
        params_dtype=head.weight.dtype,
        org_num_embeddings=head.org_vocab_size,
    )
    untied.weight = head.weight
    model.lm_head = untied


def _linear(model: torch.nn.Module, name: str, layer: LinearBase) -> tuple[str, tuple[int, int], list[_Part]]:
    """Kind, this rank's inputs, and parts of a linear layer; no parts if it is not adaptable."""
    parent, _, leaf = name.rpartition(".")
    rank = getattr(layer, "tp_rank", 0)
    kind, inputs, parts = "column", (0, layer.input_size), []
    if type(layer) is QKVParallelLinear and leaf == "qkv_proj":
        kv_rank = rank // layer.num_kv_head_replicas
        for part, heads, size, place in (
            ("q_proj", layer.total_num_heads, layer.q_proj_shard_size, rank),
            ("k_proj", layer.total_num_kv_heads, layer.kv_proj_shard_size, kv_rank),
            ("v_proj", layer.total_num_kv_heads, layer.v_proj_shard_size, kv_rank),
        ):
            head_size = layer.v_head_size if part == "v_proj" else layer.head_size
            parts.append(_Part(part, heads * head_size, place * size, size))
    elif type(layer) is MergedColumnParallelLinear and leaf == "gate_up_proj" and len(layer.output_sizes) == 2:
        for part, outputs, size in zip(("gate_proj", "up_proj"), layer.output_sizes, layer.output_partition_sizes):
            parts.append(_Part(part, outputs, rank * size, size))
    elif type(layer) is ColumnParallelLinear:
        size = layer.output_size_per_partition
        parts.append(_Part(leaf, layer.output_size, rank * size, size))
    elif type(layer) is RowParallelLinear:
        size = layer.input_size_per_partition
        kind, inputs = "row", (rank * size, (rank + 1) * size)
        parts.append(_Part(leaf, layer.output_size, 0, layer.output_size))
    elif type(layer) is ReplicatedLinear:
        kind = "replicated"
        parts.append(_Part(leaf, layer.output_size, 0, layer.output_size))
    # Multi-head latent attention multiplies its weights into each other and calls some layers never or seldom.
    bypassed = hasattr(model.get_submodule(parent), "kv_b_proj")
    # A bias that the caller adds later is not in the output that adapters scale.
    late_bias = layer.skip_bias_add and layer.bias is not None
    if bypassed or late_bias or (inputs[1] - inputs[0]) % 8:
        parts = []
    return kind, inputs, parts


def _vocabulary(name: str, layer: torch.nn.Module) -> tuple[str, tuple[int, int], list[_Part]]:
    """The same for the embedding and the output head; rows past the vocabulary are padding."""
    if not isinstance(layer, VocabParallelEmbedding) or layer.num_embeddings != layer.org_vocab_size:
        return "", (0, 0), []
    if layer.org_vocab_size <= (layer.tp_size - 1) * layer.num_embeddings_per_partition:
        return "", (0, 0), []  # so small a vocabulary that padding is all that the last rank holds
    held = layer.shard_indices.org_vocab_start_index, layer.shard_indices.org_vocab_end_index
    if type(layer) is ParallelLMHead and name == "lm_head" and getattr(layer, "bias", None) is None:
        parts = [_Part("lm_head", layer.org_vocab_size, held[0], held[1] - held[0])]
        return "head", (0, layer.embedding_dim), parts if layer.embedding_dim % 8 == 0 else []
    if type(layer) is VocabParallelEmbedding and name.endswith("embed_tokens"):
        return "embedding", held, [_Part("embed_tokens", layer.embedding_dim, 0, layer.embedding_dim)]
    return "", (0, 0), []


def _targets(model, name, layer, kind, inputs, parts, first) -> Iterator[Target]:
    prefix = name.rpartition(".")[0]
    row = 0
    for position, part in enumerate(parts):
        path = f"{prefix}.{part.name}" if prefix else part.name
        # An embedding's rows are its inputs, every other layer's are its outputs.
        rows = slice(row, row + (inputs[1] - inputs[0] if kind == "embedding" else part.size))
        row, norm = rows.stop, _norm(model, path)
        yield Target(
            path=path,
            module=first + position,
            kind=kind,
            in_features=layer.org_vocab_size if kind == "embedding" else getattr(layer, "input_size", inputs[1]),
            out_features=part.outputs,
            inputs=inputs,
            outputs=(part.begin, part.begin + part.size),
            weight=lambda rows=rows: layer.weight[rows],
            bias=lambda rows=rows: None if getattr(layer, "bias", None) is None else layer.bias[rows],
            gated_by=f"{prefix}.up_proj" if _is_gated(model.get_submodule(prefix), part.name) else "",
            norm=norm,
            norm_weight=lambda norm=norm: model.get_submodule(norm).weight if norm else None,
        )


def _is_gated(mlp: torch.nn.Module, name: str) -> bool:
    activation = type(getattr(mlp, "act_fn", None)).__name__
    return name == "down_proj" and hasattr(mlp, "gate_up_proj") and activation in GATED_ACTIVATIONS


def _norm(model: torch.nn.Module, path: str) -> str:
    """The norm before a layer, if it is one that only multiplies by its weight."""
    norm = norm_before(path, getattr(getattr(model, "config", None), "model_type", None))
    try:
        layer = model.get_submodule(norm) if norm else None
    except AttributeError:
        return ""
    return norm if type(layer) is RMSNorm and layer.variance_size_override is None else ""


def _check_unquantised(name: str, layer: torch.nn.Module) -> None:
    method = type(layer.quant_method).__name__
    if method not in UNQUANTIZED or getattr(layer, "use_intel_amx_backend", False):
        method = "packed for AMX" if method in UNQUANTIZED else method
        raise ValueError(f"--lora-backend scute serves unquantised, unpacked weights only; {name} is {method}")
