"""The end of a start: the adapters of ``--scute-adapter-dir`` are loaded, and what came of it is logged."""

from __future__ import annotations

import logging
from pathlib import Path

from sglang.srt.managers.io_struct import GenerateReqInput, LoadLoRAAdapterReqInput

from scute_sgl import hooks, hooks_loads
from scute_sgl.errors import AdapterError
from scute_sgl.options import Options

logger = logging.getLogger(__name__)


async def finish(manager) -> None:
    """Load the folder's adapters, in the process that tokenizes and before anybody can ask for one; log a summary.

    An adapter that is refused is listed with its reason and keeps none of the others from being served.
    """
    folder, refused = Options.read().adapter_dir, 0
    manager.auto_create_handle_loop()
    adapters = adapter_folders(folder) if folder else []
    if adapters and manager.is_generation:
        await _one_pass(manager)
    for path in adapters:
        result = await hooks_loads.outcome(manager, _load(manager, path))
        refused += not result.success
    state = (await manager.get_internal_state())[0]["scute"]
    for line in summary(state, folder, refused):
        logger.info(f"scute: {line}")


def adapter_folders(folder: str) -> list[Path]:
    """The sub-folders that hold an adapter, or what is left of one, by name; other folders are none of ours."""
    return sorted(path for path in Path(folder).iterdir() if path.is_dir() and any(path.glob("adapter_*")))


def summary(state: dict, folder: str, refused: int) -> list[str]:
    """Lines on what is about to be served, from the scheduler's ``ScuteManager.state()``."""
    sizes = f"arena {state['pool']['arena_bytes'] >> 20} MiB, {state['slots']} slots, {state['modules']} modules"
    graphs = f"{state['captured']} graphs" if state["captured"] else "no CUDA graphs"
    lines = [f"ready: {sizes}, {graphs}, {hooks.count() + state['hooks']} hooks verified"]
    names = ", ".join(map(repr, state["tenants"])) or "none"
    lines.append(f"{len(state['tenants'])} adapters loaded: {names}")
    if folder:
        lines.append(f"{refused} adapters of {folder} refused" + (", for the reasons above" if refused else ""))
    return lines


async def _load(manager, path: Path):
    most = manager.server_args.max_loaded_loras
    if most is not None and manager.lora_registry.num_registered_loras >= most:
        hint = f"{most} adapters are loaded, as many as --max-loaded-loras allows"
        raise AdapterError("no_slot", hint, adapter=path.name)
    return await hooks_loads.load(manager, LoadLoRAAdapterReqInput(lora_name=path.name, lora_path=str(path)))


async def _one_pass(manager) -> None:
    """From its first pass the scheduler learns which layers the model calls; adapters of others are then refused."""
    request = GenerateReqInput(input_ids=[1], sampling_params={"max_new_tokens": 1, "temperature": 0})
    async for _ in manager.generate_request(request):
        pass
