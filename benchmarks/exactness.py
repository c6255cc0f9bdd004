"""Adapters of many methods in one served batch, against PEFT in float32.

    python benchmarks/exactness.py --out benchmarks/results/exactness_h200.json      # one GPU, fp16 and bf16
    python benchmarks/exactness.py --adapters every --out benchmarks/results/exactness_every_h200.json
    python benchmarks/exactness.py --tiny --device cpu --dtypes float32 bfloat16

A random Llama of 1.2 billion parameters (std 0.02) and adapters that PEFT writes on it, each of an effect between 0.3
and 1.0 nat: nine of five methods, or one of every method (every_method.py) beside two plain LoRAs. All of them and rows
of the base are generated in one mixed batch with CUDA graphs; then PEFT reads the same tokens. Judged are the
log-probabilities of the chosen token and of the 20 likeliest, at every position.

  effect        mean |PEFT float32 with the adapter - PEFT float32 without|
  mean_error    mean |served - PEFT float32|, p999_error its 99.9th percentile
  peft_error    mean |PEFT in the serving dtype - PEFT float32|: what PEFT itself loses
  base_error    mean_error of the base's rows in the same batch

A row is ok if its mean error is at most 1.25 times peft_error and 1.5 times base_error, its 99.9th percentile at most
1.5 times a plain LoRA's, and, in float16, its error at most 1.5% of its effect. float32 must be within 1e-5. An adapter
that PEFT cannot write or run, or that is refused, has its error in place of figures, is not ok, and is left out of the
batch. Of the nine, plain LoRA is also served by SGLang's own triton backend, for comparison only.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import every_method
import judged
import record
import torch
import tp_engine
from engines import PLAIN, EngineProcess
from peft_models import LLAMA_1B, TINY, Recipe, recipes, write_adapters, write_base

from scute_sgl import judge as judging
from scute_sgl.judge import Answers, Peft

START_SECONDS, ASK_SECONDS = 600, 300  # without an answer for so long, something hangs


def choose(args) -> dict[str, Recipe]:
    """The adapters of a run; KeyError for a served method that has no recipe."""
    chosen = every_method.recipes() if args.adapters == "every" else recipes()
    return {name: recipe for name, recipe in chosen.items() if args.tp == 1 or recipe.method not in every_method.WHOLE}


def generate(engine, names: list[str | None], folders: dict[str, Path], args) -> dict[str | None, Answers]:
    """One batch: ``args.rows`` rows for each name."""
    sizes = args.config["vocab_size"], args.rows, args.prompt, args.new_tokens
    return judging.generate(engine, names, *sizes, folders)


def start(backend: str, base: Path, folders: dict[str, Path], dtype: str, adapters: int, args):
    """For a batch of so many adapters; it holds those in ``folders``, and decodes in CUDA graphs if there is a GPU."""
    rows = (1 + adapters) * args.rows
    tokens = max(65536, 2 * rows * (args.prompt + args.new_tokens))
    arguments = {"model_path": str(base), "dtype": dtype, "random_seed": 0, "max_total_tokens": tokens}
    if args.device == "cpu":
        arguments |= {"device": "cpu", "skip_tokenizer_init": True, "log_level": "warning"}
    else:
        arguments |= PLAIN | {"cuda_graph_bs_decode": [rows], "mem_fraction_static": 0.3, "tp_size": args.tp}
    paths = {name: str(path) for name, path in folders.items()}
    if backend == "scute":
        import scute_sgl

        return scute_sgl.Engine(lora_paths=paths or None, **arguments)
    import sglang

    names = [f"{name}={path}" for name, path in paths.items()]
    return sglang.Engine(enable_lora=True, lora_backend=backend, lora_paths=names, **arguments)


def hold(engine: EngineProcess, folders: dict[str, Path], errors: dict[str | None, str]) -> None:
    """Load each adapter and ask it alone: what is refused or fails so gets into ``errors`` and must stay out of a batch."""
    engine.ask(tp_engine.state, seconds=START_SECONDS)
    for name, folder in folders.items():
        if name not in errors:
            loaded, error, _ = engine.ask(tp_engine.try_load, name, str(folder), seconds=ASK_SECONDS)
            error = engine.ask(tp_engine.try_answer, name, seconds=ASK_SECONDS) if loaded else error
            if error:
                errors[name] = error


def answer(
    engine: EngineProcess, names: list[str | None], folders: dict[str, Path], chosen: dict[str, Recipe], args
) -> tuple[dict, str]:
    """The answers of one batch; and by the server's own counters, whether no forward pass held all of it, or it ran
    without graphs ("" if neither)."""
    before = engine.ask(tp_engine.state, seconds=ASK_SECONDS)["replays"]
    answers = engine.ask(generate, names, folders, args, seconds=ASK_SECONDS)
    state = engine.ask(tp_engine.state, seconds=ASK_SECONDS)
    adapters = [name for name in names if name]
    found = state["max_tenants_in_forward"], state["max_methods_in_forward"]
    if found != (len(adapters), len({chosen[name].method for name in adapters})):
        return answers, f"the largest forward pass held {found[0]} adapters of {found[1]} methods"
    steps, replays = args.new_tokens - 1, state["replays"] - before
    if args.device == "cuda" and replays < steps:
        return answers, f"only {replays} of {steps} decode steps were replays of a CUDA graph"
    return answers, ""


def run_dtype(dtype: str, folder: Path, chosen: dict[str, Recipe], scales: dict, args, keep: Callable) -> list[dict]:
    """All backends in one dtype. PEFT writes the adapters on the base that is served, in float32. ``keep`` gets the rows
    whenever PEFT has read one more adapter: a run that is cut short has them."""
    torch_dtype, base = getattr(torch, dtype), folder / "base"
    folders = {name: folder / name for name in chosen}
    write_base(base, args.config, torch_dtype, args.device)
    ours = run_backend("scute", base, folders, torch_dtype, chosen, scales, args, keep)
    if args.device != "cuda" or args.adapters != "nine":
        return ours
    plain = {name: recipe for name, recipe in chosen.items() if recipe.method == "LORA"}
    folders = {name: folders[name] for name in plain}
    return ours + run_backend(
        "triton", base, folders, torch_dtype, plain, scales, args, lambda theirs: keep(ours + theirs)
    )


def run_backend(
    backend: str, base: Path, folders: dict, dtype: torch.dtype, chosen: dict, scales: dict, args, keep: Callable
) -> list[dict]:
    """Ours starts while the adapters are written, and gets them one by one."""

    def rows(figures: list[dict]) -> list[dict]:
        found = judged.rows_of(backend, name, chosen, figures[0], errors, scales, args)
        return [row | {"ok": False, "batch": wrong} for row in found] if wrong else found

    name, errors, answers, wrong = str(dtype).removeprefix("torch."), {}, {}, ""
    at_start = {} if backend == "scute" else folders
    with EngineProcess(start, backend, base, at_start, name, len(chosen), args) as engine:
        if backend == "scute":
            exact = Peft(base, torch.float32, args.device)
            errors |= write_adapters(exact, chosen, base.parent, scales, args.prompt, args.new_tokens)
            del exact
            record.stage(f"{name}: adapters are written")
        try:
            if backend == "scute":
                hold(engine, folders, errors)
                record.stage(f"{name}: the engine holds them")
                held = [adapter for adapter in folders if adapter not in errors]
                answers, wrong = answer(engine, [*held, None], folders, chosen, args)
            else:
                answers = engine.ask(generate, [*folders, None], folders, args, seconds=START_SECONDS)
        except Exception as error:  # noqa: BLE001 - the next dtype is wanted all the same
            errors = dict.fromkeys([*chosen, None], f"{type(error).__name__}: {error}") | errors
    record.stage(f"{name}: {backend} has answered {wrong}")
    figures = judged.judge([answers], base, folders, dtype, errors, args, lambda figures: keep(rows(figures)))
    record.stage(f"{name}: answers are judged")
    return rows(figures)


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Which adapters, on which base, and how much of each is judged."""
    parser.add_argument("--adapters", default="nine", choices=["nine", "every"], help="nine, or one of every method")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="two small layers and few tokens, to try the script")
    parser.add_argument("--rows", type=int, help="rows of the batch for each adapter and for the base")
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, help="judged positions of a row; on the large base 2,048 of an adapter")


def set_sizes(args, tiny: dict) -> None:
    args.config = tiny if args.tiny else LLAMA_1B
    args.rows = args.rows or (2 if args.tiny else 4 if args.adapters == "every" else 8)
    args.new_tokens = args.new_tokens or (16 if args.tiny else -(-2048 // args.rows))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--dtypes", nargs="+", default=["float16", "bfloat16"])
    parser.add_argument("--tp", type=int, default=1)
    add_sizes(parser)
    args = parser.parse_args(argv)
    set_sizes(args, TINY)
    rows, scales, chosen = [], {}, choose(args)

    def keep(new: list[dict]) -> None:
        record.save(args.out, rows + new, limits=judged.LIMITS, base=args.config)

    for dtype in args.dtypes:
        with tempfile.TemporaryDirectory(prefix="scute-exactness-") as scratch:
            rows += run_dtype(dtype, Path(scratch), chosen, scales, args, keep)
        keep([])
    print("\n".join(map(judged.line, rows)))
    return 0 if all(row["ok"] for row in rows if row["backend"] == "scute") else 1


if __name__ == "__main__":
    raise SystemExit(main())
