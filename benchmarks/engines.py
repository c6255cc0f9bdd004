"""The engines that the decode benchmark measures: the base model's, ours, and SGLang's own LoRA backends."""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from adapters import write_adapter
from byte_model import bytes_of_tenant
from workloads import Kind

STOCK = {"csgmv": "csgmv", "triton": "triton", "triton_experimental": "triton"}  # our name -> SGLang's
EXPERIMENTAL = "SGLANG_EXPERIMENTAL_LORA_OPTI"
INPUT = 128  # tokens of every prompt
MAX_TOKENS = 32768  # of KV cache: more than any workload needs, and two engines fit on one GPU

PLAIN = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "skip_tokenizer_init": True,
    "cuda_graph_backend_prefill": "disabled",
    "disable_radix_cache": True,
    "log_level": "warning",
}  # the plainest SGLang on a GPU: nothing here depends on optional packages


@dataclass(frozen=True)
class Settings:
    model: Path
    scratch: Path  # adapters are written here, and deleted once an engine holds them
    capture: tuple[int, ...]  # batch sizes to capture
    slots: int  # of our engine
    memory: float  # mem_fraction_static

    def arguments(self) -> dict:
        return PLAIN | {
            "model_path": str(self.model),
            "load_format": "dummy",
            "dtype": "float16",
            "random_seed": 0,
            "mem_fraction_static": self.memory,
            "max_total_tokens": MAX_TOKENS,
            "cuda_graph_bs_decode": list(self.capture),
        }


class Burst:
    """Times bursts of equal requests on one engine."""

    def __init__(self, engine):
        self.engine = engine

    def seconds(self, rows: list[str | None], new_tokens: int) -> float:
        """Wall time of one request per row, with that row's adapter (None: the base model)."""
        numbers = random.Random(0)
        prompts = [[numbers.randrange(10, 100_000) for _ in range(INPUT)] for _ in rows]
        sampling = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
        adapters = {"lora_path": rows} if any(rows) else {}
        started = time.perf_counter()
        self.engine.generate(input_ids=prompts, sampling_params=sampling, **adapters)
        return time.perf_counter() - started


def start_base(settings: Settings):
    import sglang

    return sglang.Engine(**settings.arguments())


def start_scute(settings: Settings, tenants: dict[str, Kind]):
    """Our engine with all these tenants loaded, in an arena that holds them all at once."""
    import scute_sgl

    need = sum(bytes_of_tenant(kind) for kind in tenants.values())
    engine = scute_sgl.Engine(
        **settings.arguments(),
        max_loras_per_batch=settings.slots,
        scute_arena_mb=int(1.05 * need / 2**20) + 512,
    )
    for name, kind in tenants.items():
        path = write_adapter(settings.scratch, kind, name, device="cuda")
        reply = engine.load_lora_adapter(name, str(path))
        if not reply.success:
            raise RuntimeError(reply.error_message)
        shutil.rmtree(path)
    return engine


def start_stock(settings: Settings, backend: str, rank: int, tenants: dict[str, Kind]):
    """SGLang's own backend at this maximum rank. Its pool pads every adapter to it, so ranks get engines of their own."""
    import sglang

    paths = {name: write_adapter(settings.scratch, kind, name, device="cuda") for name, kind in tenants.items()}
    with environment(EXPERIMENTAL, "1" if backend == "triton_experimental" else "0"):
        engine = sglang.Engine(
            **settings.arguments(),
            enable_lora=True,
            lora_backend=STOCK[backend],
            lora_paths=[f"{name}={path}" for name, path in paths.items()],
            max_loras_per_batch=len(tenants) + 1,
            max_lora_rank=rank,
        )
    for path in paths.values():
        shutil.rmtree(path)
    return engine


def check_distinct(engine, names: list[str]) -> None:
    """Distinct tenants must be distinct in memory: what they occupy is at least the sum of their images."""
    state = engine.get_server_info()["internal_states"][0]["scute"]
    images = sum(state["tenants"][name]["bytes"] for name in set(names))
    used = state["pool"]["used"]
    if used < images:
        raise RuntimeError(f"{len(set(names))} tenants of {images} bytes occupy {used} bytes of the arena")


@contextmanager
def environment(name: str, value: str):
    """Set for the processes that are started inside the with block."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def patch_stock_loader() -> None:
    """Let stock LoRA read adapter files beside a ``load_format="dummy"`` base: SGLang 0.5.17 fills them with noise.

    Edits the installed sglang/srt/lora/lora.py; meant for a throw-away copy.
    """
    root = importlib.util.find_spec("sglang").submodule_search_locations[0]
    source = Path(root) / "srt" / "lora" / "lora.py"
    old, new = "DefaultModelLoader(self.load_config)", "DefaultModelLoader(LoadConfig())"
    text = source.read_text()
    if new not in text:
        if text.count(old) != 1:
            raise RuntimeError(f"{source} is not the file that this patch was made for")
        source.write_text(text.replace(old, new))
