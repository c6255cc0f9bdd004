"""Where adapters may lie: an operator's root and folder of adapters, hub names, and what ``scute serve`` says of them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from scute_sgl import cli, hub, options
from scute_sgl.errors import AdapterError


@pytest.fixture
def root(kit, tmp_path, monkeypatch):
    """A root with one good adapter and ways out of it."""
    root = tmp_path / "root"
    for folder in (root / "team/sql", tmp_path / "root-evil/sql"):
        shutil.copytree(kit.adapter("lora"), folder)
    (root / "out").symlink_to(tmp_path / "root-evil")
    (root / "round").symlink_to(root / "team")
    shutil.copytree(root / "team/sql", root / "leak")
    (root / "leak/adapter_config.json").unlink()
    (root / "leak/adapter_config.json").symlink_to("/etc/passwd")
    monkeypatch.setenv("SCUTE_ADAPTER_ROOT", str(root))
    return root


@pytest.mark.parametrize("path", ["team/sql", "team/../team/sql", "round/sql", "./team//sql/"])
def test_a_path_inside_the_root_is_that_folder(root, path):
    assert hub.requested_folder(str(root / path)) == os.path.realpath(root / "team/sql")


@pytest.mark.parametrize(
    "path",
    ["", "..", "../root-evil/sql", "out/sql", "out", "leak", "team/../../root-evil/sql", "/etc", "/none", "team/sql\0"],
)
def test_a_path_out_of_the_root_is_refused(root, path, monkeypatch):
    monkeypatch.chdir(root)
    with pytest.raises(AdapterError, match="want a folder inside the adapter root") as refused:
        hub.requested_folder(path)
    assert refused.value.code == "unsafe_file" and refused.value.http_status == 400


def test_a_root_that_is_a_link_holds_what_it_links_to(root, tmp_path, monkeypatch):
    (tmp_path / "here").symlink_to(root)
    monkeypatch.setenv("SCUTE_ADAPTER_ROOT", str(tmp_path / "here"))
    assert hub.requested_folder(str(tmp_path / "here/team/sql")) == hub.requested_folder(str(root / "team/sql"))


def test_the_adapter_dir_is_the_root_unless_another_is_given(root, kit, monkeypatch):
    lora = Path(kit.adapter("lora"))
    monkeypatch.setenv("SCUTE_ADAPTER_DIR", str(lora.parent))
    assert hub.requested_folder(str(root / "team/sql"))
    monkeypatch.delenv("SCUTE_ADAPTER_ROOT")
    assert hub.requested_folder(str(lora)) == os.path.realpath(lora)
    with pytest.raises(AdapterError):
        hub.requested_folder(str(root / "team/sql"))
    monkeypatch.delenv("SCUTE_ADAPTER_DIR")
    assert hub.requested_folder(str(root / "team/sql")) == str(root / "team/sql")


def test_a_hub_name_needs_the_operators_leave_and_no_root(root, monkeypatch):
    monkeypatch.setattr(hub, "_download", lambda name: f"cache of {name}")
    with pytest.raises(AdapterError):
        hub.requested_folder("org/repo")
    monkeypatch.setenv("SCUTE_ALLOW_HUB", "1")
    assert hub.requested_folder("org/repo") == "cache of org/repo"
    monkeypatch.chdir(root / "..")
    with pytest.raises(AdapterError):  # a folder here before a name there
        hub.requested_folder("root-evil/sql")


@pytest.mark.parametrize("folder", ["", "nowhere"])
def test_a_root_that_is_no_folder_stops_the_start(folder, capsys):
    with pytest.raises(ValueError, match="SCUTE_ADAPTER_ROOT is .*; want a folder"):
        options.write(adapter_root=folder)
    for flag in ("--adapter-root", "--adapter-dir"):
        with pytest.raises(SystemExit) as end:
            cli.main(["serve", "MODEL", flag, folder])
        assert end.value.code == 2 and f"{flag} {folder!r} is no folder" in capsys.readouterr().err


def test_an_adapter_given_as_the_model_is_told_so(kit, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["serve", kit.adapter("lora")])
    assert end.value.code == 2 and f"is an adapter of {kit.base()}" in capsys.readouterr().err


def test_serve_hands_its_folders_on(tmp_path, monkeypatch):
    commands = []

    def execv(program: str, command: list[str]):
        commands.append(command)
        raise SystemExit

    monkeypatch.setattr(cli.os, "execv", execv)
    with pytest.raises(SystemExit):
        cli.main(["serve", "--adapter-dir", str(tmp_path), "MODEL", "--adapter-root", "/", "--port", "1"])
    assert commands[0][-6:] == ["--scute-adapter-dir", str(tmp_path), "--scute-adapter-root", "/", "--port", "1"]
