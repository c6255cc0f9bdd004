"""One adapter of every method that is served, for exactness.py --adapters every.

Where PEFT needs a decomposition of W, or draws as many numbers as W has, whenever an adapter is made or read, few layers
are adapted: singular vectors of 2048 x 8192 weights in float64 would take minutes, OSF would be as large as the base
itself, BOFT keeps a dense permutation of the inputs for each layer, HRA forms a dense square of them.
"""

from __future__ import annotations

from functools import partial

import peft
from peft_models import INVOCATION, LINEARS, Recipe, around, drawn, kept, scaled, tenth
from peft_models import recipes as nine

from scute_sgl.supported import SUPPORT

V = [f"layers.{layer}.self_attn.v_proj" for layer in range(0, 16, 2)]  # the smallest weights
FEW = [f"layers.{layer}.{name}" for layer in (0, 5, 10, 15) for name in ("self_attn.v_proj", "mlp.up_proj")]
# Refused under tensor parallelism: they need all of a weight that every rank holds a part of.
WHOLE = ("PISSA", "OLORA", "KASA", "ADAMSS", "OSF")


def _lora(label: str, targets: list[str], scale: float, draws: dict, **fields) -> Recipe:
    return Recipe(label, partial(peft.LoraConfig, r=8, lora_alpha=8, target_modules=targets, **fields), scale, draws)


def _recipe(label: str, config: str, targets: list[str], scale: float, draws: dict, task: int | None = None, **fields):
    """``config``: the class's name in PEFT, looked up when the adapter is written."""
    return Recipe(label, lambda: getattr(peft, config)(target_modules=targets, **fields), scale, draws, task)


def _lambda(start, noise, scale):
    """DeLoRA's: the length of what it adds, whatever A and B are."""
    return scale * (1 + 0.1 * noise)


# Most of the tiny base's, one in 16 of the large one's: with fewer, few positions would see one.
TOKENS = [*range(20, 120), *range(128, 128256, 16)]
SPLIT_BY_OUTPUTS = LINEARS[:3] + LINEARS[4:6]  # a mix of outputs is refused where ranks have parts of sums

# The ranks are at most 512, of which every graph has room; the sizes fit the tiny base too.
OTHERS = (
    _lora(
        "ALORA", LINEARS, 0.25, {"lora_A": kept, "lora_B": tenth}, alora_invocation_tokens=INVOCATION, task_type="CAUSAL_LM"
    ),
    _lora("PISSA", V, 0.5, {"lora_A": around, "lora_B": around}, init_lora_weights="pissa"),
    _lora("OLORA", FEW, 0.5, {"lora_A": around, "lora_B": around}, init_lora_weights="olora"),
    _lora("KASA", V, 0.5, {"lora_A": kept, "lora_B": tenth, "lora_diag": drawn}, kasa_config=peft.KasaConfig()),
    _recipe("PVERA", "PveraConfig", LINEARS, 0.07, {"pvera_lambda_d": drawn, "pvera_lambda_b": scaled}, r=128),
    _recipe("FOURIERFT", "FourierFTConfig", FEW, 3.0, {"fourierft_spectrum": scaled}, n_frequency=120),
    _recipe("WAVEFT", "WaveFTConfig", FEW, 0.008, {"waveft_spectrum": scaled}, n_frequency=512),
    _recipe("HIRA", "HiraConfig", LINEARS, 0.05, {"hira_A": drawn, "hira_B": scaled}, r=8),
    _recipe("HRA", "HRAConfig", ["v_proj", "up_proj"], 0.3, {"hra_u": around}, r=32),
    _recipe("DEFT", "DeftConfig", LINEARS, 1.2, {"deft_P": kept, "deft_R": around}, r=16),
    _recipe("PEANUT", "PeanutConfig", LINEARS, 0.05, {"peanut_": kept, "peanut_B": scaled}, r=16),
    _recipe(
        "GLORA", "GloraConfig", LINEARS, 0.014, {"glora_": scaled, "glora_B": tenth},
        config_A_B="vector", config_C="vector", config_D_E="vector",
    ),
    # Its clusters are found again in every process. Among 8192 outputs roundings alone often move one at a border, and
    # with it a centre and other outputs; among 512 they rarely do.
    _recipe("ADAMSS", "AdamssConfig", V[::2], 0.065, {"adamss_A": kept, "adamss_B": scaled}, r=16, subspace_rank=4),
    _recipe("OSF", "OSFConfig", V, 0.3, {"osf_svd_params": around}),
    _recipe("ADALORA", "AdaLoraConfig", LINEARS, 0.7, {"lora_": kept, "lora_E": scaled, "ranknum": kept}, total_step=1, lora_alpha=16),
    _recipe("BEFT", "BeftConfig", ["v_proj"], 0.0105, {"beft_bias": scaled}),
    _recipe("BOFT", "BOFTConfig", FEW, 0.05, {"boft_R": scaled, "boft_s": around}, boft_block_size=8),
    _recipe(
        "DELORA", "DeloraConfig", LINEARS, 16.0, {"delora_A": drawn, "delora_B": drawn, "delora_lambda": _lambda}, r=16
    ),
    _recipe("GRALORA", "GraloraConfig", LINEARS, 0.009, {"gralora_": kept, "gralora_B": scaled}, r=16, hybrid_r=4),
    _recipe("LOHA", "LoHaConfig", LINEARS, 0.4, {"hada_": kept, "hada_w2_b": scaled}, r=8, alpha=8),
    _recipe("LOKR", "LoKrConfig", LINEARS, 0.033, {"lokr_": kept, "lokr_w1": scaled}, r=2, alpha=2),
    _recipe("MISS", "MissConfig", LINEARS, 0.0012, {"miss_block": scaled}, r=32),
    _recipe(
        "POLY", "PolyConfig", LINEARS, 0.8, {"poly_router": drawn, "poly_lora_A": kept, "poly_lora_B": scaled},
        task=2, r=8, n_tasks=3, n_skills=4, n_splits=2,
    ),
    _recipe("RANDLORA", "RandLoraConfig", V, 7e-6, {"randlora_gamma": drawn, "randlora_lambda": scaled}),
    _recipe("LN_TUNING", "LNTuningConfig", ["input_layernorm", "post_attention_layernorm"], 0.1, {"ln_tuning": around}),
    _recipe("ROAD", "RoadConfig", SPLIT_BY_OUTPUTS, 0.05, {"road_theta": scaled, "road_alpha": around}, group_size=16),
    _recipe("SHIRA", "ShiraConfig", FEW, 0.04, {"shira_weight": scaled}, r=16),
    _recipe("SUPERTUNING", "SupertuningConfig", FEW, 0.02, {"supertuning_": scaled}),
    _recipe("TINYLORA", "TinyLoraConfig", V, 0.7, {"tinylora_v": scaled}),
    _recipe(
        "TRAINABLE_TOKENS", "TrainableTokensConfig", ["embed_tokens"], 0.45, {"trainable_tokens": around},
        token_indices=TOKENS,
    ),
    _recipe("UNILORA", "UniLoraConfig", LINEARS, 2.5, {"unilora_theta_d": scaled}),
    _recipe(
        "VBLORA", "VBLoRAConfig", LINEARS, 0.03, {"vblora_vector_bank": scaled, "vblora_logits": drawn},
        num_vectors=64, vector_length=32,
    ),
)  # fmt: skip


def recipes() -> dict[str, Recipe]:
    """The two plain LoRAs by which the others are judged, and an adapter of each other label, in lower case.

    KeyError for a label of supported.py without a recipe.
    """
    first = {recipe.method: recipe for recipe in reversed(nine().values())}
    known = first | {recipe.method: recipe for recipe in OTHERS}
    labels = [row.label for row in SUPPORT if row.label != "LORA"]
    if missing := [label for label in labels if label not in known]:
        raise KeyError(f"benchmarks/every_method.py has no recipe for {', '.join(missing)}")
    plain = {name: recipe for name, recipe in nine().items() if recipe.method == "LORA"}
    return plain | {label.lower(): known[label] for label in labels}
