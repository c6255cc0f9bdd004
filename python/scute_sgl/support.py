"""What is served and what is refused, as Markdown generated from the code that decides it.

    python -m scute_sgl.support                    # print the blocks
    python -m scute_sgl.support --write README.md  # put them between their markers in a file

Methods come from the METHODS table, the PEFT versions from each reader's docstring, flags from options.py and
hooks_args.py. Only what no code states is written down here: one Support for each label that a reader gives.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

from scute_sgl import hooks_args
from scute_sgl.methods import METHODS, NOT_SERVED
from scute_sgl.options import Options


@dataclass(frozen=True)
class Support:
    """``live`` are the slots that cost something in every step, for some adapter of the method."""

    label: str  # Adapter.method
    peft_type: str  # several names of one method are separated by spaces
    served: str
    live: str
    folded: str
    reads_weight: bool = False  # whether folding needs the base weight


SUPPORT = (
    Support(
        "LORA", "LORA",
        "rsLoRA, BD-LoRA, VeLoRA, MonteCLoRA, rank and alpha patterns, `lora_bias`, `bias`, any linear layer, "
        "`embed_tokens`, `lm_head`",
        "b A B", "alpha / r → B; trained biases → b",
    ),
    Support(
        "DORA", "LORA",
        "all of LoRA but `lora_bias`; `embed_tokens` and `lm_head` too",
        "s b A B", "m / ‖W + BA‖ → s and B; base bias → b", reads_weight=True,
    ),
    Support(
        "PISSA", "LORA",
        "all of LoRA but embeddings, unconverted; tensor parallelism only where a layer is whole",
        "b A B", "minus the r largest singular triplets of W → a second term", reads_weight=True,
    ),
    Support(
        "OLORA", "LORA",
        "as PISSA",
        "b A B", "minus α / r times the first r factors of W = QR → a second term", reads_weight=True,
    ),
    Support(
        "KASA", "LORA",
        "as PISSA, without `use_dora` and `lora_bias`",
        "b A B", "`lora_diag` → B; minus the r smallest singular triplets of W → a second term", reads_weight=True,
    ),
    Support(
        "IA3", "IA3",
        "any linear layer and `lm_head`, as feed-forward module or not",
        "R s", "a gated `down_proj`'s vector → s of `up_proj`",
    ),
    Support(
        "VERA", "VERA",
        "saved or redrawn projections, any seed and rank, `bias`, any linear layer and `lm_head`",
        "b A B d e", "A and B kept once for all adapters with equal ones",
    ),
    Support(
        "PVERA", "PVERA",
        "as VERA; without `sample_at_inference`",
        "b A B d e", "as VERA; the means' half of A and d",
    ),
    Support(
        "FOURIERFT", "FOURIERFT",
        "any n and seed, patterns, `bias`, any linear layer and `lm_head`",
        "b A B d e", "waves of rank 2 n for each shape of layer, kept once → A, B; scaling → d",
    ),
    Support(
        "WAVEFT", "WAVEFT",
        "`db1`, or `use_idwt=False`; any n and seed, patterns, `bias`, any linear layer and `lm_head`",
        "b A B d e", "patches of rank n for each shape of layer, kept once → A, B; scaling → d",
    ),
    Support(
        "OFT", "OFT",
        "both Cayley forms, `block_share`, `coft`, `bias`, files since PEFT 0.16, any linear layer and `lm_head`",
        "R b", "Cayley transform → R",
    ),
    Support(
        "HRA", "HRA",
        "with and without `apply_GS`, `bias`, any linear layer and `lm_head`",
        "b A B", "reflections → A and B = −WUT", reads_weight=True,
    ),
    Support(
        "DEFT", "DEFT",
        "relu and qr, `alpha`, `para`, `bias`, any linear layer and `lm_head`",
        "b A B", "κR − PᵀW → A", reads_weight=True,
    ),
    Support(
        "PEANUT", "PEANUT",
        "any depth, common activations, any linear layer and `lm_head`",
        "A B", "the network of W → A; scaling → B", reads_weight=True,
    ),
    Support(
        "GLORA", "GLORA",
        "`config_A_B` vector, constant or none, every form of C, D and E, `bias`, any linear layer and `lm_head`",
        "s b A B", "1 + A → s; b₀D + E + WC → b", reads_weight=True,
    ),
    Support(
        "ADAMSS", "ADAMSS",
        "fixed and dynamic ranks, any linear layer and `lm_head`; with scikit-learn, on the kind of device that it was "
        "created on; tensor parallelism only where a layer is whole",
        "b A B", "clusters of the rows of W → A, B; the bias column → b", reads_weight=True,
    ),
    Support(
        "OSF", "OSF",
        "any `effective_rank`; as large as W itself; tensor parallelism only where a layer is whole",
        "A B", "S → B; minus the low part of W → a second term", reads_weight=True,
    ),
    Support(
        "ADALORA", "ADALORA",
        "pruned or not, `bias`, any linear layer and `lm_head`",
        "b A B", "E → A; alpha / (init_r + 1e-5) → B",
    ),
    Support(
        "BEFT", "BEFT",
        "any linear layer and `lm_head`, with a bias or without",
        "b", "",
    ),
    Support(
        "BOFT", "BOFT",
        "any block size and number of butterfly factors, `bias`, any linear layer and `lm_head`",
        "R s b", "Cayley transform and product of the factors → R; s - 1 → s; base bias → b",
    ),
    Support(
        "DELORA", "DELORA",
        "rank patterns, `bias`, any linear layer and `lm_head`",
        "b A B", "weight norms → A; lambda / (r ‖A‖ ‖B‖) → B",
    ),
    Support(
        "GRALORA", "GRALORA",
        "any k, hybrid ranks, `bias`, any linear layer and `lm_head`",
        "b A B", "blocks and zeros → A, B of rank k r; alpha / (r + hybrid_r) → B",
    ),
    Support(
        "LOHA", "LOHA",
        "rank and alpha patterns, any linear layer and `lm_head`",
        "A B", "rank r² → A, B; alpha / r → B",
    ),
    Support(
        "LOKR", "LOKR",
        "all splits, rank and alpha patterns, any linear layer and `lm_head`",
        "A B", "up to the layer's whole rank → A, B; alpha / r → B",
    ),
    Support(
        "MISS", "MISS BONE",
        "all but `init_weights=\"bat\"`, `bias`, any linear layer and `lm_head`",
        "b A B", "sums of inputs → A",
    ),
    Support(
        "POLY", "POLY",
        "one task for each tenant: `task_id` in its `adapter_config.json`; any linear layer and `lm_head`",
        "A B", "mixture of the task's skills → A, B; 1 / r → B",
    ),
    Support(
        "TINYLORA", "TINYLORA",
        "saved or redrawn projections, any seed and tying, `bias`, any linear layer, `embed_tokens`, `lm_head`",
        "b A B", "sum of v P → B",
    ),
    Support(
        "UNILORA", "UNILORA",
        "saved or redrawn indices, any seed and rank, `bias`, any linear layer and `lm_head`",
        "b A B", "theta[indices] * scales → A, B",
    ),
    Support(
        "VBLORA", "VBLORA",
        "whole or top-k files, `bias`, any linear layer and `lm_head`",
        "b A B", "vectors of the bank → A, B",
    ),
)  # fmt: skip


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
