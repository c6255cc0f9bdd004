"""What exactness.py and tp_checks.py make of answers: figures against PEFT, rows, and whether a row is ok."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from peft_models import EFFECTS, Recipe

from scute_sgl import judge as judging
from scute_sgl.judge import FLOAT32_ERROR, PEFT_ERROR, Peft

LIMITS = {"peft_error": PEFT_ERROR, "base_error": 1.5, "p999_of_lora": 1.5, "error_over_effect_fp16": 0.015}


def judge(
    runs: list[dict], base: Path, folders: dict[str, Path], dtype: torch.dtype, errors: dict, args,
    so_far: Callable[[list[dict]], None] = lambda figures: None,
) -> list[dict]:  # fmt: skip
    """For the answers of each engine the figures of every adapter (None: the base), against PEFT in float32 and in the
    serving dtype. PEFT reads all engines' answers of an adapter at once, the base's first; what it cannot run gets into
    ``errors``. ``so_far`` gets the figures after each.
    """
    exact, same = Peft(base, torch.float32, args.device), Peft(base, dtype, args.device)
    figures = [{} for _ in runs]
    for name in sorted(runs[0], key=lambda name: name is not None):
        ids, tokens = (torch.cat([getattr(answers[name], part) for answers in runs]) for part in ("ids", "tokens"))
        begun = time.perf_counter()
        try:
            bare = exact.logprobs(None, ids, tokens)
            expected, peft = (side.logprobs(folders.get(name), ids, tokens) for side in (exact, same))
        except Exception as error:  # noqa: BLE001 - the others are judged all the same
            errors[name] = f"PEFT cannot run it: {type(error).__name__}: {error}"
            continue
        print(f"  PEFT has read {name or 'the base'} in {time.perf_counter() - begun:.1f} s", flush=True)
        parts = zip(*(t.split(args.rows) for t in (expected, bare, peft)), strict=True)
        for answers, found, part in zip(runs, figures, parts, strict=True):
            found[name] = judging.figures(answers[name].served, *part)
        so_far(figures)
    return figures


def rows_of(
    backend: str, dtype: str, chosen: dict[str, Recipe], figures: dict, errors: dict, scales: dict, args
) -> list[dict]:
    """A row for every adapter and the base: its figures, or its error."""
    base_error = figures[None]["mean_error"] if None in figures else math.nan
    plain = [f["p999_error"] for name, f in figures.items() if name and chosen[name].method == "LORA"]
    rows = []
    for name in [*chosen, None]:
        row = {"method": chosen[name].method if name else "base", "adapter": name or "base"}
        row |= {"backend": backend, "dtype": dtype, "tp": args.tp}
        if name not in figures:
            rows.append(row | {"ok": False, "error": errors.get(name, "not read by PEFT yet")})
            continue
        f = figures[name]
        row |= f | {
            "base_error": base_error,
            "error_over_effect": f["mean_error"] / f["effect"] if name else None,
            "scale": scales.get(name),
        }
        rows.append(row | {"ok": is_ok(row, max(plain, default=math.nan))})
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


def line(row: dict) -> str:
    if "error" in row:
        return f"{row['adapter']:9} {row['backend']:7} {row['dtype']:9} NOT OK: {row['error']}"
    share = "" if row["error_over_effect"] is None else f"{row['error_over_effect']:.2%}"
    return (
        f"{row['adapter']:9} {row['backend']:7} {row['dtype']:9} effect {row['effect']:6.3f}"
        f"  mean {row['mean_error']:.2e}  p999 {row['p999_error']:.2e}  max {row['max_error']:.2e}"
        f"  peft {row['peft_error']:.2e}"
        f"  base {row['base_error']:.2e}  {share:>7}  {'ok' if row['ok'] else 'NOT OK'}"
    )
