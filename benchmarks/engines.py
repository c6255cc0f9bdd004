"""The engines that the decode benchmark measures: the base model's, ours, and SGLang's own LoRA backends.

Each runs in a process of its own, because engines in one process share settings and end together. They start in the
background, several at a time; the first question waits for the start.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import random
import shutil
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from adapters import write_adapter
from byte_model import bytes_of_tenant
from workloads import Kind

STOCK = {"csgmv": "csgmv", "triton": "triton", "triton_experimental": "triton"}  # our name -> SGLang's
EXPERIMENTAL = "SGLANG_EXPERIMENTAL_LORA_OPTI"
INPUT = 128  # tokens of every prompt
SHUTDOWN_SECONDS = 60
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
    device: str = "cuda"
    tp: int = 1  # tensor-parallel GPUs
    more: dict = field(default_factory=dict)  # further arguments of SGLang's

    def of(self, backend: str) -> Settings:
        """With a scratch folder of its own: engines start side by side, and each deletes what it has read."""
        return replace(self, scratch=self.scratch / backend)

    def arguments(self) -> dict:
        common = {"model_path": str(self.model), "load_format": "dummy", "random_seed": 0}
        common |= {"max_total_tokens": MAX_TOKENS, "skip_tokenizer_init": True, "log_level": "warning"}
        common |= {"tp_size": self.tp} | self.more
        if self.device == "cpu":
            return common | {"device": "cpu", "dtype": "float32"}
        graphs = {"mem_fraction_static": self.memory, "cuda_graph_bs_decode": list(self.capture)}
        return PLAIN | common | graphs | {"dtype": "float16"}


def start_base(settings: Settings):
    import sglang

    return sglang.Engine(**settings.arguments())


def start_scute(settings: Settings, tenants: dict[str, Kind]):
    """Our engine with all these tenants loaded, in an arena that holds them all at once."""
    import scute_sgl

    engine = scute_sgl.Engine(
        **settings.arguments(), max_loras_per_batch=settings.slots, scute_arena_mb=arena_mb(tenants)
    )
    with written(settings, tenants) as paths:
        for name, path in paths.items():
            reply = engine.load_lora_adapter(name, str(path))
            if not reply.success:
                raise RuntimeError(reply.error_message)
    return engine


def arena_mb(tenants: dict[str, Kind]) -> int:
    """MiB of an arena that holds them all at once."""
    return int(1.05 * sum(bytes_of_tenant(kind) for kind in tenants.values()) / 2**20) + 512


def start_stock(settings: Settings, backend: str, rank: int, tenants: dict[str, Kind]):
    """SGLang's own backend at this maximum rank, to which its pool pads every adapter: ranks get their own engines."""
    os.environ[EXPERIMENTAL] = "1" if backend == "triton_experimental" else "0"
    import sglang

    with written(settings, tenants) as paths:
        return sglang.Engine(
            **settings.arguments(),
            enable_lora=True,
            lora_backend=STOCK[backend],
            lora_paths=[f"{name}={path}" for name, path in paths.items()],
            max_loras_per_batch=len(tenants) + 1,
            max_lora_rank=rank,
        )


@contextmanager
def written(settings: Settings, tenants: dict[str, Kind]) -> Iterator[dict[str, Path]]:
    """Each tenant's adapter folder, one for all of a kind: every load makes a copy of its own in the engine's memory."""
    first = {kind: name for name, kind in reversed(tenants.items())}
    paths = {kind: write_adapter(settings.scratch, kind, name, device=settings.device) for kind, name in first.items()}
    yield {name: paths[kind] for name, kind in tenants.items()}
    for path in paths.values():
        shutil.rmtree(path)


class EngineProcess:
    """An engine in its own process, for the length of a with block: times bursts of equal requests, tells its state."""

    def __init__(self, start: Callable, *arguments):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_host, args=(theirs, start, arguments))
        self._process.start()

    def seconds(self, rows: list[str | None], new_tokens: int) -> float:
        """Wall time of a burst of one request per row, with that row's adapter (None: the base model)."""
        return self.ask(_seconds, rows, new_tokens)

    def state(self) -> dict:
        """What our engine tells of its adapters."""
        return self.ask(_state)

    def ask(self, function: Callable, *arguments, seconds: float | None = None):
        """``function(engine, *arguments)`` in the engine's process; TimeoutError if it takes longer than ``seconds``."""
        with suppress(OSError):  # it has ended; what it said last is still to be read
            self._pipe.send((function, arguments))
        if not self._pipe.poll(seconds):
            raise TimeoutError(f"{function.__name__} did not return within {seconds:.0f} s")
        try:
            ok, answer = self._pipe.recv()
        except (EOFError, OSError):
            raise RuntimeError("the engine's process has ended; its last words are above") from None
        if not ok:
            raise RuntimeError(f"the engine's process failed:\n{answer}")
        return answer

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_) -> None:
        with suppress(OSError):  # it has failed and ended already
            self._pipe.send((_shutdown, ()))
        self._process.join(SHUTDOWN_SECONDS)
        self._process.kill()  # it hangs; SGLang's processes end with their parent
        self._process.join()


def _host(pipe, start: Callable, arguments: tuple) -> None:
    try:
        engine = start(*arguments)
        while True:
            function, rest = pipe.recv()
            pipe.send((True, function(engine, *rest)))
            if function is _shutdown:
                return
    except Exception:
        pipe.send((False, traceback.format_exc()))


def _seconds(engine, rows: list[str | None], new_tokens: int) -> float:
    numbers = random.Random(0)
    prompts = [[numbers.randrange(10, 100_000) for _ in range(INPUT)] for _ in rows]
    sampling = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
    adapters = {"lora_path": rows} if any(rows) else {}
    started = time.perf_counter()
    engine.generate(input_ids=prompts, sampling_params=sampling, **adapters)
    return time.perf_counter() - started


def _state(engine) -> dict:
    return engine.get_server_info()["internal_states"][0]["scute"]


def _shutdown(engine) -> None:
    engine.shutdown()


def check_distinct(engine: EngineProcess, names: list[str]) -> None:
    """Distinct tenants must be distinct in memory: what they occupy is at least the sum of their images."""
    state = engine.state()
    images, used = sum(state["tenants"][name]["bytes"] for name in set(names)), state["pool"]["used"]
    if used < images:
        raise RuntimeError(f"{len(set(names))} tenants of {images} bytes occupy {used} bytes of the arena")


def patch_stock_loader() -> None:
    """Let stock LoRA read adapter files beside a dummy base: SGLang 0.5.17 would fill them with random numbers too.

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
