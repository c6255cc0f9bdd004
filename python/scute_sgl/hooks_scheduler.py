"""Hooks in the scheduler process: our manager in place of SGLang's, counters, and changes of base weights."""

from __future__ import annotations

import os

from scute_sgl import hooks
from scute_sgl.errors import AdapterError
from scute_sgl.hooks import Hook


_manager = None  # a scheduler process has one model and one manager; None where another backend serves


def init_lora_manager(original, self):
    from sglang.srt.model_executor import model_runner
    from sglang.srt.runtime_context import get_lora

    from scute_sgl.hooks_args import CHECKED

    if get_lora().lora_backend != "scute":
        return original(self)
    hooks.verify()
    if os.environ.get(CHECKED) != "1":
        raise RuntimeError("scute refuses to start: its arguments were not checked, so its plugin is missing in the parent")
    from scute_sgl.manager import ScuteManager

    # Whatever arguments this release passes reach our class.
    stock, model_runner.LoRAManager = model_runner.LoRAManager, ScuteManager
    try:
        original(self)
    finally:
        model_runner.LoRAManager = stock
    global _manager
    _manager = self.lora_manager


def resolve_decode_backend(original, cuda_graph_runner):
    graphs = original(cuda_graph_runner)
    manager = _manager_of(cuda_graph_runner.model_runner)
    return graphs if manager is None else manager.lora_backend.capture_variants(graphs)


def can_run_graph(original, self, forward_batch):
    manager = _manager_of(self.model_runner)
    return (manager is None or manager.lora_backend.fits_graph) and original(self, forward_batch)


def get_internal_state(original, self, recv_req):
    output = original(self, recv_req)
    if _manager is not None:
        output.internal_state["scute"] = _manager.state()
    return output


def update_weights(original, self, *args, **kwargs):
    """Folded adapters would silently belong to the base of before."""
    names = [] if _manager is None else _manager.tied_to_base()
    if names:
        hint = "its folded tensors depend on the base weights that would change; unload it first"
        return False, "; ".join(str(AdapterError("in_use", hint, adapter=name)) for name in names)
    return original(self, *args, **kwargs)


def _manager_of(model_runner):
    """Our manager, or None where there is none, as for a draft model."""
    manager = getattr(model_runner, "lora_manager", None)
    return manager if hasattr(manager, "tied_to_base") else None


_RUNNER = "sglang.srt.model_executor.runner."
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater."
HOOKS = [
    Hook("sglang.srt.model_executor.model_runner.ModelRunner.init_lora_manager", init_lora_manager),
    Hook(
        "sglang.srt.model_executor.runner_backend.utils.resolve_decode_backend",
        resolve_decode_backend,
        ("cuda_graph_runner",),
    ),
    Hook(_RUNNER + "decode_cuda_graph_runner.DecodeCudaGraphRunner.can_run_graph", can_run_graph, ("forward_batch",)),
    Hook("sglang.srt.managers.scheduler.Scheduler.get_internal_state", get_internal_state, ("recv_req",)),
    Hook(_UPDATER + "update_weights_from_disk", update_weights),
    Hook(f"{_UPDATER}update_weights_from_distributed | {_UPDATER}load_weights_from_distributed", update_weights),
    Hook(_UPDATER + "update_weights_from_tensor", update_weights),
    Hook(_UPDATER + "update_weights_from_ipc", update_weights),
]
