"""Result files as the Markdown tables of the README.

    python benchmarks/tables.py                    # print them
    python benchmarks/tables.py --write README.md  # put them between their markers in a file
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def table(name: str) -> str:
    """The table of a file in results/, with its date, device, versions and command."""
    result = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
    caption = f"{result['date']}, {result['device']}; {versions}; commit {result['commit']}; `{result['command']}`"
    kinds = {"decode": decode, "traffic": traffic, "own": own_bytes, "exactness": exactness, "exactness_every": every}
    kind = max((kind for kind in kinds if name.startswith(f"{kind}_")), key=len)
    rows = kinds[kind](result["rows"])
    return f"{rows}\n\n{caption}, [raw results](benchmarks/results/{name})."


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


def block(name: str) -> str:
    return f"<!-- table: {name} -->\n{table(name)}\n<!-- end -->"


def updated(text: str) -> str:
    return re.sub(r"<!-- table: (\S+) -->\n.*?<!-- end -->", lambda match: block(match[1]), text, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="FILE", help="replace the tables in this file instead")
    args = parser.parse_args()
    if args.write:
        args.write.write_text(updated(args.write.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        names = sorted(path.name for kind in ("exactness", "decode", "traffic", "own") for path in RESULTS.glob(f"{kind}_*.json"))
        print("\n\n".join(map(block, names)))


if __name__ == "__main__":
    main()
