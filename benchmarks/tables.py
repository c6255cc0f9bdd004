"""Result files as the Markdown tables of the README.

    python benchmarks/tables.py                    # print them
    python benchmarks/tables.py --write README.md  # put them between their markers in a file
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def table(name: str) -> str:
    """The table of a file in results/, with its date, device, versions and command."""
    result = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
    caption = f"{result['date']}, {result['device']}; {versions}; commit {result['commit']}; `{result['command']}`"
    rows = {"decode": decode, "traffic": traffic, "own": own_bytes}.get(name.split("_")[0], exactness)(result["rows"])
    return f"{rows}\n\n{caption}, [raw results](benchmarks/results/{name})."


def exactness(rows: list[dict]) -> str:
    lines = [
        "| adapter | served by | GPUs | dtype | effect | mean error | PEFT's own | base rows | 99.9% | error / effect |",
        "| --- | --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        share = "" if row["error_over_effect"] is None else f"{row['error_over_effect']:.2%}"
        errors = " | ".join(f"{row[key]:.2e}" for key in ("mean_error", "peft_error", "base_error", "p999_error"))
        served_by = "scute" if row["backend"] == "scute" else f"SGLang's {row['backend']}"
        lines.append(f"| {row['adapter']} | {served_by} | {row['tp']} | {row['dtype']} | {row['effect']:.3f} | {errors} | {share} |")
    return "\n".join(lines)


def decode(rows: list[dict]) -> str:
    lines = [
        "| workload | served by | rows | tenants | ms a token | reference ms | ratio | spread | target | SGLang's best |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        known = [f"{row[key]:g}" if row.get(key) else "" for key in ("target", "best_stock")]
        times = f"{row['tpot_ms']:.2f} | {row['base_ms']:.2f} | {row['ratio']:.3f} | {row['spread']:.3f}"
        served_by = "scute" if row["backend"] == "scute" else f"SGLang's {row['backend']}"
        lines.append(f"| {row['workload']} | {served_by} | {row.get('bs', '')} | {row.get('tenants', '')} | {times} | {' | '.join(known)} |")
    return "\n".join(lines)


def traffic(rows: list[dict]) -> str:
    lines = [
        "| requests over tenants | tenants | answered | requests a second | output tokens a second | TTFT ms, median | TPOT ms, median |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        rates = " | ".join(f"{row[key]:.1f}" for key in ("request_throughput", "output_throughput", "median_ttft_ms"))
        lines.append(f"| {row['distribution']} | {row['tenants']} | {row['completed']} | {rates} | {row['median_tpot_ms']:.2f} |")
    return "\n".join(lines)


def own_bytes(rows: list[dict]) -> str:
    lines = [
        "| method | bytes | of a rank-64 LoRA's | shared, once for all adapters | own tensors of the file | larger, because |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in rows:
        shared = f"{row['shared']:,}" if row["shared"] else ""
        sizes = f"{row['bytes']:,} | {row['of_lora64']:.3f} | {shared} | {row['file']:,}"
        lines.append(f"| {row['method']} | {sizes} | {row['fat'] or ''} |")
    return "\n".join(lines)


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
