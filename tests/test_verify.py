"""``scute verify``: what it prints and its exit status, with a real engine, PEFT, and answers that are wrong."""

from __future__ import annotations

import json
import os
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO

import pytest
import torch
from gpu_worker import write_base
from make_adapters import edit_config, write_adapter

from scute_sgl import cli, memory, verify
from scute_sgl.judge import Peft, excess

GOOD = ["lora", "pissa", "boft_factors", "alora"]  # PiSSA changes the weights of the base that PEFT holds
SHORT = ["--rows", "2", "--new-tokens", "8"]
WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
KEYS = ["name", "method", "effect", "mean_error", "max_error", "error_over_effect", "ok", "reason"]


def arguments(kit, *adapters: str) -> list[str]:
    folders = [kit.adapter(name) for name in adapters]
    return ["verify", "--model", kit.base(), "--adapters", *folders, *SHORT, "--json"]


@pytest.fixture(scope="module")
def recorded(kit):
    """The status and rows of a run on good adapters and one that is refused, and what its engine answered."""
    runs, in_a_process = [], verify.in_a_process
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as out:
        patch.setattr(verify, "in_a_process", lambda f, job: runs.append(in_a_process(f, job)) or runs[-1])
        status = cli.main(arguments(kit, *GOOD, "lora_saves_head"))
    return status, json.loads(out.getvalue()), runs[0]


@pytest.fixture
def served(recorded, monkeypatch):
    """served(change): further runs get what the engine answered, changed, instead of an engine's answer."""

    def install(change=lambda answers: answers):
        answered = replace(recorded[2], refused={}, answers=change(recorded[2].answers))
        monkeypatch.setattr(verify, "in_a_process", lambda *_: answered)

    return install


def rows_of(capsys) -> dict[str, dict]:
    return {row["name"]: row for row in json.loads(capsys.readouterr().out)}


def test_good_adapters_are_ok_and_a_refused_one_is_a_row(recorded):
    status, rows, answered = recorded
    assert [row["name"] for row in rows] == ["base", *GOOD, "lora_saves_head"]
    assert all(list(row) == KEYS for row in rows)
    for row in rows[:-1]:
        assert row["ok"] and row["max_error"] <= 1e-5 and row["reason"] == ""
    assert [row["method"] for row in rows] == ["base", "LORA", "PISSA", "BOFT", "ALORA", None]
    assert rows[0]["effect"] == 0 and rows[0]["error_over_effect"] is None
    assert all(row["effect"] > 0.05 and row["error_over_effect"] < 1e-4 for row in rows[1:-1])
    assert not rows[-1]["ok"] and "refused [bad_config]: modules_to_save" in rows[-1]["reason"]
    assert status == 1
    assert answered.together == len(GOOD)


def test_all_ok_is_status_0(kit, served, capsys):
    served()
    assert cli.main(arguments(kit, *GOOD)) == 0
    assert all(row["ok"] for row in rows_of(capsys).values())


def test_one_wrong_log_probability_is_status_1(kit, served, capsys):
    def change(answers):
        wrong = answers["pissa"].served.clone()
        wrong[1, 3, 7] += 1e-4
        return answers | {"pissa": replace(answers["pissa"], served=wrong)}

    served(change)
    assert cli.main(arguments(kit, *GOOD)) == 1
    rows = rows_of(capsys)
    assert [name for name, row in rows.items() if not row["ok"]] == ["pissa"]
    assert rows["pissa"]["max_error"] == pytest.approx(1e-4, rel=0.1)
    assert cli.main([*arguments(kit, *GOOD), "--tolerance", "2e-4"]) == 0


def test_an_adapter_edited_after_serving_is_status_1(kit, served, capsys):
    served()
    edit_config(kit.adapter("lora"), lora_alpha=17)
    try:
        assert cli.main(arguments(kit, *GOOD)) == 1
    finally:
        edit_config(kit.adapter("lora"), lora_alpha=16)
    assert [name for name, row in rows_of(capsys).items() if not row["ok"]] == ["lora"]


def test_what_peft_cannot_run_is_a_row_and_the_rest_goes_on(kit, served, capsys):
    served()
    edit_config(kit.adapter("lora"), r="eight")
    try:
        assert cli.main(arguments(kit, *GOOD)) == 1
    finally:
        edit_config(kit.adapter("lora"), r=8)
    rows = rows_of(capsys)
    assert [name for name, row in rows.items() if not row["ok"]] == ["lora"]
    assert rows["lora"]["reason"].startswith("PEFT cannot run it: ") and rows["lora"]["effect"] is None


def test_16_bit_is_judged_by_what_peft_loses_in_it(kit, served, capsys):
    """The recorded answers are float32's. PEFT's mean error in bfloat16 is about 0.01 on this base."""

    def add(error):
        def change(answers):
            noise = torch.Generator().manual_seed(0)
            noisy = lambda a: a.served + error * torch.randn(a.served.shape, generator=noise)  # noqa: E731
            return {name: replace(a, served=noisy(a)) for name, a in answers.items()}

        return change

    for error, status in ((0, 0), (0.008, 0), (0.2, 1)):
        served(add(error))
        assert cli.main([*arguments(kit, *GOOD), "--dtype", "bfloat16"]) == status
        reasons = [row["reason"] for row in rows_of(capsys).values()]
        assert all(reason.startswith("mean error" if status else "") for reason in reasons)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_five_methods_are_ok_on_a_gpu_and_one_edited_afterwards_is_not(tmp_path, capsys, monkeypatch):
    """In float16 and CUDA graphs, one of each size; then the same answers against a file with another alpha."""
    base, names = write_base(tmp_path / "base", hidden=1024), ["lora", "dora", "ia3", "vera_all", "oft"]
    folders = [write_adapter(base, tmp_path / name, name) for name in names]
    runs, in_a_process = [], verify.in_a_process
    monkeypatch.setattr(verify, "in_a_process", lambda f, job: runs.append(in_a_process(f, job)) or runs[-1])
    command = ["verify", "--model", base, "--adapters", *folders, "--device", "cuda", "--dtype", "float16", "--json"]
    command += ["--engine", "attention_backend=triton", "sampling_backend=pytorch", "grammar_backend=none"]
    command += ["cuda_graph_bs_decode=[24]", "cuda_graph_backend_prefill=disabled", "mem_fraction_static=0.3"]
    assert cli.main(command) == 0
    rows = rows_of(capsys)
    assert list(rows) == ["base", *names] and all(row["ok"] for row in rows.values())
    assert all(rows[name]["effect"] > 0.05 for name in names) and runs[0].together == len(names)

    monkeypatch.setattr(verify, "in_a_process", lambda *_: runs[0])
    edit_config(folders[0], lora_alpha=1)
    assert cli.main(command) == 1
    assert [name for name, row in rows_of(capsys).items() if not row["ok"]] == ["lora"]


def test_nan_is_past_every_tolerance():
    nan = float("nan")
    assert excess({"max_error": nan}, "float32", 1.0)
    assert excess({"mean_error": nan, "peft_error": 1.0}, "float16", None)


def test_the_base_is_whole_again_after_adapters_that_change_it(kit):
    ids = torch.randint(3, 128, (1, 12))
    tokens = torch.arange(128).expand(1, 6, 128)
    side = Peft(kit.base(), torch.float32, "cpu")
    before = side.logprobs(None, ids, tokens)
    adapted = side.logprobs(kit.adapter("pissa"), ids, tokens)
    assert (adapted - before).abs().max() > 0.05
    assert torch.equal(side.logprobs(None, ids, tokens), before)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"--model": "/nowhere"}, "no config.json in"),
        ({"--adapters": "/nowhere"}, "no such folder"),
        ({"--dtype": "int8"}, "invalid choice"),
        ({"--rows": "0"}, "want a whole number above 0"),
        ({"--engine": "tp_size"}, "want NAME=VALUE"),
        pytest.param({"--device": "cuda"}, "there is none", marks=WITHOUT_GPU),
        ({"--color": "red"}, "unrecognized arguments: --color red"),
    ],
)
def test_bad_usage_is_status_2_in_words(kit, capsys, monkeypatch, change, message):
    monkeypatch.setattr(verify, "in_a_process", lambda *_: pytest.fail("an engine was started"))
    given = {"--model": kit.base(), "--adapters": kit.adapter("lora")} | change
    try:
        status = cli.main(["verify", *(word for pair in given.items() for word in pair)])
    except SystemExit as end:  # argparse's way
        status = end.code
    out, err = capsys.readouterr()
    assert status == 2 and message in err and "Traceback" not in err and not out


def test_two_adapters_of_one_name_need_names(kit, capsys, monkeypatch):
    jobs = []

    def stop(_, job):
        jobs.append(job)
        raise RuntimeError("stopped here")

    monkeypatch.setattr(verify, "in_a_process", stop)
    folder = kit.adapter("lora")
    assert cli.main(["verify", "--model", kit.base(), "--adapters", folder, folder]) == 2
    assert "two adapters are named 'lora'" in capsys.readouterr().err and not jobs
    assert cli.main(["verify", "--model", kit.base(), "--adapters", folder, f"twin={folder}"]) == 2
    assert list(jobs[0].folders) == ["lora", "twin"]


def test_too_little_memory_is_said_with_numbers_before_the_start(kit, capsys, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda device: (1 << 30) if device == "cpu" else 0)
    monkeypatch.setattr(verify, "in_a_process", lambda *_: pytest.fail("an engine was started"))
    assert cli.main(arguments(kit, "lora")) == 2
    assert "PEFT float32 needs about 3.0 GiB on cpu, which has 1.0 GiB free" in capsys.readouterr().err


def test_an_engine_that_fails_or_ends_is_an_error_in_words():
    with pytest.raises(RuntimeError, match="the engine failed: ValueError: invalid literal"):
        verify.in_a_process(int, "x")
    with pytest.raises(RuntimeError, match="the engine ended"):
        verify.in_a_process(os._exit, 3)


def test_parameters_are_counted_without_reading_them(kit):
    model = Peft(kit.base(), torch.float32, "cpu")
    ids = torch.randint(3, 128, (1, 4))
    model.logprobs(None, ids, ids[None, :, 1:])
    assert memory.parameters_of(verify.Path(kit.base())) == sum(p.numel() for p in model.base.parameters())
