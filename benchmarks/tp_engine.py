"""What tp_checks.py has its engines do, each function in the process of the engine that is its first argument."""

from __future__ import annotations

import asyncio
import math
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engines import PLAIN

if TYPE_CHECKING:
    from scute_sgl.judge import Answers

TOP = 20
WORKERS = 12  # requests in flight during a storm
LONGEST = 16  # tokens of a storm's answer: with 12 requests one ends nearly every step


@dataclass(frozen=True)
class Job:
    """One engine: ``tp`` GPUs, decoding in graphs of these batch sizes (none: eagerly)."""

    base: Path
    dtype: str
    device: str
    tp: int
    graphs: tuple[int, ...]
    arena_mb: int
    tokens: int  # of KV cache
    custom_all_reduce: bool = True

    def arguments(self) -> dict:
        common = {"model_path": str(self.base), "dtype": self.dtype, "tp_size": self.tp, "random_seed": 0}
        common |= {"max_total_tokens": self.tokens, "scute_arena_mb": self.arena_mb, "scute_poison": True}
        common |= {"scute_check_ranks": self.tp > 1, "watchdog_timeout": 120}
        if self.device == "cpu":
            plain = {"device": "cpu", "skip_tokenizer_init": True, "disable_radix_cache": True, "log_level": "warning"}
            return common | plain
        common |= {"mem_fraction_static": 0.4, "disable_custom_all_reduce": not self.custom_all_reduce}
        graphs = {"cuda_graph_bs_decode": list(self.graphs)} if self.graphs else {"disable_cuda_graph": True}
        return PLAIN | common | graphs


@dataclass(frozen=True)
class Request:
    """One answer: the tokens after ``prompt``, their log-probabilities, the name asked for and whose files it means."""

    name: str | None
    adapter: str | None
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


def start(job: Job):
    if job.device == "cpu":  # a rank needs cores of its own
        cores = [str(rank % os.cpu_count()) for rank in range(job.tp)]
        os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(cores)
    import scute_sgl

    return scute_sgl.Engine(**job.arguments())


def let_cpu_ranks_talk() -> None:
    """SGLang 0.5.17 sets up NCCL between CPU ranks too. To be called where SGLang's processes start, before they do."""
    from sglang.srt.distributed import parallel_state

    original = parallel_state.init_model_parallel_group

    def over_gloo(*args, **kwargs):
        return original(*args, **kwargs | {"use_pynccl": False, "use_custom_allreduce": False})

    parallel_state.init_model_parallel_group = over_gloo


def try_load(engine, name: str, folder: str) -> tuple[bool, str, float]:
    """Whether it was loaded, the error, and the seconds that it took."""
    started = time.perf_counter()
    reply = engine.load_lora_adapter(name, folder)
    return reply.success, reply.error_message or "", time.perf_counter() - started


def try_answer(engine, name: str) -> str:
    """Why the adapter does not answer a short request, or not with numbers; "" if it does."""
    try:
        reply = engine.generate(
            input_ids=list(range(3, 19)), sampling_params=sampling(4), lora_path=name, return_logprob=True
        )
    except ValueError as error:
        return str(error)
    logprobs = [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]
    return "" if all(map(math.isfinite, logprobs)) else f"answers with log-probabilities {logprobs}"


def state(engine) -> dict:
    return engine.get_server_info()["internal_states"][0]["scute"]


def score(engine, ids: list[list[int]], names: list[str | None], prompt: int) -> list[list[dict[int, float]]]:
    """For every row and token after its ``prompt``: log-probabilities of that token and of the likeliest ones."""
    replies = engine.generate(
        input_ids=ids,
        lora_path=names,
        sampling_params={"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
        return_logprob=True,
        logprob_start_len=prompt - 1,
        top_logprobs_num=TOP,
    )
    rows = []
    for reply in replies:
        meta = reply["meta_info"]
        pairs = zip(meta["input_token_logprobs"], meta["input_top_logprobs"], strict=True)
        rows.append([{entry[1]: entry[0] for entry in [*top, one]} for one, top in pairs if one[0] is not None])
    return rows


def answer(engine, requests: list[Request]) -> list[Request]:
    """The same requests answered by this engine, by the adapter's own name."""
    replies = engine.generate(
        input_ids=[request.prompt for request in requests],
        lora_path=[request.adapter for request in requests],
        sampling_params=[sampling(len(request.tokens)) for request in requests],
        return_logprob=True,
    )
    return [answered(r.adapter, r.adapter, r.prompt, reply) for r, reply in zip(requests, replies, strict=True)]


def storm(engine, folders: dict[str, str], steps: int, seed: int, vocabulary: int) -> tuple[list[Request], dict]:
    """Requests of ever other tenants for ``steps`` decode steps while copies of their adapters come and go.

    The tenants in ``folders`` are loaded already. Steps are counted graph replays, without graphs forward passes.
    """
    return engine.loop.run_until_complete(_storm(engine, folders, steps, random.Random(seed), vocabulary))


async def _storm(engine, folders, steps, rng, vocabulary) -> tuple[list[Request], dict]:
    from sglang.srt.managers.io_struct import LoadLoRAAdapterReqInput, UnloadLoRAAdapterReqInput

    manager = engine.tokenizer_manager
    names: dict[str | None, str | None] = {None: None} | {name: name for name in folders}  # -> adapter
    requests, counts, finished = [], {"loads": 0, "unloads": 0, "gone": 0}, asyncio.Event()

    async def ask() -> None:
        while not finished.is_set():
            name = rng.choice(list(names))
            adapter = names[name]
            prompt = [rng.randrange(3, vocabulary) for _ in range(rng.randint(4, 24))]
            parameters = sampling(rng.randint(1, LONGEST))
            try:
                reply = await engine.async_generate(
                    input_ids=prompt, sampling_params=parameters, lora_path=name, return_logprob=True
                )
            except ValueError as error:  # unloaded between choosing and asking
                if "refused [not_found]" not in str(error):
                    raise
                counts["gone"] += 1
                continue
            requests.append(answered(name, adapter, prompt, reply))

    async def come_and_go() -> None:
        number, copies = 0, []
        while not finished.is_set():
            if copies and (len(copies) == 2 * len(folders) or rng.random() < 0.45):
                name = copies.pop(rng.randrange(len(copies)))
                del names[name]
                reply = await manager.unload_lora_adapter(UnloadLoRAAdapterReqInput(lora_name=name), None)
                counts["unloads"] += 1
            else:
                adapter, number = rng.choice(list(folders)), number + 1
                name = f"copy_{number}_of_{adapter}"
                request = LoadLoRAAdapterReqInput(lora_name=name, lora_path=folders[adapter])
                reply = await manager.load_lora_adapter(request, None)
                names[name] = adapter
                copies.append(name)
                counts["loads"] += 1
            if not reply.success:
                raise RuntimeError(reply.error_message)
            await asyncio.sleep(0.05)
        for name in copies:
            await manager.unload_lora_adapter(UnloadLoRAAdapterReqInput(lora_name=name), None)

    async def watch(begin: int) -> None:
        try:
            while _steps(await _state(manager)) < begin + steps:
                await asyncio.sleep(0.2)
        finally:
            finished.set()

    before = await _state(manager)
    await asyncio.gather(watch(_steps(before)), come_and_go(), *(ask() for _ in range(WORKERS)))
    after = await _state(manager)
    counts |= {key: after[key] - before[key] for key in ("forwards", "replays", "rank_checks")}
    counts |= {key: after["pool"][key] - before["pool"][key] for key in ("swap_ins", "evictions")}
    return requests, counts | {"requests": len(requests)}


async def _state(manager) -> dict:
    return (await manager.get_internal_state())[0]["scute"]


def _steps(state: dict) -> int:
    return state["replays"] or state["forwards"]


def sampling(new_tokens: int) -> dict:
    return {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}


def answered(name: str | None, adapter: str | None, prompt: list[int], reply: dict) -> Request:
    chosen = reply["meta_info"]["output_token_logprobs"]
    return Request(name, adapter, prompt, [entry[1] for entry in chosen], [entry[0] for entry in chosen])


def agreeing(left: list[int], right: list[int]) -> int:
    """Length of the common beginning."""
    return next((i for i, (a, b) in enumerate(zip(left, right)) if a != b), min(len(left), len(right)))


def in_common(left: list[dict[int, float]], right: list[dict[int, float]]) -> list[tuple[float, float]]:
    """Log-probabilities of every token that both have at a position."""
    return [(a[token], b[token]) for a, b in zip(left, right) for token in a.keys() & b.keys()]


def decoded(answers: Answers) -> list[list[dict[int, float]]]:
    """Rows of positions of log-probabilities by token, the chosen one first."""
    rows = zip(answers.tokens.tolist(), answers.served.tolist(), strict=True)
    return [[dict(zip(*position, strict=True)) for position in zip(*row, strict=True)] for row in rows]
