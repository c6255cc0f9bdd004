"""The smallest adapter of each method of adapters_plain.py on the base of small_files.py, for tests of refusals."""

import torch
from small_files import BASE, PATH, key, read


def ones(**shapes):
    """Tensors of one module by name, all ones; "__" stands for a dot."""
    return {key(name.replace("__", ".")): torch.ones(shape) for name, shape in shapes.items()}


BANK, THETA, VECTOR = "base_model.vblora_vector_bank", "base_model.unilora_theta_d", "base_model.tinylora_v.0"
FILES = {  # PATH has 16 inputs and 8 outputs
    "ADALORA": ({"init_r": 3}, ones(lora_A=(3, 16), lora_B=(8, 3), lora_E=(3, 1))),
    "BEFT": ({}, ones(beft_bias=(1, 8))),
    "BOFT": ({}, ones(boft_R=(1, 4, 4, 4), boft_s=(8, 1))),
    "BONE": ({"r": 4}, ones(bone_block=(4, 8))),
    "DELORA": ({"r": 4}, ones(delora_A=(4, 16), delora_B=(8, 4), delora_lambda=(1,), delora_w_norm=(16,))),
    "GRALORA": ({"r": 4, "hybrid_r": 2}, ones(
        gralora_A=(2, 8, 4), gralora_B=(2, 4, 4), gralora_A_general__weight=(2, 16), gralora_B_general__weight=(8, 2))),
    "HIRA": ({"r": 2}, ones(hira_A=(2, 16), hira_B=(8, 2))),
    "LOHA": ({"r": 2}, ones(hada_w1_a=(8, 2), hada_w1_b=(2, 16), hada_w2_a=(8, 2), hada_w2_b=(2, 16))),
    "LOKR": ({"r": 1}, ones(lokr_w1=(2, 4), lokr_w2_a=(4, 1), lokr_w2_b=(1, 4))),
    "MISS": ({"r": 4}, ones(miss_block=(4, 8))),
    "POLY": (
        {"r": 2, "n_skills": 3, "n_splits": 2},
        ones(poly_lora_A=(2, 3, 8, 2), poly_lora_B=(2, 3, 2, 4), poly_router__module_logits=(1, 6)),
    ),
    "TINYLORA": (
        {"u": 3, "target_modules": [PATH]},
        ones(tinylora_A=(2, 16), tinylora_B=(8, 2), tinylora_P=(3, 2, 2)) | {VECTOR: torch.ones(3)},
    ),
    "UNILORA": (
        {"r": 2, "theta_d_length": 5, "save_indices": True},
        ones(unilora_scales_A=(2, 16), unilora_scales_B=(8, 2)) | {THETA: torch.ones(5)}
        | {key("unilora_indices_A"): torch.full((2, 16), 4), key("unilora_indices_B"): torch.full((8, 2), 4)},
    ),
    "VBLORA": ({"r": 3, "num_vectors": 5, "vector_length": 4},
               ones(vblora_logits_A=(3, 4, 5), vblora_logits_B=(2, 3, 5)) | {BANK: torch.ones(5, 4)}),
}


def read_changed(method, config=None, tensors=None, base=BASE):
    fields, file = FILES[method]
    fields = {"peft_type": method, "target_modules": ["up_proj"]} | fields | (config or {})
    return read(fields, {k: t for k, t in (file | (tensors or {})).items() if t is not None}, base)
