"""Poly: a few low-rank skills, mixed for each task and for each split of the inputs and outputs.

    F(x) = x W + b + (x A^T) B^T,   A^T = sum_s w_s lora_A[:, s],   B = 1 / r * sum_s w_s lora_B[:, s]

w = sigmoid(module_logits[task]), each split's skills divided by their sum + 1e-12. In PEFT every call names its task; a
tenant here is one adapter of one task. A file of several tasks is therefore served as several tenants, each from a
folder whose adapter_config.json names its "task_id". PEFT itself ignores that field.

Checked against peft/tuners/poly/{layer,router}.py of PEFT 0.21.2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from scute_sgl.errors import AdapterError
from scute_sgl.methods import common
from scute_sgl.names import Module, group
from scute_sgl.slots import Adapter, BaseShape, Slots, Term

FIELDS = {
    "target_modules": None,
    "exclude_modules": None,
    "r": 8,
    "poly_type": "poly",
    "n_tasks": 1,
    "n_skills": 4,
    "n_splits": 1,
    "task_id": None,
}
NEUTRAL: frozenset[str] = frozenset()
PARAMETERS = ("poly_lora_A", "poly_lora_B", "poly_router.module_logits")


def read(config: dict, tensors: dict[str, Tensor], base: BaseShape | None) -> Adapter:
    c = common.settings(config, FIELDS, NEUTRAL)
    r, tasks = common.rank(c["r"]), common.rank(c["n_tasks"], "n_tasks")
    skills, splits = common.rank(c["n_skills"], "n_skills"), common.rank(c["n_splits"], "n_splits")
    if c["poly_type"] != "poly":
        raise AdapterError("bad_config", f"found {c['poly_type']!r}, want 'poly'", key="poly_type")
    task = _task(c["task_id"], tasks)

    def read_one(module: Module) -> Slots:
        common.refuse_embedding(module, "Poly")
        inputs, outputs = module.in_features, module.out_features
        for size, side in ((inputs, "inputs"), (outputs, "outputs")):
            if size is not None and size % splits:
                raise module.error("bad_config", "n_splits", f"found {splits}, want a divisor of {size} {side}")
        A = module.need("poly_lora_A", splits, skills, inputs and inputs // splits, r)
        B = module.need("poly_lora_B", splits, skills, r, outputs and outputs // splits)
        A, B, logits = common.alike(A, B, module.need("poly_router.module_logits", tasks, splits * skills))
        w = logits[task].view(splits, skills).sigmoid()
        w = w / (w.sum(1, keepdim=True) + 1e-12)
        A, B = torch.einsum("qs,qsdr->rqd", w, A), torch.einsum("qs,qsrd->qdr", w, B)
        return Slots(terms=(Term(A.flatten(1), B.flatten(0, 1) / r),))

    modules, _ = group(tensors, base, PARAMETERS)
    return common.build("POLY", config, modules, read_one)


def _task(task: object, tasks: int) -> int:
    if task is None and tasks == 1:
        return 0
    if isinstance(task, bool) or not isinstance(task, int) or not 0 <= task < tasks:
        hint = f'{tasks} tasks; load one folder for each, with "task_id": 0 to {tasks - 1} in its adapter_config.json'
        raise AdapterError("bad_config", f"found {task!r:.80}, but the adapter has {hint}", key="task_id")
    return task
