"""``scute verify``: adapters served in one mixed batch, against PEFT in float32.

The engine answers random prompts with every adapter and with the base, and ends; then PEFT reads the same tokens with
one adapter at a time. Judged are the log-probabilities of the chosen token and of the 20 likeliest at every position.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from scute_sgl import memory
from scute_sgl.console import above_0, assignment, positive, say
from scute_sgl.errors import printable
from scute_sgl.options import MIB, Options

if TYPE_CHECKING:
    from torch import Tensor

    from scute_sgl.judge import Answers, Peft

MOST_TOKENS = 10_000_000  # whose 20 likeliest are kept in host memory
DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "verify",
        help="serve adapters in one mixed batch and compare them with PEFT float32",
        description=__doc__,
        epilog="Exit status: 0 if every adapter is ok, 1 if one is not or is refused, 2 if nothing could be verified.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", required=True, type=Path, metavar="DIR", help="folder of the base model, with *.safetensors")
    add("--adapters", required=True, nargs="+", metavar="ADAPTER", help="folders, or NAME=FOLDER")
    add("--dtype", choices=DTYPES, help="of serving; default: the base's own")
    add("--device", choices=("cpu", "cuda"), help="of serving; default: cuda where there is one")
    add("--reference", choices=("cpu", "cuda"), help="device of PEFT; default: the same, or cpu if that is too small")
    add("--rows", type=positive, default=4, help="rows of the batch for each adapter and for the base (4)")
    add("--prompt", type=positive, default=32, help="tokens of a prompt (32)")
    add("--new-tokens", type=positive, default=64, help="judged positions of a row (64)")
    add("--tolerance", type=above_0, help="float32: largest error (1e-5); 16 bit: mean error over PEFT's own (1.25)")
    add("--engine", nargs="+", type=assignment, default=[], metavar="NAME=VALUE", help="such as tp_size=2")
    add("--json", action="store_true", help="print a JSON list and nothing else")
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class Job:
    """One batch to serve."""

    model: Path
    folders: dict[str, Path]
    dtype: str
    device: str
    reference: str
    rows: int
    prompt: int
    new_tokens: int
    vocabulary: int
    engine: dict  # further arguments of sglang.Engine

    @property
    def arena_mb(self) -> int:
        """A server's own default and twice the files, because all adapters are in one batch."""
        import torch

        files = 2 * sum(map(memory.weights_bytes, self.folders.values()))
        default = (Options.read().arena_bytes(torch.device(self.device)) + files) // MIB
        return int(self.engine.get("scute_arena_mb", default))

    @property
    def needs(self) -> dict[str, tuple[str, int]]:
        """What -> device and bytes, one after the other."""
        weights = memory.parameters_of(self.model)
        served = weights * DTYPES[self.dtype] // int(self.engine.get("tp_size", 1))
        logits = 4 * (self.prompt + self.new_tokens) * self.vocabulary  # of one row, and their log-probabilities
        adapter = max(map(memory.weights_bytes, self.folders.values()))  # and what it is folded to
        return {
            "serving": (self.device, int(memory.SPARE * served) + self.arena_mb * MIB),
            "PEFT float32": (self.reference, int(memory.SPARE * 4 * (weights + logits)) + 4 * adapter),
        }


@dataclass(frozen=True)
class Served:
    answers: dict[str | None, Answers]
    methods: dict[str, str]
    refused: dict[str, str]
    together: int  # the most tenants that one forward pass held


def run(args) -> int:
    try:
        job = job_of(args)
        memory.check(job.needs, say)
        say(f"serving {len(job.folders)} adapters and the base in {job.dtype} on {job.device} ...")
        served = in_a_process(serve, job)
        say(f"the largest forward pass held {served.together} adapters")
        rows = judge(job, served, args.tolerance)
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        say(f"scute verify: {error}")
        return 2
    print(json.dumps(rows) if args.json else table(rows))
    return 0 if all(row["ok"] for row in rows) else 1


def in_a_process(function, job: Job) -> Served:
    """SGLang ends the process whose engine cannot start; and memory ends with a process. RuntimeError if it fails."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as child:
        try:
            return child.submit(function, job).result()
        except BrokenProcessPool:
            raise RuntimeError("the engine ended; its last words are above") from None
        except Exception as error:
            raise RuntimeError(f"the engine failed: {type(error).__name__}: {error}") from None


def job_of(args) -> Job:
    """What the arguments ask for. ValueError, ImportError or OSError, in words, where they cannot be met."""
    if importlib.util.find_spec("peft") is None:
        raise ImportError("the comparison needs PEFT: pip install 'scute_sgl[verify]'")
    from scute_sgl.checkpoint import read_base_config  # imports torch

    config = read_base_config(args.model)
    inner = config.get("text_config") or {}
    config |= inner if isinstance(inner, dict) else {}
    vocabulary, dtype = config.get("vocab_size"), args.dtype or config.get("dtype") or config.get("torch_dtype")
    if not isinstance(vocabulary, int) or vocabulary < 1:
        raise ValueError(f"{args.model}/config.json: vocab_size: found {vocabulary!r}, want a whole number above 0")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"the base is in {dtype}; want --dtype {', '.join(DTYPES)}")
    if not memory.parameters_of(args.model):
        raise ValueError(f"--model {str(args.model)!r}: no *.safetensors there")
    folders = {}
    for given in args.adapters:
        name, _, folder = given.rpartition("=") if not Path(given).is_dir() else ("", "", given)
        if not folder or not Path(folder).is_dir():
            raise ValueError(f"--adapters {given!r}: no such folder")
        name = name or Path(folder).resolve().name
        if name in folders:
            raise ValueError(f"two adapters are named {name!r}; give names: NAME=FOLDER")
        folders[name] = Path(folder)
    device = args.device or ("cuda" if memory.free_bytes("cuda") else "cpu")
    if not memory.free_bytes(device):
        raise ValueError(f"--device {device}: there is none")
    engine = dict(args.engine)
    for number in ("tp_size", "scute_arena_mb"):
        if number in engine and (not isinstance(engine[number], int) or engine[number] < 1):
            raise ValueError(f"--engine {number}={engine[number]!r}: want a whole number above 0")
    if (tokens := (1 + len(folders)) * args.rows * (args.prompt + args.new_tokens)) > MOST_TOKENS:
        raise ValueError(f"{tokens:,} tokens in one batch, want at most {MOST_TOKENS:,}: fewer --rows or tokens of one")
    rest = args.rows, args.prompt, args.new_tokens, vocabulary, engine
    job = Job(args.model, folders, dtype, device, args.reference or device, *rest)
    if args.reference is None and job.needs["PEFT float32"][1] > memory.free_bytes(device):
        job = replace(job, reference="cpu")
    return job


def serve(job: Job) -> Served:
    """The batch's answers. Takes the whole process: its engine, and its standard output, which is for the result."""
    os.dup2(2, 1)
    import scute_sgl
    from scute_sgl.judge import generate

    tokens = (1 + len(job.folders)) * job.rows * (job.prompt + job.new_tokens)
    arguments = {"dtype": job.dtype, "random_seed": 0, "skip_tokenizer_init": True, "log_level": "warning"}
    arguments |= {"max_total_tokens": max(4096, 2 * tokens), "scute_arena_mb": job.arena_mb} | job.engine
    engine = scute_sgl.Engine(str(job.model), device="cpu" if job.device == "cpu" else None, **arguments)
    try:
        loads = {name: engine.load_lora_adapter(name, str(folder)) for name, folder in job.folders.items()}
        refused = {name: load.error_message for name, load in loads.items() if not load.success}
        names = [None, *(name for name in loads if name not in refused)]
        answers = generate(engine, names, job.vocabulary, job.rows, job.prompt, job.new_tokens, job.folders)
        state = engine.get_server_info()["internal_states"][0]["scute"]
    finally:
        engine.shutdown()
    methods = {name: tenant["method"] for name, tenant in state["tenants"].items()}
    return Served(answers, methods, refused, state["max_tenants_in_forward"])


def judge(job: Job, served: Served, tolerance: float | None) -> list[dict]:
    """A row for the base and for every adapter, in the order given."""
    import torch
    from transformers.utils import logging

    from scute_sgl.judge import Peft, excess, figures

    logging.disable_progress_bar()
    problems = dict(served.refused)
    exact = Peft(job.model, torch.float32, job.reference)
    bare = {name: exact.logprobs(None, a.ids, a.tokens, rows=1) for name, a in served.answers.items()}
    own = expected = read_all(exact, job, served, problems)
    del exact  # its base makes room for the next one
    if job.dtype != "float32":
        own = read_all(Peft(job.model, getattr(torch, job.dtype), job.reference), job, served, problems)
    rows = []
    for name in [None, *job.folders]:
        found, reason = None, problems.get(name)
        if reason is None:
            found = figures(served.answers[name].served, expected[name], bare[name], own[name])
            reason = excess(found, job.dtype, tolerance)
        rows.append(row_of(name, served.methods.get(name) if name else "base", found, reason))
    return rows


def read_all(side: Peft, job: Job, served: Served, problems: dict[str | None, str]) -> dict[str | None, Tensor]:
    """PEFT's log-probabilities of all answers; what it cannot run is added to ``problems``, and the rest goes on."""
    result = {}
    for name, a in served.answers.items():
        if name in problems:
            continue
        say(f"PEFT {str(side.dtype).removeprefix('torch.')} reads {name or 'the base'}")
        try:  # one row at a time: the logits of a large vocabulary are large
            result[name] = side.logprobs(job.folders.get(name), a.ids, a.tokens, rows=1)
        except Exception as error:
            problems[name] = f"PEFT cannot run it: {type(error).__name__}: {error}"
    return result


def row_of(name: str | None, method: str | None, found: dict | None, reason: str) -> dict:
    """``method`` and figures are None for a refused adapter, ``error_over_effect`` also for one without effect."""
    f = found or {"effect": None, "mean_error": None, "max_error": None}
    return {
        "name": name or "base",
        "method": method,
        **{key: f[key] for key in ("effect", "mean_error", "max_error")},
        "error_over_effect": f["mean_error"] / f["effect"] if f["effect"] else None,
        "ok": not reason,
        "reason": reason,
    }


def table(rows: list[dict]) -> str:
    rows = [row | {"name": printable(row["name"])} for row in rows]
    width = max(len("adapter"), *(len(row["name"]) for row in rows))
    lines = [f"{'adapter':{width}} {'method':9} {'effect':>8} {'mean error':>11} {'largest':>9} {'/ effect':>9}"]
    for row in rows:
        figures = " " * 40
        if row["effect"] is not None:
            share = "" if row["error_over_effect"] is None else f"{row['error_over_effect']:.1e}"
            figures = f"{row['effect']:>8.3f} {row['mean_error']:>11.1e} {row['max_error']:>9.1e} {share:>9}"
        verdict = "ok" if row["ok"] else printable(f"NOT OK: {row['reason']}")
        lines.append(f"{row['name']:{width}} {row['method'] or '-':9} {figures}  {verdict}")
    return "\n".join(lines)
