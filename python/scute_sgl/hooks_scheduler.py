"""Hooks in the scheduler process: our manager in place of SGLang's, counters, changes of base weights, where a
request's adapter begins, and the end of requests whose adapter overflows."""

from __future__ import annotations

import os
from http import HTTPStatus

from scute_sgl import hooks, invocation
from scute_sgl.errors import AdapterError
from scute_sgl.hooks import Hook


_manager = None  # a process has one model, for draft models are refused; None where another backend serves it


def init_lora_manager(original, self):
    from sglang.srt.model_executor import model_runner
    from sglang.srt.runtime_context import get_lora, get_observability

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
    if get_observability().enable_metrics:
        _manager.start_metrics()


def resolve_decode_backend(original, cuda_graph_runner):
    graphs = original(cuda_graph_runner)
    return graphs if _manager is None else _manager.lora_backend.capture_variants(graphs)


def can_run_graph(original, self, forward_batch):
    return (_manager is None or _manager.lora_backend.fits_graph) and original(self, forward_batch)


def get_internal_state(original, self, recv_req):
    output = original(self, recv_req)
    if _manager is not None:
        output.internal_state["scute"] = _manager.state()
    return output


def add_request_to_queue(original, self, req, *args, **kwargs):
    if _manager is not None:
        _manager.stats["not_invoked"] += invocation.mark(req, _manager.tenants)
    return original(self, req, *args, **kwargs)


def radix_key(original, self, token_ids, extra_key=None, *args, **kwargs):
    """A key made of a request's tokens; slices of it have a plain ``extra_key``."""
    token_ids = invocation.cache_tokens(token_ids, extra_key)
    original(self, token_ids, extra_key and str(extra_key), *args, **kwargs)


def update_weights(original, self, *args, **kwargs):
    """Folded adapters would silently belong to the base of before."""
    names = [] if _manager is None else _manager.tied_to_base()
    if names:
        hint = "its folded tensors depend on the base weights that would change; unload it first"
        return False, "; ".join(str(AdapterError("in_use", hint, adapter=name)) for name in names)
    return original(self, *args, **kwargs)


OVERFLOWN = -1  # on the host, in place of the token that such a row got


def sample(original, self, logits_output, forward_batch):
    """Finite tensors may have a product that is not, and a sampler that meets a NaN takes the server down.

    Such rows sample from equal logits. Nothing waits for the device: what they were travels with the tokens.
    """
    logits = logits_output.next_token_logits
    if _manager is None or not _manager.lora_backend.live or logits is None:
        return original(self, logits_output, forward_batch)
    overflown = ~logits.amax(-1).isfinite()
    logits.masked_fill_(overflown[:, None], 0)
    logits_output.scute_overflown = overflown
    return original(self, logits_output, forward_batch)


def relay_forward_payload(original, self, *args):
    """The next pass reads the valid tokens that it is handed here; what the host then reads tells of overflow."""
    original(self, *args)
    result = args[-1]
    overflown = getattr(result.logits_output, "scute_overflown", None)
    if overflown is not None:
        result.next_token_ids = result.next_token_ids.masked_fill(overflown, OVERFLOWN)


def update_finish_state(original, self, new_accepted_len=1):
    if _manager is not None and new_accepted_len and self.output_ids[-1] == OVERFLOWN:
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        self.output_ids[-1] = 0  # a token for whoever decodes or caches it
        if not self.finished():
            tenant = _manager.tenants.get(self.lora_id)
            hint = "found logits that are not finite: with this prompt it overflows in the server's dtype"
            refusal = AdapterError("bad_config", hint, adapter=tenant.name if tenant else "")
            self.to_finish = self.to_finish or FINISH_ABORT(str(refusal), HTTPStatus.BAD_REQUEST, "BadRequestError")
    original(self, new_accepted_len)


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
    Hook("sglang.srt.managers.scheduler.Scheduler._add_request_to_queue", add_request_to_queue, ("req",)),
    Hook("sglang.srt.mem_cache.radix_cache.RadixKey.__init__", radix_key, ("token_ids", "extra_key")),
    Hook("sglang.srt.model_executor.model_runner.ModelRunner.sample", sample, ("logits_output", "forward_batch")),
    Hook("sglang.srt.managers.scheduler.Scheduler._relay_forward_payload", relay_forward_payload, ("batch_result",)),
    Hook("sglang.srt.managers.schedule_batch.Req.update_finish_state", update_finish_state, ("new_accepted_len",)),
    Hook(_UPDATER + "update_weights_from_disk", update_weights),
    Hook(f"{_UPDATER}update_weights_from_distributed | {_UPDATER}load_weights_from_distributed", update_weights),
    Hook(_UPDATER + "update_weights_from_tensor", update_weights),
    Hook(_UPDATER + "update_weights_from_ipc", update_weights),
]
