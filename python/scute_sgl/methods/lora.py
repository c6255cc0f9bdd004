"""LoRA and DoRA.

    F(x) = (x W) * s + b + (x A^T) B^T,   B = c * lora_B,   c = alpha / r, or alpha / sqrt(r) with use_rslora

b = base bias + c * lora_B.bias with lora_bias. s is the identity without use_dora; with it s = m / ||W + B A||
per output row (slot ``magnitude``), it scales the term too and leaves the bias alone. An embedding is the same
with x a one-hot row: A = lora_embedding_A is (rank, vocabulary), and DoRA's norm runs over the vocabulary. VeLoRA and
MonteCLoRA differ from LoRA in training only, BD-LoRA and QALoRA in their files (bdlora.py, qalora.py), aLoRA in the
rows that it is applied to (alora.py); PEFT combines none of them with another or with DoRA.

trainable_token_indices are rows of the vocabulary beside all that (trainable_tokens.py).

pissa, olora and KaSA train on W less a part of it, which becomes a second term (less_base.py). corda and loftq change W
in ways that a file does not tell; PEFT converts such adapters to plain LoRA on request.

Checked against peft/tuners/lora/{layer,dora,variants}.py of PEFT 0.21.2.
"""

from __future__ import annotations

import math

from torch import Tensor

from scute_sgl.errors import AdapterError
from scute_sgl.linalg import product
from scute_sgl.methods import alora, bdlora, common, less_base, qalora, trainable_tokens
from scute_sgl.names import Module, Patterns, group
from scute_sgl.slots import Adapter, BaseShape, Slots, Term

FIELDS = common.TARGETING | {
    "r": 8,
    "lora_alpha": 8.0,
    "use_rslora": False,
    "use_dora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "lora_bias": False,
    "bias": "none",
    "init_lora_weights": None,
    "ensure_weight_tying": False,
    "use_bdlora": None,
    "use_qalora": False,
    "qalora_group_size": 16,
    alora.FIELD: None,
    "velora_config": None,
    "monteclora_config": None,
    "kasa_config": None,
    "trainable_token_indices": None,
}
NEUTRAL = frozenset(
    "lora_dropout megatron_config megatron_core loftq_config eva_config corda_config lora_ga_config".split()
)
OFF = common.OFF | {
    "target_parameters": "LoRA on bare parameters (experts) is not served",
    "layer_replication": "a base of another depth is not served; save the grown model as a base of its own",
    "arrow_config": "Arrow routes every token among adapters and is not served",
}
LEFTOVERS = {  # of training, by the config field that makes PEFT write them
    "velora_config": ("lora_velora_embed",),
    "monteclora_config": tuple(
        f"lora_monteclora_sampler.{name}"
        for name in ("expert_weights", "expert_weights_prior", "gaussian_var_prior", "std_prior")
    ),
}
PARAMETERS = (
    *"lora_A.weight lora_B.weight lora_B.bias lora_embedding_A lora_embedding_B lora_diag".split(),
    *("lora_magnitude_vector", "lora_magnitude_vector.weight"),  # the latter as PEFT wrote it for a while
    *(name for names in LEFTOVERS.values() for name in names),
    trainable_tokens.WRAPPED_ROWS,
)


def read(config: dict, tensors: dict[str, Tensor], base: BaseShape | None) -> Adapter:
    c = common.settings(config, FIELDS, NEUTRAL, OFF)
    common.rank(c["r"])
    less = less_base.trained_on(c["init_lora_weights"], c["kasa_config"])
    tokens = alora.invocation(config, base)
    chosen = [name for name in ("use_dora", "use_bdlora", "use_qalora", alora.FIELD, *LEFTOVERS) if c[name]]
    if c["kasa_config"] is not None:
        chosen.insert(0, "kasa_config")
    if c["lora_bias"] and not {*LEFTOVERS, alora.FIELD} & set(chosen):
        chosen.append("lora_bias")
    for name in ("use_bdlora", "use_qalora", alora.FIELD):
        if less and c[name]:
            raise AdapterError("bad_config", f"found beside {less}, want one of them", key=name)
    if len(chosen) > 1:
        raise AdapterError("bad_config", f"found beside {chosen[0]}; PEFT defines no such layer", key=chosen[1])
    take = qalora.reader(c["qalora_group_size"]) if c["use_qalora"] else bdlora.reader(c["use_bdlora"])
    ranks = Patterns(c["rank_pattern"], "rank_pattern")
    alphas = Patterns(c["alpha_pattern"], "alpha_pattern")

    def read_one(module: Module) -> Slots:
        r = common.rank(ranks.get(module.file_path, c["r"]), "rank_pattern")
        alpha = common.number(alphas.get(module.file_path, c["lora_alpha"]), "alpha_pattern")
        scale = alpha / (math.sqrt(r) if c["use_rslora"] else r)
        inputs, outputs = module.in_features, module.out_features
        for name in LEFTOVERS.get(chosen[0], ()) if chosen else ():
            module.tensors.pop(name, None)
        if not module.is_embedding:
            b, (A, B) = "lora_B.weight", take(module, r)
            B = product(B, module.need("lora_diag", r)) if less == "kasa" else B
        elif not chosen or chosen[0] in ("use_dora", "use_qalora", "lora_bias"):
            b = "lora_embedding_B"
            A, B = module.need("lora_embedding_A", r, inputs), module.need(b, outputs, r)
        else:
            raise module.error("bad_config", chosen[0], "PEFT defines no such embedding")
        bias = magnitude = None
        if c["lora_bias"]:
            bias = common.scaled(module.need("lora_B.bias", B.shape[0]), scale, module, "lora_B.bias")
        if c["use_dora"]:
            magnitude = module.take("lora_magnitude_vector", B.shape[0])
            if magnitude is None:
                magnitude = module.need("lora_magnitude_vector.weight", B.shape[0])
        terms, from_weight = (Term(A, common.scaled(B, scale, module, b)),), less_base.taken(less, r, scale, module)
        return Slots(terms=terms, bias=bias, magnitude=magnitude, from_weight=from_weight)

    modules, _ = group(tensors, base, PARAMETERS)
    own_rows = trainable_tokens.take_wrapped(modules, c["trainable_token_indices"] or {})
    label = "DORA" if c["use_dora"] else "ALORA" if tokens else less.upper() or "LORA"
    adapter = trainable_tokens.with_tokens(common.build(label, config, modules, read_one), own_rows, base)
    return alora.activated(adapter, tokens) if tokens else adapter
