"""The README and docs/ against the code: generated blocks, and every command, path, flag and variable that they name."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

import pytest

from scute_sgl import cli, options, support
from scute_sgl.methods import METHODS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "benchmarks/README.md", *sorted((ROOT / "docs").glob("*.md"))]
FOREIGN_FLAGS = {"--no-build-isolation", "--no-deps"}  # pip's
GENERATED = re.compile(r"<!-- (?:generated|table): .*?<!-- end -->", re.DOTALL)
page = pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))


def text_of(path: Path) -> str:
    """The page without its generated blocks, which tests of their own cover."""
    return GENERATED.sub("", path.read_text(encoding="utf-8"))


def code_of(path: Path) -> list[str]:
    """Code blocks and code in lines."""
    text = text_of(path)
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return fenced + re.findall(r"^ {4}(.*)$", text, re.MULTILINE) + re.findall(r"`([^`\n]+)`", text)


def sources(*patterns: str) -> str:
    return "\n".join(path.read_text(encoding="utf-8") for pattern in patterns for path in sorted(ROOT.glob(pattern)))


# Generated blocks


def test_generated_blocks_are_what_the_code_says():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"<!-- generated: ([\w ]+) -->", text)) == support.BLOCKS.keys()
    assert text == support.updated(text), "run: python -m scute_sgl.support --write README.md"


@page
def test_measured_tables_are_their_result_files(path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import tables

    text = path.read_text(encoding="utf-8")
    assert text == tables.updated(path), f"run: python benchmarks/tables.py --write {path.relative_to(ROOT)}"
    for name in re.findall(r"<!-- table: ([^\s:]+)", text):
        result = json.loads((ROOT / "benchmarks/results" / name).read_text(encoding="utf-8"))
        if name.startswith("exactness"):
            assert all(row["ok"] for row in result["rows"] if row["backend"] == "scute")


def test_a_method_without_support_is_noticed(monkeypatch):
    monkeypatch.setitem(METHODS, "NEW", METHODS["LORA"])
    with pytest.raises(ValueError, match="NEW"):
        support.methods()


def test_live_slots_are_those_of_the_adapters(tmp_path):
    """All adapters of the tests, folded on a base with biases: together they have exactly the slots of the table."""
    from make_adapters import ADAPTERS, make_base, write_adapter

    base = make_base("qwen2", tmp_path)
    targets, shape = targets_of(base)
    found: dict[str, set[str]] = {}
    for name in ADAPTERS:
        method, live = method_and_live(write_adapter(base, tmp_path / "adapters" / name, name), targets, shape)
        found.setdefault(method, set()).update(live)
    assert found == {row.label: set(row.live.split()) for row in support.SUPPORT}


def targets_of(base: str):
    """Every linear layer, embedding and head of a saved model, unsharded."""
    import torch
    from transformers import AutoModelForCausalLM

    from scute_sgl.config import norm_before, norms_of
    from scute_sgl.slots import BaseShape, Target

    targets = {}
    model = AutoModelForCausalLM.from_pretrained(base)
    for path, layer in model.named_modules():
        if not isinstance(layer, (torch.nn.Linear, torch.nn.Embedding)):
            continue
        weight, bias = layer.weight.detach(), getattr(layer, "bias", None)
        embedding, norm = isinstance(layer, torch.nn.Embedding), norm_before(path, model.config.model_type)
        inputs, outputs = weight.shape if embedding else weight.shape[::-1]
        targets[path] = Target(
            path=path,
            module=len(targets),
            kind="embedding" if embedding else "head" if path == "lm_head" else "column",
            in_features=inputs,
            out_features=outputs,
            inputs=(0, inputs),
            outputs=(0, outputs),
            weight=lambda weight=weight: weight,
            bias=lambda bias=bias: None if bias is None else bias.detach(),
            gated_by=path.replace("down_proj", "up_proj") if path.endswith("down_proj") else "",
            norm=norm,
            norm_weight=lambda norm=norm: model.get_submodule(norm).weight,
        )
    sizes = {path: (t.in_features, t.out_features) for path, t in targets.items()}
    norms, vocab_size = norms_of(targets.values()), sizes["model.embed_tokens"][0]
    return targets, BaseShape(sizes, dtype=torch.float32, vocab_size=vocab_size, norms=norms, tied=True)


def method_and_live(folder: str, targets, shape) -> tuple[str, list[str]]:
    from scute_sgl.checkpoint import read_adapter
    from scute_sgl.fold import fold_adapter, live_slots

    adapter = read_adapter(folder, shape)
    return adapter.method, live_slots([folded for _, folded in fold_adapter(adapter, targets).values()])


# What the pages name


@page
def test_make_targets_exist(path):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {name for code in code_of(path) for name in re.findall(r"\bmake ([a-z][\w-]*)", code)}
    assert named <= targets


@page
def test_files_and_links_exist(path):
    folders = (ROOT, path.parent, ROOT / "python/scute_sgl", ROOT / "benchmarks")
    named = set(re.findall(r"\]\(([^)#:]+)\)", text_of(path)))
    for code in code_of(path):
        code = re.sub(r"--out \S+", "", code)  # written, not read
        named |= set(re.findall(r"(?<![\w/.-])((?:[\w.*-]+/)*[\w.*-]+\.(?:py|md|cpp|cu|cuh|h|toml|json))\b", code))
        named |= {word for word in re.findall(r"(?<![\w/.-])(?:[\w-]+/)+(?![\w-])", code)}
    theirs = re.compile(r"NAME|config\.json|added_tokens\.json|peft/|/adapters/|adapters/")  # placeholders; files of others
    missing = {name for name in named if not theirs.search(name) and not any(any(f.glob(name)) for f in folders)}
    assert not missing


@page
def test_flags_exist(path):
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    ours = argparse.ArgumentParser()
    options.add_flags(ours)
    known = FOREIGN_FLAGS | parser._option_string_actions.keys() | ours._option_string_actions.keys()
    known |= {"--help", *re.findall(r'"(--[\w-]+)"', sources("benchmarks/*.py", "python/scute_sgl/*.py"))}
    named = {flag for code in code_of(path) for flag in re.findall(r"(?<![\w-])--[a-z][\w-]+(?![\w*-])", code)}
    assert {flag.rstrip("-") for flag in named} - {"--scute"} <= known


@page
def test_environment_variables_exist(path):
    read = set(re.findall(r"\bSCUTE_[A-Z_]+", sources("csrc/*.*", "tests/test_gpu*.py", "setup.py", "benchmarks/*.py")))
    read |= {options._variable(name) for name in options.Options.__dataclass_fields__}
    named = {name for code in code_of(path) for name in re.findall(r"\bSCUTE_[A-Z_]*[A-Z]\b", code)}
    assert named <= read


@page
def test_commands_are_in_the_help(path):
    named = {name for code in code_of(path) for name in re.findall(r"(?<![\w./-])scute (\w+)", code)}
    listed = set(re.findall(r"^ {4}(\w+)", cli.build_parser().format_help(), re.MULTILINE))
    assert named <= listed


def test_cli_says_its_version(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0 and re.fullmatch(r"scute \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_serve_passes_every_flag_on(monkeypatch):
    commands = []
    monkeypatch.setattr(cli.os, "execv", lambda program, command: commands.append(command) or sys.exit())
    monkeypatch.setattr(cli, "has_gpu", lambda: False)
    with pytest.raises(SystemExit):
        cli.main(["serve", "MODEL", "--port", "1", "--lora-paths", "a=b", "c=d"])
    assert commands[0][1:] == [
        "-m", "sglang.launch_server", "--model-path", "MODEL", "--enable-lora", "--lora-backend", "scute",
        "--device", "cpu", "--sleep-on-idle", "--port", "1", "--lora-paths", "a=b", "c=d",
    ]  # fmt: skip
