"""Nine adapters of five methods in one served batch, against PEFT in float32.

    python benchmarks/exactness.py --out benchmarks/results/exactness_h200.json      # one GPU, fp16 and bf16
    python benchmarks/exactness.py --tiny --device cpu --dtypes float32 bfloat16

A random Llama of 1.2 billion parameters (std 0.02) and nine adapters that PEFT writes, each of an effect between 0.3
and 1.0 nat. All of them and rows of the base are generated in one mixed batch with CUDA graphs; then PEFT reads the
same tokens. Judged are the log-probabilities of the chosen token and of the 20 likeliest, at every position.

  effect        mean |PEFT float32 with the adapter - PEFT float32 without|
  mean_error    mean |served - PEFT float32|, p999_error its 99.9th percentile
  peft_error    mean |PEFT in the serving dtype - PEFT float32|: what PEFT itself loses
  base_error    mean_error of the base's rows in the same batch

A row is ok if its mean error is at most 1.25 times peft_error and 1.5 times base_error, its 99.9th percentile at most
1.5 times a plain LoRA's, and, in float16, its error at most 1.5% of its effect. float32 must be within 1e-5. Plain
LoRA is also served by SGLang's own triton backend, for comparison only.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import record
import torch
from engines import PLAIN
from peft_models import LLAMA_1B, TINY, recipes, write_adapters, write_base

from scute_sgl import judge as judging
from scute_sgl.judge import FLOAT32_ERROR, PEFT_ERROR, TOP, Answers, Peft, load_base

EFFECTS = (0.3, 1.0)
LIMITS = {"peft_error": PEFT_ERROR, "base_error": 1.5, "p999_of_lora": 1.5, "error_over_effect_fp16": 0.015}


def generate(engine, names: list[str | None], args) -> dict[str | None, Answers]:
    """One batch: ``args.rows`` rows for each name."""
    return judging.generate(engine, names, args.config["vocab_size"], args.rows, args.prompt, args.new_tokens)


def start(backend: str, base: Path, folders: dict[str, Path], dtype: str, args):
    """An engine that holds the adapters; it decodes in CUDA graphs if there is a GPU."""
    arguments = {"model_path": str(base), "dtype": dtype, "random_seed": 0, "max_total_tokens": 65536}
    if args.device == "cpu":
        arguments |= {"device": "cpu", "skip_tokenizer_init": True, "log_level": "warning"}
    else:
        rows = (1 + len(recipes())) * args.rows
        arguments |= PLAIN | {"cuda_graph_bs_decode": [rows], "mem_fraction_static": 0.3, "tp_size": args.tp}
    paths = {name: str(path) for name, path in folders.items()}
    if backend == "scute":
        import scute_sgl

        return scute_sgl.Engine(lora_paths=paths, **arguments)
    import sglang

    names = [f"{name}={path}" for name, path in paths.items()]
    return sglang.Engine(enable_lora=True, lora_backend=backend, lora_paths=names, **arguments)


def judge(answers: dict, base: Path, folders: dict[str, Path], dtype: torch.dtype, args) -> dict[str | None, dict]:
    """The figures of every adapter (None: the base) against PEFT in float32 and in the serving dtype."""
    exact, same = Peft(base, torch.float32, args.device), Peft(base, dtype, args.device)
    figures = {}
    for name, a in answers.items():
        bare = exact.logprobs(None, a.ids, a.tokens)
        expected, peft = (side.logprobs(folders.get(name), a.ids, a.tokens) for side in (exact, same))
        figures[name] = judging.figures(a.served, expected, bare, peft)
    return figures


def rows_of(backend: str, dtype: str, figures: dict, scales: dict, args) -> list[dict]:
    base_error = figures[None]["mean_error"]
    lora_p999 = max(f["p999_error"] for name, f in figures.items() if name and recipes()[name].method == "LORA")
    rows = []
    for name, f in figures.items():
        row = {
            "method": recipes()[name].method if name else "base",
            "adapter": name or "base",
            "backend": backend,
            "dtype": dtype,
            "tp": args.tp,
            **f,
            "base_error": base_error,
            "error_over_effect": f["mean_error"] / f["effect"] if name else None,
            "scale": scales.get(name),
        }
        rows.append(row | {"ok": is_ok(row, lora_p999)})
    return rows


def is_ok(row: dict, lora_p999: float) -> bool:
    if row["dtype"] == "float32":
        return row["max_error"] <= FLOAT32_ERROR
    if row["method"] == "base":
        return row["mean_error"] <= LIMITS["peft_error"] * row["peft_error"]
    return (
        EFFECTS[0] <= row["effect"] <= EFFECTS[1]
        and row["mean_error"] <= LIMITS["peft_error"] * row["peft_error"]
        and row["mean_error"] <= LIMITS["base_error"] * row["base_error"]
        and row["p999_error"] <= LIMITS["p999_of_lora"] * lora_p999
        and (row["dtype"] != "float16" or row["error_over_effect"] <= LIMITS["error_over_effect_fp16"])
    )


def run_dtype(dtype: str, folder: Path, scales: dict, args) -> list[dict]:
    """All backends in one dtype. The first dtype's base also serves to write the adapters."""
    torch_dtype, base = getattr(torch, dtype), folder / f"base_{dtype}"
    folders = {name: folder / name for name in recipes()}
    write_base(base, args.config, torch_dtype, args.device)
    if not scales:
        scales |= write_adapters(load_base(base, torch.float32, args.device), folder, EFFECTS, TOP, args.device)
        print("scales", {name: round(scale, 4) for name, scale in scales.items()}, flush=True)
    plain = {name: folders[name] for name, recipe in recipes().items() if recipe.method == "LORA"}
    served = {"scute": folders} if args.device == "cpu" else {"scute": folders, "triton": plain}
    rows = []
    for backend, adapters in served.items():
        engine = start(backend, base, adapters, dtype, args)
        answers = generate(engine, [*adapters, None], args)
        if backend == "scute":
            check_one_batch(engine.get_server_info()["internal_states"][0]["scute"])
        engine.shutdown()
        rows += rows_of(backend, dtype, judge(answers, base, adapters, torch_dtype, args), scales, args)
    return rows


def check_one_batch(state: dict) -> None:
    """The server's own counters must say that one forward pass held all nine adapters and all five methods."""
    found = state["max_tenants_in_forward"], state["max_methods_in_forward"]
    if found != (len(recipes()), len({recipe.method for recipe in recipes().values()})):
        raise RuntimeError(f"the largest forward pass held {found[0]} adapters of {found[1]} methods")


def line(row: dict) -> str:
    share = "" if row["error_over_effect"] is None else f"{row['error_over_effect']:.2%}"
    return (
        f"{row['adapter']:9} {row['backend']:7} {row['dtype']:9} effect {row['effect']:6.3f}"
        f"  mean {row['mean_error']:.2e}  p999 {row['p999_error']:.2e}  max {row['max_error']:.2e}"
        f"  peft {row['peft_error']:.2e}"
        f"  base {row['base_error']:.2e}  {share:>7}  {'ok' if row['ok'] else 'NOT OK'}"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--dtypes", nargs="+", default=["float16", "bfloat16"])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="two small layers and few tokens, to try the script")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--rows", type=int, help="rows of the batch for each adapter and for the base")
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new-tokens", type=int)
    args = parser.parse_args(argv)
    args.config = TINY if args.tiny else LLAMA_1B
    args.rows = args.rows or (2 if args.tiny else 8)
    args.new_tokens = args.new_tokens or (16 if args.tiny else 256)
    rows, scales = [], {}
    with tempfile.TemporaryDirectory(prefix="scute-exactness-") as scratch:
        for dtype in args.dtypes:
            rows += run_dtype(dtype, Path(scratch), scales, args)
            record.save(args.out, rows, limits=LIMITS, base={k: v for k, v in args.config.items()})
    print("\n".join(map(line, rows)))
    return 0 if all(row["ok"] for row in rows if row["backend"] == "scute") else 1


if __name__ == "__main__":
    raise SystemExit(main())
