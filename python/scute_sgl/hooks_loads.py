"""Loading and unloading, in the process that tokenizes.

An adapter's name is registered after every scheduler holds the adapter, and is gone the moment an unload is
asked for; the unload then waits for the requests that hold the adapter, without keeping other loads waiting.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time

from fastapi import HTTPException
from fastapi.responses import ORJSONResponse
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.managers.io_struct import LoRAUpdateOutput, UnloadLoRAAdapterReqInput
from sglang.srt.managers.tokenizer_control_mixin import _merge_lora_update_results

from scute_sgl.errors import HTTP_STATUS, AdapterError, printable
from scute_sgl.hooks import Hook
from scute_sgl.hooks_requests import check_name, is_scute
from scute_sgl.hub import local_folder, requested_folder

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.02


class LoadRefusal(HTTPException):
    """A refused load or unload, on its way to an HTTP client."""

    def __init__(self, status: int, result: LoRAUpdateOutput):
        super().__init__(status, result.error_message)
        self.result = result


async def answer_refusal(request, refusal: LoadRefusal) -> ORJSONResponse:
    result = refusal.result
    body = {"success": False, "error_message": result.error_message, "loaded_adapters": result.loaded_adapters}
    return ORJSONResponse(body, status_code=refusal.status_code)


async def load_lora_adapter(original, self, obj, request=None):
    if not is_scute(self):
        return await original(self, obj, request)
    self.auto_create_handle_loop()
    return await _answered(self, load(self, obj, requested_folder), request)


async def unload_lora_adapter(original, self, obj, request=None):
    if not is_scute(self):
        return await original(self, obj, request)
    self.auto_create_handle_loop()
    return await _answered(self, _unload(self, obj), request)


async def load_lora_adapter_from_tensors(original, self, obj, request=None):
    if not is_scute(self):
        return await original(self, obj, request)
    return await _answered(self, _load_from_tensors(obj), request)


async def load(manager, obj, find_folder=local_folder) -> LoRAUpdateOutput:
    """Load an adapter on all schedulers and register its name. AdapterError, or a result without success."""
    check_name(manager, obj.lora_name)
    try:
        obj.lora_path = await asyncio.to_thread(find_folder, obj.lora_path)
    except AdapterError as error:
        raise error.named(obj.lora_name) from None
    async with manager.lora_update_lock:
        if obj.lora_name in manager.lora_registry.names:
            raise AdapterError("in_use", "an adapter of this name is loaded; unload it first", adapter=obj.lora_name)
        ref = LoRARef(lora_name=obj.lora_name, lora_path=obj.lora_path, pinned=bool(obj.pinned))
        obj.lora_id = ref.lora_id
        result = await _tell_schedulers(manager, obj)
        if result.success:
            await manager.lora_registry.register(ref)
    most = manager.server_args.max_loaded_loras
    while result.success and most is not None and manager.lora_registry.num_registered_loras > most:
        oldest = await manager.lora_registry.lru_lora_name(exclude_pinned=True)
        if oldest is None:
            break
        result = await _unload(manager, UnloadLoRAAdapterReqInput(lora_name=oldest))
    return result


async def _unload(manager, obj) -> LoRAUpdateOutput:
    async with manager.lora_update_lock:
        if obj.lora_name not in manager.lora_registry.names:
            raise AdapterError("not_found", "not loaded", adapter=str(obj.lora_name))
        obj.lora_id = await manager.lora_registry.unregister(obj.lora_name)
    while any(getattr(state.obj, "lora_id", None) == obj.lora_id for state in manager.rid_to_state.values()):
        await asyncio.sleep(POLL_SECONDS)
    async with manager.lora_update_lock:
        return await _tell_schedulers(manager, obj)


async def _load_from_tensors(obj) -> LoRAUpdateOutput:
    hint = "tensors sent over the network would have to be unpickled; save the adapter and load its folder"
    raise AdapterError("unsafe_file", hint, adapter=obj.lora_name)


async def _tell_schedulers(manager, obj) -> LoRAUpdateOutput:
    return _merge_lora_update_results(await manager.update_lora_adapter_communicator(obj))


async def _answered(manager, work, request) -> LoRAUpdateOutput:
    """The outcome; over HTTP a refusal raises, because SGLang answers every failure with 400."""
    result = await outcome(manager, work)
    if not result.success and request is not None:
        raise LoadRefusal(HTTP_STATUS.get(_code(result), 400), result)
    return result


async def outcome(manager, work) -> LoRAUpdateOutput:
    """The result of a load or an unload. A refusal is one without success; it is logged and counted here."""
    begin = time.perf_counter()
    try:
        result = await asyncio.shield(work)  # a client that goes away leaves no half of a load or unload
    except AdapterError as error:
        loaded = {name: ref.lora_path for name, ref in manager.lora_registry.get_all_adapters().items()}
        result = LoRAUpdateOutput(success=False, error_message=str(error), loaded_adapters=loaded)
    if not result.success:
        milliseconds = 1e3 * (time.perf_counter() - begin)
        logger.warning(f"scute: {printable(result.error_message)} ({milliseconds:.1f} ms)")
        manager.lora_registry.count_refusal(_code(result))
    return result


def _code(result: LoRAUpdateOutput) -> str:
    """Code of a refusal that travelled as text; "other" for one of SGLang's own."""
    code = re.search(r" refused \[(\w+)\]", result.error_message)
    return code[1] if code and code[1] in HTTP_STATUS else "other"


_CONTROL = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin."
HOOKS = [
    Hook(_CONTROL + "load_lora_adapter", load_lora_adapter, ("obj",)),
    Hook(_CONTROL + "unload_lora_adapter", unload_lora_adapter, ("obj",)),
    Hook(_CONTROL + "load_lora_adapter_from_tensors", load_lora_adapter_from_tensors, ("obj",)),
]
