"""What a base model's config.json tells of the model as SGLang serves it: projections, sizes and each rank's part.

targets.py reads the same from a loaded model. Here Hugging Face's model is made without memory, and SGLang's rules are
applied to its layers: those of decoder layers, ``embed_tokens`` and ``lm_head``, split by the names of Llama's. No
weight is read and SGLang is not imported.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from scute_sgl.checkpoint import read_base_config
from scute_sgl.errors import AdapterError
from scute_sgl.layout import round_up
from scute_sgl.names import is_embedding, is_head
from scute_sgl.slots import BaseShape, Target

COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROW = ("o_proj", "down_proj")
FUSED = ("qkv_proj", "gate_up_proj")  # where Hugging Face fuses them too, SGLang still knows the parts only
MOST_LAYERS = 4096  # or experts
VOCABULARY_STEP = 64  # SGLang pads a vocabulary to a multiple of it

# Model types, as SGLang and Hugging Face have them, whose layers are x + attention(norm(x)), then x + mlp(norm(x)),
# and the readers of each norm there. In other models a norm of these names may lie elsewhere, scale by 1 + w or feed a
# router.
PRE_NORM = ("llama", "mistral", "qwen2", "qwen3")
LAST_NORM = "model.norm"
READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
    LAST_NORM: ("lm_head",),
}
NORM_OF = {reader: norm for norm, readers in READERS.items() for reader in readers}


@dataclass(frozen=True)
class Base:
    """A base model by its config; ``targets`` are those of one tensor-parallel rank, by path."""

    shape: BaseShape
    targets: tuple[dict[str, Target], ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.shape.dtype


def read_base(folder: str, dtype: torch.dtype | None = None, ranks: int = 1) -> Base:
    """The base in ``folder``, served in ``dtype`` (None: as SGLang chooses) by ``ranks`` ranks.

    ValueError for a folder without a config.json, one that Transformers does not know, absurd sizes, a quantised
    model, and one that cannot be split among so many ranks.
    """
    raw = read_base_config(folder)
    try:
        _check_counts(raw)
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        model = _without_memory(config)
    except Exception as error:  # Transformers raises whatever its own code for a model meets
        hint = " ".join(str(error).split())[:300]
        raise ValueError(f"Transformers cannot make the model of {folder}/config.json: {hint}") from error
    if empty := next((path for path, sizes in layers_of(model).items() if 0 in sizes), ""):
        raise ValueError(f"{folder}/config.json: a layer {empty} of no features; want sizes above 0")
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"the base in {folder!r} is quantised; adapters are exact on unquantised weights only")
    config, dtype = config.get_text_config(), dtype or served_dtype(config)
    if type(getattr(config, "num_attention_heads", None)) is not int:
        raise ValueError(f"{folder}/config.json: no num_attention_heads; want a model with attention heads")
    if config.num_attention_heads % ranks:
        raise ValueError(f"{config.num_attention_heads} attention heads cannot be split among {ranks} ranks")
    targets = tuple(_targets(model, config, dtype, rank, ranks) for rank in range(ranks))
    shapes = {path: (t.in_features, t.out_features) for path, t in targets[0].items()}
    unlisted = (path for path, layer in model.named_modules() if path not in shapes and _has_matrix(layer))
    layers = layers_of(model)
    return Base(
        BaseShape(
            shapes, dtype=dtype, vocab_size=config.vocab_size, unlisted=next(unlisted, ""), counted=lambda: layers,
            norms=norms_of(targets[0].values()), tied=bool(config.tie_word_embeddings),
        ),
        targets,
    )


def norm_before(path: str, model_type: str | None) -> str:
    """The path of the norm whose output a layer reads in this type of model; "" for none, or where it is not known."""
    if model_type not in PRE_NORM:
        return ""
    block, _, leaf = path.rpartition(".")
    layer, _, part = block.rpartition(".")
    norm = NORM_OF.get(f"{part}.{leaf}".lstrip("."), "")
    return f"{layer}.{norm}".lstrip(".") if norm else ""


def norms_of(targets: Iterable[Target]) -> dict[str, int]:
    """Path -> width of the norms all of whose readers are targets."""
    found: dict[str, list[Target]] = {}
    for t in targets:
        if t.norm:
            found.setdefault(t.norm, []).append(t)
    readers = {norm.rpartition(".")[2]: len(layers) for norm, layers in READERS.items()}
    return {path: ts[0].in_features for path, ts in found.items() if len(ts) == readers[path.rpartition(".")[2]]}


def served_dtype(config: PretrainedConfig) -> torch.dtype:
    """What SGLang's ``--dtype auto`` is: the config's, but 16 bit for float32."""
    if config.dtype in (None, torch.float32):
        return torch.bfloat16 if config.model_type.startswith("gemma") else torch.float16
    return config.dtype


def huggingface_layers(config: PretrainedConfig) -> dict[str, tuple[int, int]]:
    """Path -> (in, out) of every linear layer and embedding of Hugging Face's own model, in its order.

    SGLang's modules may come in another order. AdapterError ``bad_config`` where that model cannot be made.
    """
    try:
        model = _without_memory(config)
    except Exception as error:
        hint = f"PEFT numbers layers in the order of Hugging Face's model, which cannot be made here: {error}"
        raise AdapterError("bad_config", hint) from error
    return layers_of(model)


def layers_of(model: nn.Module) -> dict[str, tuple[int, int]]:
    layers = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            layers[path] = module.in_features, module.out_features
        elif isinstance(module, nn.Embedding):
            layers[path] = module.num_embeddings, module.embedding_dim
    return layers


def _without_memory(config: PretrainedConfig) -> nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            copy.deepcopy(config), attn_implementation="eager", trust_remote_code=False
        )


def _check_counts(config: dict) -> None:
    """A model takes time and memory for each of its layers, even without weights. ValueError for absurdly many."""
    for key, value in config.items():
        if isinstance(value, dict):
            _check_counts(value)
        elif isinstance(value, int) and value > MOST_LAYERS and ("layer" in key or "expert" in key):
            raise ValueError(f"{key}: found {value}, want at most {MOST_LAYERS}")


def _has_matrix(layer: nn.Module) -> bool:
    return any(parameter.dim() > 1 for parameter in layer.parameters(recurse=False))


def _targets(
    model: nn.Module, config: PretrainedConfig, dtype: torch.dtype, rank: int, ranks: int
) -> dict[str, Target]:
    found: dict[str, Target] = {}
    for path, (inputs, outputs) in layers_of(model).items():
        kind = _kind(model, path)
        if not kind:
            continue
        if ranks > 1 and kind == "column" and path.rpartition(".")[2] not in COLUMN:
            raise ValueError(f"how SGLang splits {path} among ranks is not known here; want 1 rank")
        held_in, held_out = (0, inputs), (0, outputs)
        if kind in ("head", "embedding"):
            padded = round_up(config.vocab_size, VOCABULARY_STEP)
            padded = round_up(config.vocab_size, VOCABULARY_STEP * ranks) if padded % ranks else padded
            step = padded // ranks
            if config.vocab_size <= (ranks - 1) * step:
                continue  # padding is all that the last rank would hold
            held = rank * step, min(config.vocab_size, (rank + 1) * step)
            held_in, held_out = (held, held_out) if kind == "embedding" else (held_in, held)
        elif kind == "row":
            held_in = _part(path, inputs, rank, ranks)
        elif path.endswith((".k_proj", ".v_proj")):
            heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
            copies = max(1, ranks // heads)  # more ranks than heads hold the same ones
            held_out = _part(path, outputs, rank // copies, ranks // copies)
        else:
            held_out = _part(path, outputs, rank, ranks)
        if kind != "embedding" and (held_in[1] - held_in[0]) % 8:
            continue
        parent, _, leaf = path.rpartition(".")
        gated = leaf == "down_proj" and f"{parent}.gate_proj" in found
        found[path] = Target(
            path=path,
            module=len(found),
            kind=kind,
            in_features=inputs,
            out_features=outputs,
            inputs=held_in,
            outputs=held_out,
            weight=_no_weight,
            bias=_bias(model.get_submodule(path), held_out),
            gated_by=f"{parent}.up_proj" if gated else "",
            norm=norm_before(path, config.model_type),
            norm_weight=lambda inputs=inputs: torch.ones(()).expand(inputs),
        )
    return found


def _kind(model: nn.Module, path: str) -> str:
    """The kind of target that SGLang's layer of this path is; "" for one that adapters cannot change."""
    parent, _, leaf = path.rpartition(".")
    layer, around = model.get_submodule(path), model.get_submodule(parent)
    if isinstance(layer, nn.Embedding):
        return "embedding" if is_embedding(path) else ""
    if is_head(path):
        return "head" if path == "lm_head" and layer.bias is None and layer.in_features % 8 == 0 else ""
    bypassed = leaf in FUSED or hasattr(around, "kv_b_proj") or ".experts." in path
    if bypassed or ".layers." not in f".{path}":
        return ""
    return "row" if leaf in ROW else "column"


def _part(path: str, size: int, place: int, places: int) -> tuple[int, int]:
    if size % places:
        raise ValueError(f"{size} features of {path} cannot be split among {places} ranks")
    return place * size // places, (place + 1) * size // places


def _bias(layer: nn.Module, held: tuple[int, int]) -> Callable[[], Tensor | None]:
    """Zeros where the layer has a bias: whether there is one decides which slots are live, its numbers do not."""
    if getattr(layer, "bias", None) is None:
        return lambda: None
    return lambda: torch.zeros(()).expand(held[1] - held[0])


def _no_weight() -> Tensor:
    raise RuntimeError("a base that is known by its config has no weight; see resolve.without_weight")
