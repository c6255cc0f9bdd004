"""What is served and what is refused, as Markdown generated from the code that decides it.

    python -m scute_sgl.support                    # print the blocks
    python -m scute_sgl.support --write README.md  # put them between their markers in a file

Methods come from the METHODS table, the PEFT versions from each reader's docstring, flags from options.py and
hooks_args.py. Only what no code states is written down, in supported.py: one Support for each label that a reader gives.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from scute_sgl import hooks_args
from scute_sgl.methods import METHODS, NOT_SERVED
from scute_sgl.options import Options
from scute_sgl.supported import SUPPORT


def methods() -> str:
    """The support table. ValueError if it and METHODS do not name the same methods."""
    supported = {name for row in SUPPORT for name in row.peft_type.split()}
    if supported != METHODS.keys():
        raise ValueError(f"SUPPORT is of {sorted(supported)}, METHODS of {[*METHODS]}")
    lines = [
        "| method | `peft_type` | what of it is served | live slots | folded when it loads | PEFT checked | verdict |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in SUPPORT:
        verdict = "exact, reads W once" if row.reads_weight else "exact"
        names = row.peft_type.split()
        types = " ".join(f"`{name}`" for name in names)
        cells = (row.label, types, row.served, row.live, row.folded, checked(names[0]), verdict)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "| any other | | | | | | refused by name, with the reason |"])


def checked(peft_type: str) -> str:
    """PEFT versions that a reader's docstring says it was checked against."""
    _, found, text = METHODS[peft_type].__doc__.partition("Checked against")
    if not found:
        raise ValueError(f"{METHODS[peft_type].__name__} does not say what it was checked against")
    return ", ".join(re.findall(r"\d+\.\d+\.\d+", text))


def options() -> str:
    lines = ["| flag | `Engine` keyword | meaning |", "| --- | --- | --- |"]
    for option in fields(Options):
        flag = f"--scute-{option.name.replace('_', '-')}" + {"bool": "", "int": " N", "str": " DIR"}[option.type]
        default = "" if option.type == "bool" or not option.default else f" (default {option.default})"
        help = option.metadata["help"].replace("%%", "%")
        lines.append(f"| `{flag}` | `scute_{option.name}` | {help}{default} |")
    return "\n".join(lines)


def refused_flags() -> str:
    """Server settings that stop the start, those with one reason in one row."""
    by_reason: dict[str, list[str]] = {}
    for name, (served, why) in hooks_args.REFUSED.items():
        but = f" (but {', '.join(map(str, served))})" if served else ""
        by_reason.setdefault(why, []).append(f"`--{name.replace('_', '-')}`{but}")
    for name, why in hooks_args.REFUSED_ENVIRONMENT.items():
        by_reason.setdefault(why, []).append(f"`{name}`")
    rows = sorted((", ".join(names), why) for why, names in by_reason.items())
    return "\n".join(["| setting | why |", "| --- | --- |", *(f"| {names} | {why} |" for names, why in rows)])


def refused_methods() -> str:
    """PEFT's types that are refused, those with one reason in one row."""
    by_reason: dict[str, list[str]] = {}
    for name, why in sorted(NOT_SERVED.items()):
        by_reason.setdefault(why, []).append(f"`{name}`")
    rows = (f"| {', '.join(names)} | {why} |" for why, names in by_reason.items())
    return "\n".join(["| `peft_type` | why |", "| --- | --- |", *rows])


def refused_fields() -> str:
    """Config fields that a reader knows and no method serves, with its advice."""
    served = {name for module in METHODS.values() for name in module.FIELDS}
    refused = ((name, advice) for module in METHODS.values() for name, advice in getattr(module, "OFF", {}).items())
    found = {name: advice for name, advice in refused if name not in served}
    return "\n".join(["| config field | |", "| --- | --- |", *(f"| `{name}` | {text} |" for name, text in found.items())])


BLOCKS: dict[str, Callable[[], str]] = {
    "methods": methods,
    "options": options,
    "refused flags": refused_flags,
    "refused methods": refused_methods,
    "refused fields": refused_fields,
}


def block(name: str) -> str:
    return f"<!-- generated: {name} -->\n{BLOCKS[name]()}\n<!-- end -->"


def updated(text: str) -> str:
    """``text`` with every generated block as it is now. ValueError for one of an unknown name."""

    def anew(match: re.Match) -> str:
        if match[1] not in BLOCKS:
            raise ValueError(f"no block is named {match[1]!r}; blocks: {', '.join(BLOCKS)}")
        return block(match[1])

    return re.sub(r"<!-- generated: ([\w ]+) -->\n.*?<!-- end -->", anew, text, flags=re.DOTALL)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scute_sgl.support", description="Print what is served, as Markdown.")
    parser.add_argument("--write", type=Path, metavar="FILE", help="replace the generated blocks in this file instead")
    args = parser.parse_args(argv)
    if args.write:
        args.write.write_text(updated(args.write.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print("\n\n".join(map(block, BLOCKS)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
