"""``scute inspect``: what serving adapters would take, before any is loaded."""

from __future__ import annotations

import argparse
import functools
import json
import sys

from scute_sgl.errors import printable

UNKNOWN = "?"
MOST_RANKS = 128


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "inspect",
        help="tell whether adapters are served, what of them is live, and their bytes",
        description="Reads, folds and packs adapters as a server would; without a GPU and without base weights. "
        "Without --model it tells what an adapter's own files tell.",
    )
    parser.add_argument("adapters", nargs="+", metavar="ADAPTER", help="an adapter's folder, or one that holds several")
    parser.add_argument("--model", metavar="DIR", help="folder of the base model; its config.json is enough")
    parser.add_argument("--dtype", help="that of the server; default: what SGLang takes for the model, else float16")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel ranks; bytes are those of one")
    parser.add_argument("--json", action="store_true", help="print a JSON list and nothing else")
    parser.set_defaults(run=functools.partial(run, parser))


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Print a row for every adapter. Exit code 2 for bad usage, and if nothing of any adapter could be read."""
    if not 1 <= args.tp <= MOST_RANKS:
        parser.error(f"--tp {args.tp}: want at least 1, at most {MOST_RANKS}")
    if args.tp > 1 and not args.model:
        parser.error("--tp needs --model: only the base tells how its layers are split")
    from scute_sgl import inspection

    try:
        paths, base, dtype = inspection.folders(args.adapters), *read_model(args.model, args.dtype, args.tp)
    except ValueError as error:
        parser.error(printable(str(error)))
    rows = [inspection.row(inspection.look(path, base, dtype), base, dtype) for path in paths]
    print(json.dumps(rows, indent=1) if args.json else table(rows))
    if all(row["method"] is None for row in rows):
        print("scute inspect: nothing could be read", file=sys.stderr)
        return 2
    return 0


def read_model(model: str | None, dtype: str | None, ranks: int = 1):
    """(Base or None, serving dtype) of the command's flags. ValueError for what cannot be."""
    import torch

    from scute_sgl.inspection import DTYPES

    if dtype not in (None, "auto", *DTYPES):
        raise ValueError(f"--dtype {dtype or repr(dtype)}: want auto or one of {', '.join(DTYPES)}")
    served = DTYPES.get(dtype)
    if model is None:
        return None, served or torch.float16
    from scute_sgl.config import read_base  # Transformers takes seconds to import

    base = read_base(model, served, ranks)
    return base, base.dtype


def table(rows: list[dict]) -> str:
    """The rows as text: served ones in columns, the reasons of refused ones below."""
    served = [row for row in rows if row["servable"] is not False]
    refused = [row for row in rows if row["servable"] is False]
    lines = []
    if served:
        head = ["adapter", "method", "live", "folded", "modules", "rank", "bytes", "shared", "as LoRA r64", "needs W"]
        lines = columns([head, *map(_cells, served)], left=4)
        if any(row["servable"] is None for row in served):
            lines.append(f"\n{UNKNOWN}: only the base can tell, and whether it fits these adapters; give --model DIR")
    for row in served:
        if row["invocation_tokens"]:
            tokens = " ".join(map(str, row["invocation_tokens"]))
            lines.append(printable(f"\n{row['name']} begins where a prompt has the tokens {tokens} for the last time"))
    if refused:
        lines.append(f"{'' if not lines else chr(10)}refused: {len(refused)} of {len(rows)}")
        lines += [printable(f"  {row['name']}  {row['method'] or '-'}  {row['reason']}") for row in refused]
    return "\n".join(lines)


def columns(cells: list[list[str]], left: int) -> list[str]:
    """Aligned lines; the first ``left`` columns are text, the others numbers."""
    cells = [list(map(printable, line)) for line in cells]  # names of folders may hold anything
    widths = [max(map(len, column)) for column in zip(*cells)]
    forms = [f"{'<' if i < left else '>'}{width}" for i, width in enumerate(widths)]
    return ["  ".join(map(format, line, forms)).rstrip() for line in cells]


def _cells(row: dict) -> list[str]:
    def text(value) -> str:
        if value is None:
            return UNKNOWN
        if isinstance(value, bool):
            return "yes" if value else "-"
        if isinstance(value, list):
            return ", ".join(value) or "-"
        return f"{value:,}" if isinstance(value, int) else value

    names = "name method live folded modules rank_max bytes shared_bytes bytes_as_lora64 needs_base_weight".split()
    return [text(row[name]) for name in names]
