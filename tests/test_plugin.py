"""The plugin's start: the early boot, flags, refusals, and hooks that prove themselves."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from scute_sgl import boot, hooks, hooks_args, options
from scute_sgl.hooks import Hook
from scute_sgl.hooks_args import Given


def python(code: str, *argv: str, **env: str) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SCUTE_", "SGLANG_"))} | env
    return subprocess.run(
        [sys.executable, "-c", code, *argv], capture_output=True, text=True, timeout=200, env=environment
    )


# Boot


def test_boot_imports_neither_sglang_nor_the_extension():
    done = python(
        "import sys, scute_sgl.boot as b; assert b.activate() is None;"
        "print([m for m in sys.modules if m.split('.')[0] == 'sglang' or m == 'scute_sgl._C'])"
    )
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize(
    ("argv", "env", "gpu", "cpu"),
    [
        (["--device", "cpu"], "", True, True),
        (["--device=cpu"], "", True, True),
        (["--device", "cuda"], "", False, False),
        ([], "1", True, True),
        ([], "", True, False),
        ([], "", False, True),
    ],
)
def test_the_cpu_is_chosen(monkeypatch, argv, env, gpu, cpu):
    monkeypatch.setattr(sys, "argv", ["launch_server", *argv])
    monkeypatch.setenv(boot.CPU_ENGINE, env)
    monkeypatch.setattr(boot, "has_gpu", lambda: gpu)
    assert boot.wants_cpu() is cpu


def test_the_stand_in_is_only_what_sglang_needs():
    done = python(
        "import sys; from scute_sgl import boot; sys.path.insert(0, str(boot.STAND_IN)); import sgl_kernel\n"
        "from sgl_kernel.scalar_type import scalar_types; assert scalar_types.uint4.size_bits == 4\n"
        "assert not hasattr(sgl_kernel, 'rmsnorm')\n"
        "try: sgl_kernel.verify_tree_greedy_cpu()\n"
        "except NotImplementedError as e: print(e)\n"
    )
    assert "verify_tree_greedy_cpu needs the real sgl_kernel" in done.stdout, done.stderr


# Flags and options


def test_flags_reach_other_processes_through_the_environment(monkeypatch):
    monkeypatch.delenv("SCUTE_ARENA_MB", raising=False)
    monkeypatch.delenv("SCUTE_POISON", raising=False)
    assert options.Options.read() == options.Options()
    parser = argparse.ArgumentParser()
    options.add_flags(parser)
    parser.parse_args(["--scute-arena-mb", "12", "--scute-poison"])
    read = options.Options.read()
    assert (read.arena_mb, read.poison, read.allow_hub) == (12, True, False)
    assert read.arena_bytes(SimpleNamespace(type="cpu")) == 12 << 20
    with pytest.raises(SystemExit):
        parser.parse_args(["--scute-arena-mb", "-1"])
    with pytest.raises(TypeError, match="scute_slots is not an option"):
        options.write(slots=3)
    monkeypatch.delenv("SCUTE_ARENA_MB")
    monkeypatch.delenv("SCUTE_POISON")


def arguments(**changes) -> SimpleNamespace:
    plain = {
        "lora_backend": "scute", "enable_lora": True, "lora_paths": None, "device": "cpu", "max_total_tokens": None, "grammar_backend": "xgrammar",
        "max_lora_rank": None, "lora_target_modules": None, "max_loras_per_batch": 8, "max_loaded_loras": None,
    }  # fmt: skip
    return SimpleNamespace(**plain | changes)


def test_defaults_that_scute_changes():
    changed = hooks_args.defaults(arguments())
    assert changed["max_loras_per_batch"] == 1024 and changed["max_total_tokens"] == 65_536
    assert hooks_args.defaults(arguments(max_loras_per_batch=Given(8)))["max_loras_per_batch"] == 8
    assert hooks_args.defaults(arguments(max_loras_per_batch=3))["max_loras_per_batch"] == 3
    assert hooks_args.defaults(arguments(max_loaded_loras=16))["max_loras_per_batch"] == 16
    assert "max_total_tokens" not in hooks_args.defaults(arguments(max_total_tokens=100))
    assert changed["grammar_backend"] == "none"  # on the CPU xgrammar would end the server
    assert "grammar_backend" not in hooks_args.defaults(arguments(grammar_backend="outlines"))
    assert type(hooks_args.defaults(arguments(max_loras_per_batch=Given(8)))["max_loras_per_batch"]) is int


def test_more_slots_than_the_plan_holds_are_refused():
    hooks_args.refuse(arguments(max_loras_per_batch=options.MOST_SLOTS))
    with pytest.raises(ValueError, match="does not support --max-loras-per-batch 4097: want at most 4096"):
        hooks_args.refuse(arguments(max_loras_per_batch=options.MOST_SLOTS + 1))


@pytest.mark.parametrize("name", sorted(hooks_args.REFUSED))
def test_what_cannot_be_exact_is_refused_by_its_flag(name):
    served, _ = hooks_args.REFUSED[name]
    for value in (None, False, "", 0, *served):
        hooks_args.refuse(arguments(**{name: value}))
    with pytest.raises(ValueError, match=f"--lora-backend scute does not support --{name.replace('_', '-')}"):
        hooks_args.refuse(arguments(**{name: "something"}))


def test_refused_settings_exist():
    from sglang.srt.server_args import ServerArgs

    fields = getattr(ServerArgs, "__struct_fields__", None) or ServerArgs.__dataclass_fields__.keys()
    of_other_releases = {"attn_dp_size", "torchao_config", "uno_lora_path"}
    assert hooks_args.REFUSED.keys() - of_other_releases <= set(fields)


def test_refused_environment(monkeypatch):
    monkeypatch.setenv("SGLANG_EXPERIMENTAL_CPP_RADIX_TREE", "true")
    with pytest.raises(ValueError, match="SGLANG_EXPERIMENTAL_CPP_RADIX_TREE"):
        hooks_args.refuse(arguments())


def test_a_clients_cache_key_cannot_imitate_an_adapters():
    from scute_sgl.hooks_requests import _tagged

    # SGLang's prefix cache appends the adapter's id, 32 hexadecimal digits.
    keys = [None, "", "a", "ab", "k1:a", "0" * 32, "k0:" + "0" * 32, "a" + "0" * 32]
    final = [(_tagged(key) or "") + lora_id for key in keys for lora_id in ("", "0" * 32)]
    assert len(set(final)) == len(final)


# Hooks


@pytest.fixture
def no_hooks(monkeypatch):
    monkeypatch.setattr(hooks, "_registered", [])
    monkeypatch.setattr(hooks, "_problems", [])


def test_without_hooks_nothing_starts(no_hooks):
    with pytest.raises(RuntimeError, match="has not registered its hooks"):
        hooks.verify()


@pytest.mark.parametrize(
    ("target", "parameters", "complaint"),
    [
        ("sglang.srt.managers.scheduler.Scheduler.no_such_method", (), "no_such_method does not exist"),
        ("sglang.srt.no_such_module.f | sglang.srt.nor_this.f", (), "sglang.srt.no_such_module.f"),
        ("sglang.srt.utils.common.get_device", ("no_such_name",), "get_device has no parameter no_such_name"),
    ],
)
def test_a_hook_whose_target_has_changed_is_named(no_hooks, target, parameters, complaint):
    hooks.register([Hook(target, lambda original: None, parameters)])
    with pytest.raises(RuntimeError, match=complaint):
        hooks.verify()


def test_a_hook_that_sglang_did_not_apply_is_named(no_hooks):
    hooks.register([Hook("sglang.srt.utils.common.get_device", lambda original, *args: original(*args))])
    with pytest.raises(RuntimeError, match="sglang.srt.utils.common.get_device was not hooked"):
        hooks.verify()


def test_the_backend_is_built_by_our_manager_only():
    from scute_sgl.backend import ScuteBackend

    with pytest.raises(RuntimeError, match="built without scute's manager"):
        ScuteBackend(8, "cpu")


LAUNCH = (
    "import runpy, sys; from sglang.srt.managers.tokenizer_manager import TokenizerManager; {break_it}\n"
    "if __name__ == '__main__': runpy.run_module('sglang.launch_server', run_name='__main__')"
)


def test_start_up_stops_naming_a_missing_hook(kit):
    code = LAUNCH.format(break_it="del TokenizerManager.create_abort_task")
    done = python(code, "--model-path", kit.base(), "--enable-lora", "--lora-backend", "scute")
    assert done.returncode != 0
    assert "scute refuses to start" in done.stderr and "TokenizerManager.create_abort_task does not exist" in done.stderr


def test_start_up_stops_naming_a_refused_flag(kit):
    code = LAUNCH.format(break_it="")
    flags = ["--model-path", kit.base(), "--enable-lora", "--lora-backend", "scute", "--enable-two-batch-overlap"]
    done = python(code, *flags)
    assert done.returncode != 0 and "does not support --enable-two-batch-overlap" in done.stderr, done.stderr[-2000:]


def test_a_whitelist_without_us_has_no_such_backend(kit):
    code = LAUNCH.format(break_it="")
    flags = ["--model-path", kit.base(), "--device", "cpu", "--enable-lora", "--lora-backend", "scute"]
    done = python(code, *flags, SGLANG_PLUGINS="other")
    assert done.returncode != 0 and "invalid choice: 'scute'" in done.stderr, done.stderr[-2000:]
