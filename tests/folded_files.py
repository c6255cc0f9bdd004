"""The smallest adapter of each method of adapters_folded.py on the base of small_files.py, for tests of refusals."""

import torch
from small_files import PATH, key

ones = torch.ones
HRA = {"hra_u": ones(16, 2)}
DEFT = {"deft_P": ones(8, 2), "deft_R": ones(2, 16)}
PEANUT = {"peanut_A.weight": ones(2, 8), "peanut_B.weight": ones(8, 2)}
GLORA = {f"glora_{path}.X": ones(8, 1) for path in "AB"} | {"glora_C.zeros": torch.zeros(16, 1)}
GLORA |= {f"glora_{path}.zeros": torch.zeros(8) for path in "DE"}
OSF = {"osf_svd_params.U_low": ones(8, 4), "osf_svd_params.S_low": ones(4), "osf_svd_params.V_low": ones(4, 16)}
ADAMSS = {"adamss_newB": torch.eye(3, 16), "adamss_A.0": ones(1, 3), "adamss_A.1": ones(1, 3)}
ADAMSS |= {"adamss_B.0": ones(7, 1), "adamss_B.1": ones(1, 1)}
PVERA = {"pvera_lambda_b": ones(8), "pvera_lambda_d": ones(4)}
SHARED = {"base_model.pvera_A": ones(4, 16), "base_model.pvera_B": ones(8, 2)}
FOURIERFT, WAVEFT = {"fourierft_spectrum": ones(5)}, {"waveft_spectrum": ones(5)}
ROAD = {"road_theta": ones(4), "road_alpha": ones(4)}
SHIRA = {"shira_weight": ones(24), "shira_indices": torch.stack([torch.arange(24) * 5 // 16, torch.arange(24) * 5 % 16])}
SUPERTUNING = {"supertuning_values": ones(12), "supertuning_indices": torch.arange(12).int() * 10}
FILES = {
    "ADAMSS": ADAMSS, "DEFT": DEFT, "FOURIERFT": FOURIERFT, "GLORA": GLORA, "HRA": HRA, "OSF": OSF, "PEANUT": PEANUT,
    "PVERA": PVERA, "ROAD": ROAD, "SHIRA": SHIRA, "SUPERTUNING": SUPERTUNING, "WAVEFT": WAVEFT,
}  # fmt: skip
FIELDS = {"ADAMSS": {"r": 3, "num_subspaces": 2}, "GLORA": {"config_A_B": "vector", "config_C": "vector"}, "OSF": {}}
FIELDS |= {method: {"n_frequency": 5} for method in ("FOURIERFT", "WAVEFT")}
FIELDS |= {"ROAD": {"group_size": 4}, "SHIRA": {"r": 1}, "SUPERTUNING": {"sparsity": 0.9}}


def config(method, **fields):
    return {"peft_type": method, "target_modules": ["up_proj"]} | FIELDS.get(method, {"r": 2}) | fields


def tensors(method, path=PATH, **changed):
    named = FILES[method] | changed
    shared = SHARED if method == "PVERA" else {}
    return shared | {key(name, path): tensor for name, tensor in named.items() if tensor is not None}
