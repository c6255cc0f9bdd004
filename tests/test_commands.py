"""The commands and hostile input: a line on standard error, exit code 2, no traceback and nothing that lasts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from make_adapters import make_base, write_adapter

from scute_sgl import cli, console

CONTROL = "es\x1b[31m\nred"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("commands")
    write_adapter(make_base("llama", folder), folder / "lora", "lora")
    return folder


def fails(capsys, *words: object) -> str:
    """Runs a command that must end with 2 and print nothing; its last line on standard error."""
    try:
        code = cli.main([*map(str, words)])
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    assert code == 2 and not out and "Traceback" not in err and "\x1b" not in err
    return err.splitlines()[-1]


def base_with(root: Path, folder: Path, **fields) -> Path:
    known = json.loads(Path(make_base("llama", root), "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(known | fields))
    return folder


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hidden_layers": 10**12}, "num_hidden_layers: found 1000000000000, want at most 4096"),
        ({"hidden_size": 0}, "of no features; want sizes above 0"),
        ({"vocab_size": 0}, "of no features; want sizes above 0"),
        ({"intermediate_size": "x"}, "expected int, got str"),
        ({"pad": "x" * (5 << 20)}, "config.json: over 4194304 bytes"),
    ],
)
def test_an_absurd_base_is_one_line(root, tmp_path, capsys, fields, message):
    line = fails(capsys, "inspect", root / "lora", "--model", base_with(root, tmp_path, **fields), "--json")
    assert message in line and line.startswith("scute inspect: error: ")


@pytest.mark.parametrize("text", ["", "null", "[]", "[" * 100_000, "no JSON"])
def test_a_config_that_is_no_object_is_named(root, tmp_path, capsys, text):
    (tmp_path / "config.json").write_text(text)
    for words in (["inspect"], ["plan", "--adapters"], ["verify", "--adapters"]):
        assert f"{tmp_path}/config.json: " in fails(capsys, *words, root / "lora", "--model", tmp_path)


def test_names_and_reasons_print_no_control_characters(root, tmp_path, capsys):
    shutil.copytree(root / "lora", tmp_path / CONTROL)
    shutil.copytree(root / "lora", os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe"))
    shutil.copytree(root / "lora", tmp_path / "refused")
    fields = json.loads((root / "lora" / "adapter_config.json").read_text())
    (tmp_path / "refused" / "adapter_config.json").write_text(json.dumps(fields | {"\x1b[2Jkey": 1}))
    base = make_base("llama", root)
    for words in (["inspect", tmp_path, "--model", base], ["plan", "--adapters", tmp_path, "--model", base]):
        assert cli.main([*map(str, words)]) == 0
        text = "".join(capsys.readouterr())
        assert all(c.isprintable() or c == "\n" for c in text)
        assert "es\\x1b[31m\\nred" in text and "\\udcff" in text and "\\x1b[2Jkey: found 1" in text


@pytest.mark.parametrize("words", [["inspect"], ["plan", "--model", "BASE", "--adapters"]])
def test_adapter_paths_are_checked(root, capsys, words):
    words = [make_base("llama", root) if word == "BASE" else word for word in words]
    assert "no folder ''" in fails(capsys, *words, "")
    assert "is given twice" in fails(capsys, *words, root / "lora", f"{root}/./lora")
    assert "File name too long" in fails(capsys, *words, "x" * 5000)


def test_a_weights_file_that_links_to_nowhere_is_named_so(root, tmp_path, capsys):
    shutil.copytree(root / "lora", tmp_path / "a")
    weights = tmp_path / "a" / "adapter_model.safetensors"
    weights.unlink()
    weights.symlink_to(weights)
    cli.main(["inspect", str(tmp_path / "a")])
    assert f"[not_found] cannot read {weights}" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--bandwidth", "--launch", "--memory"])
@pytest.mark.parametrize("value", ["1e-320", "1e300", "inf", "-1", "x"])
def test_a_gpu_has_finite_numbers(root, capsys, flag, value):
    words = ["plan", "--model", make_base("llama", root), "--adapters", root / "lora"]
    assert f"{flag}: found '{value}', want a number above 0" in fails(capsys, *words, f"{flag}={value}")


def test_so_many_ranks_are_refused_at_once(root, tmp_path, capsys):
    heads = {"num_attention_heads": 10**6, "num_key_value_heads": 10**6, "hidden_size": 8 * 10**6}
    base = base_with(root, tmp_path, **heads)
    assert "--tp 1000000: want" in fails(capsys, "inspect", root / "lora", "--model", base, "--tp", 10**6)


def test_a_model_that_is_an_adapter_is_said_to_be(root, capsys):
    assert "it is an adapter's" in fails(capsys, "plan", "--model", root / "lora", "--adapters", root / "lora")


def test_a_reader_that_has_seen_enough_is_no_error(root):
    command = [sys.executable, "-m", "scute_sgl.cli", "inspect", str(root / "lora"), "--json"]
    read, write = os.pipe()
    os.close(read)
    with open(write, "wb") as nobody:
        done = subprocess.run(command, stdout=nobody, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0 and "BrokenPipe" not in done.stderr


@pytest.mark.parametrize("value", ["-" * 100_000 + "1", "1+" * 30_000 + "1", "{[]:1}", "None", "x"])
def test_an_assignment_has_any_value(value):
    assert console.assignment(f"a={value}") == ("a", None if value == "None" else value)


@pytest.mark.parametrize("name", [r"$\frac$", "sur\udcff", CONTROL])
def test_a_picture_has_any_name(name, tmp_path):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figure, axes = pyplot.subplots()
    axes.plot([0, 1], [0, 1], label=console.label(name))
    axes.legend()
    figure.savefig(tmp_path / "a.png")


def test_output_that_cannot_hold_a_name_or_is_closed(root):
    named = shutil.copytree(root / "lora", root / "na\u00efve")
    command = [sys.executable, "-m", "scute_sgl.cli", "inspect", str(named)]
    done = subprocess.run(command, env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, text=True)
    assert done.returncode == 0 and "na\\xefve" in done.stdout and not done.stderr
    done = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *command], stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0 and not done.stderr


def test_an_absurd_file_beside_no_model_is_not_read(tmp_path, capsys):
    with open(tmp_path / "adapter_config.json", "wb") as file:
        file.truncate(20 << 30)
    assert "is an adapter of an unknown base model" in fails(capsys, "serve", tmp_path)


def test_a_base_without_attention_heads_is_said(root, tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "rwkv"}')
    assert "no num_attention_heads" in fails(capsys, "inspect", root / "lora", "--model", tmp_path)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--engine", "tp_size=0"], "--engine tp_size=0: want a whole number above 0"),
        (["--engine", "scute_arena_mb=x"], "--engine scute_arena_mb='x': want a whole number above 0"),
        (["--rows", "99999999"], "tokens in one batch, want at most"),
        (["--tolerance", "nan"], "found 'nan', want a number above 0"),
        (["--adapters", ""], "--adapters '': no such folder"),
    ],
)
def test_verify_starts_no_engine_for_what_cannot_be(root, capsys, flags, message):
    assert message in fails(capsys, "verify", "--model", make_base("llama", root), "--adapters", root / "lora", *flags)


@pytest.mark.parametrize("fields", [{"vocab_size": "x"}, {"vocab_size": 0}, {"dtype": [1]}])
def test_verify_reads_no_absurd_base(root, tmp_path, capsys, fields):
    base = base_with(root, tmp_path, **fields)
    assert "want" in fails(capsys, "verify", "--model", base, "--adapters", root / "lora")


def test_verify_names_weights_that_are_none(root, tmp_path, capsys):
    (base_with(root, tmp_path) / "model.safetensors").write_bytes(b"\xff" * 100)
    line = fails(capsys, "verify", "--model", tmp_path, "--adapters", root / "lora")
    assert f"{tmp_path}/model.safetensors: not a well-formed safetensors file" in line


def test_serve_refuses_a_model_that_is_an_adapter_whatever_its_config(tmp_path, capsys):
    for text in ("[" * 100_000, '{"base_model_name_or_path": "\\u001b[31m"}'):
        (tmp_path / "adapter_config.json").write_text(text)
        assert "is an adapter of" in fails(capsys, "serve", tmp_path)
