"""The plugin that SGLang loads in its parent and scheduler processes (entry point ``sglang.srt.plugins``)."""

from __future__ import annotations

import sys

from scute_sgl import hooks


def register() -> None:
    """Register the backend's name and the hooks that this process needs."""
    from sglang.srt.lora.backend.lora_registry import register_lora_backend

    @register_lora_backend("scute")
    def create_scute_backend():
        from scute_sgl.backend import ScuteBackend

        return ScuteBackend

    if in_scheduler():
        from scute_sgl import hooks_scheduler

        hooks.register(hooks_scheduler.HOOKS)
    else:
        from scute_sgl import hooks_args, hooks_loads, hooks_requests

        hooks.register(hooks_args.HOOKS + hooks_requests.HOOKS + hooks_loads.HOOKS)


def in_scheduler() -> bool:
    """Whether SGLang loads us at the start of a scheduler process rather than in its parent."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "run_scheduler_process":
            return True
        frame = frame.f_back
    return False
