"""Result files as the Markdown tables of the README and of docs/.

    python benchmarks/tables.py                    # print them
    python benchmarks/tables.py --write README.md docs/planning.md  # put them between their markers there

A marker names a file of results/, and after a colon the table if the file has several: decode_h200.json:plan.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from statistics import median

from workloads import COMPARISONS

RESULTS = Path(__file__).resolve().parent / "results"
COUNTED_MS = 0.1  # of less added time, timing noise is too large a part


def table(name: str, folder: Path) -> str:
    """A table of a file in results/, with its date, device, versions and command, for a page in ``folder``."""
    name, _, part = name.partition(":")
    result = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
    caption = f"{result['date']}, {result['device']}; {versions}; commit {result['commit']}; `{result['command']}`"
    kind = part or max((kind for kind in TABLES if name.startswith(f"{kind}_")), key=len)
    rows = TABLES[kind](result["rows"])
    return f"{rows}\n\n{caption}, [raw results]({os.path.relpath(RESULTS / name, folder)})."


def markdown(columns: str, aligned: str, lines: Iterable[str]) -> str:
    """``columns``: the names between bars; ``aligned``: l or r for each; a line holds a row's cells, without the outer bars."""
    rule = " | ".join({"l": "---", "r": "---:"}[side] for side in aligned)
    return "\n".join(f"| {line} |" for line in (columns, rule, *lines))


def served_by(row: dict) -> str:
    return "scute" if row["backend"] == "scute" else f"SGLang's {row['backend']}"


def exactness(rows: list[dict]) -> str:
    def line(row: dict) -> str:
        share = "" if row["error_over_effect"] is None else f"{row['error_over_effect']:.2%}"
        errors = " | ".join(f"{row[key]:.2e}" for key in ("mean_error", "peft_error", "base_error", "p999_error"))
        name = f"{row['adapter']} | {served_by(row)} | {row['tp']} | {row['dtype']}"
        return f"{name} | {row['effect']:.3f} | {errors} | {share}"

    columns = "adapter | served by | GPUs | dtype | effect | mean error | PEFT's own | base rows | 99.9% | error / effect"
    return markdown(columns, "llrlrrrrrr", map(line, rows))


def every(rows: list[dict]) -> str:
    """A line for each method and number of GPUs, with the mean errors in every dtype."""
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    lines = {}
    for row in rows:
        lines.setdefault(f"{row['method']} | {row['adapter']} | {row['tp']}", {})[row["dtype"]] = row

    def figures(row: dict) -> str:
        if "error" in row:
            return "failed |  |  | "
        errors = " | ".join(f"{row[key]:.2e}" for key in ("mean_error", "peft_error", "base_error"))
        return f"{row['effect']:.3f} | {errors}{'' if row['ok'] else ' (not ok)'}"

    columns = "".join(f" | {dtype}: effect | mean error | PEFT's own | base rows" for dtype in dtypes)
    joined = (" | ".join([names, *(figures(of[dtype]) for dtype in dtypes)]) for names, of in lines.items())
    return markdown(f"method | adapter | GPUs{columns}", "llr" + "rrrr" * len(dtypes), joined)


def decode(rows: list[dict]) -> str:
    def line(row: dict) -> str:
        known = [f"{row[key]:g}" if row.get(key) else "" for key in ("target", "best_stock")]
        times = f"{row['tpot_ms']:.2f} | {row['base_ms']:.2f} | {row['ratio']:.3f} | {row['spread']:.3f}"
        name = f"{row['workload']} | {served_by(row)} | {row.get('bs', '')} | {row.get('tenants', '')}"
        return f"{name} | {times} | {' | '.join(known)}"

    columns = "workload | served by | rows | tenants | ms a token | reference ms | ratio | spread | target | SGLang's best"
    return markdown(columns, "llrrrrrrrr", map(line, rows))


def plan(rows: list[dict]) -> str:
    """What the byte model had predicted of our own engine on one GPU, and what was measured; milliseconds added to a step."""
    errors = []

    def line(row: dict) -> str:
        predicted, measured = row["predicted_ms"] - row["base_ms"], row["tpot_ms"] - row["base_ms"]
        error = ""
        if measured >= COUNTED_MS:
            errors.append(predicted / measured - 1)
            error = f"{errors[-1]:+.0%}"
        return f"{row['workload']} | {row['bs']} | {row['tenants']} | {predicted:.2f} | {measured:.2f} | {error}"

    ours = [row for row in rows if row["backend"] == "scute" and row["predicted_ms"] is not None]
    lines = [line(row) for row in ours if row["workload"] not in COMPARISONS]
    found = f"{median(map(abs, errors)):.0%}" if errors else "none"
    shown = markdown("workload | rows | tenants | predicted added ms | measured added ms | error", "lrrrrr", lines)
    return f"{shown}\n\nMedian error, regardless of sign, of {len(errors)} rows that add at least {COUNTED_MS} ms: {found}."


def prefill(rows: list[dict]) -> str:
    """A pass of many rows; a row whose base was never timed as a whole is compared with its GEMMs."""

    def line(row: dict) -> str:
        times = f"{row['base_ms']:.1f} | {row['added_ms']:.1f} | {row['ratio']:.3f}"
        return f"{row['workload']} | {row['gemm_ms']:.1f} | {times} | {row['target'] or ''}"

    passes = [row for row in rows if row["op"] == "pass"]
    return markdown("workload | GEMMs ms | base ms | added ms | ratio | target", "lrrrrr", map(line, passes))


def ops_stock(rows: list[dict]) -> str:
    """A line for each model and workload, with the milliseconds that each backend's ops add to a step's GEMMs."""
    lines = {}
    for row in rows:
        lines.setdefault(f"{row['model']} | {row['workload']} | {row['base_ms']:.2f}", {})[row["backend"]] = row["added_ms"]
    backends = list(dict.fromkeys(row["backend"] for row in rows))
    joined = (" | ".join([name, *(f"{added[backend]:.2f}" for backend in backends)]) for name, added in lines.items())
    columns = "".join(f" | {served_by({'backend': backend})}" for backend in backends)
    return markdown(f"shape of | workload | GEMMs ms{columns}", "llr" + "r" * len(backends), joined)


def traffic(rows: list[dict]) -> str:
    def line(row: dict) -> str:
        rates = " | ".join(f"{row[key]:.1f}" for key in ("request_throughput", "output_throughput", "median_ttft_ms"))
        return f"{row['distribution']} | {row['tenants']} | {row['completed']} | {rates} | {row['median_tpot_ms']:.2f}"

    columns = "requests over tenants | tenants | answered | requests a second | output tokens a second"
    return markdown(f"{columns} | TTFT ms, median | TPOT ms, median", "lrrrrrr", map(line, rows))


def own_bytes(rows: list[dict]) -> str:
    def line(row: dict) -> str:
        shared = f"{row['shared']:,}" if row["shared"] else ""
        sizes = f"{row['bytes']:,} | {row['of_lora64']:.3f} | {shared} | {row['file']:,}"
        return f"{row['method']} | {sizes} | {row['fat'] or ''}"

    columns = "method | bytes | of a rank-64 LoRA's | shared, once for all adapters | own tensors of the file | larger, because"
    return markdown(columns, "lrrrrl", map(line, rows))


def load(rows: list[dict]) -> str:
    """A line for each server, profile and rate; for a server that failed, the reason in one."""

    def line(row: dict) -> str:
        name = f"{row['server']} | {row['profile'] or ''}"
        if "error" in row:
            return f"{name} |  |  | failed: {row['error'][:200].replace('|', '/')} |  |  |  |  |  | "
        times = " | ".join("" if row[key] is None else f"{row[key]:.1f}" for key in LATENCIES)
        met, best = "" if row["attainment"] is None else f"{row['attainment']:.1%}", row["highest_rate"]
        return f"{name} | {row['rate']:g} | {row['requests']} | {row['errors']} | {times} | {met} | {'none' if best is None else format(best, 'g')}"

    columns = "server | load | requests a second | requests | errors | TTFT ms, median | 99% | TPOT ms, median | 99%"
    return markdown(f"{columns} | SLO met | highest rate that meets it", "llrrrrrrrrr", map(line, rows))


LATENCIES = ("ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50", "tpot_ms_p99")
TABLES = {"decode": decode, "plan": plan, "traffic": traffic, "load": load, "own": own_bytes}
TABLES |= {"exactness": exactness, "exactness_every": every, "prefill": prefill, "ops_stock": ops_stock}


def block(name: str, folder: Path) -> str:
    return f"<!-- table: {name} -->\n{table(name, folder)}\n<!-- end -->"


def updated(page: Path) -> str:
    """The page's text with its tables as the result files have them."""
    text, folder = page.read_text(encoding="utf-8"), page.resolve().parent
    return re.sub(r"<!-- table: (\S+) -->\n.*?<!-- end -->", lambda m: block(m[1], folder), text, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, nargs="+", metavar="FILE", help="replace the tables in these files instead")
    args = parser.parse_args()
    if args.write:
        for page in args.write:
            page.write_text(updated(page), encoding="utf-8")
    else:
        names = sorted({path.name for kind in TABLES for path in RESULTS.glob(f"{kind}_*.json")})
        names += [f"{name}:plan" for name in names if name.startswith("decode")]
        print("\n\n".join(block(name, Path.cwd()) for name in names))


if __name__ == "__main__":
    main()
