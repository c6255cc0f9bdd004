"""Hooks in the scheduler process: our manager in place of SGLang's, counters, and changes of base weights."""

from __future__ import annotations

import os

from scute_sgl import hooks
from scute_sgl.errors import AdapterError
from scute_sgl.hooks import Hook


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
        return original(self)
    finally:
        model_runner.LoRAManager = stock


def get_internal_state(original, self, recv_req):
    output = original(self, recv_req)
    manager = _manager(self.tp_worker)
    if manager is not None:
        output.internal_state["scute"] = manager.state()
    return output


def update_weights(original, self, recv_req):
    """Folded adapters would silently belong to the base of before."""
    manager = _manager(self)
    names = manager.tied_to_base() if manager is not None else []
    if names:
        hint = "its folded tensors depend on the base weights that would change; unload it first"
        return False, "; ".join(str(AdapterError("in_use", hint, adapter=name)) for name in names)
    return original(self, recv_req)


def _manager(worker):
    """Our manager, or None where another backend serves."""
    manager = getattr(worker.model_runner, "lora_manager", None)
    return manager if hasattr(manager, "tied_to_base") else None


_WORKER = "sglang.srt.managers.tp_worker.BaseTpWorker."
HOOKS = [
    Hook("sglang.srt.model_executor.model_runner.ModelRunner.init_lora_manager", init_lora_manager),
    Hook("sglang.srt.managers.scheduler.Scheduler.get_internal_state", get_internal_state, ("recv_req",)),
    Hook(_WORKER + "update_weights_from_disk", update_weights, ("recv_req",)),
    Hook(_WORKER + "update_weights_from_distributed", update_weights, ("recv_req",)),
    Hook(_WORKER + "update_weights_from_tensor", update_weights, ("recv_req",)),
    Hook(_WORKER + "update_weights_from_ipc", update_weights, ("recv_req",)),
]
