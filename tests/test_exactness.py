"""What benchmarks/exactness.py judges: an adapter of every method, each of a wanted effect; failures are rows."""

import json
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import every_method  # noqa: E402
import exactness  # noqa: E402
import judged  # noqa: E402
import tables  # noqa: E402
from peft_models import EFFECTS, TINY, Probe, write_adapters, write_base  # noqa: E402

from scute_sgl.judge import Peft, load_adapter  # noqa: E402
from scute_sgl.supported import SUPPORT  # noqa: E402

LENGTHS = 8, 24  # of prompts and answers
FIGURES = {"effect": 0.5, "mean_error": 0.002, "p999_error": 0.01, "max_error": 0.02, "peft_error": 0.002}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exactness") / "base"
    write_base(folder, TINY, torch.float32, "cpu")
    return folder


@pytest.fixture(scope="module")
def written(base):
    """Recipes, of which one cannot be written, and the scales and errors of writing them all."""
    chosen = every_method.recipes()
    undrawn = replace(chosen["lora_r8"], draws={"lora_A": chosen["lora_r8"].draws["lora_A"]})
    chosen = {"undrawn": undrawn} | chosen
    scales = {}
    errors = write_adapters(Peft(base, torch.float32, "cpu"), chosen, base.parent, scales, *LENGTHS)
    return chosen, scales, errors


def test_every_label_has_one_adapter():
    methods = [recipe.method for recipe in every_method.recipes().values()]
    assert methods == ["LORA", *(row.label for row in SUPPORT)]


def test_a_label_without_a_recipe_is_noticed(monkeypatch):
    monkeypatch.setattr(every_method, "SUPPORT", (*SUPPORT, replace(SUPPORT[0], label="NEW")))
    with pytest.raises(KeyError, match="no recipe for NEW"):
        every_method.recipes()


def test_one_that_cannot_be_written_leaves_the_others_alone(written, base):
    chosen, scales, errors = written
    assert errors.keys() == {"undrawn"} and "does not say how to draw" in errors["undrawn"] and "lora_B" in errors["undrawn"]
    assert scales.keys() == chosen.keys() - errors.keys()
    assert all((base.parent / name / "adapter_model.safetensors").exists() for name in scales)
    assert json.loads((base.parent / "poly" / "adapter_config.json").read_text())["task_id"] == chosen["poly"].task


@pytest.mark.parametrize("label", [row.label for row in SUPPORT if row.label != "LORA"])
def test_each_has_the_wanted_effect_when_peft_reads_it(written, base, label):
    peft = Peft(base, torch.float32, "cpu")
    with peft.lent() as model:
        probe = Probe(model, *LENGTHS)
        assert EFFECTS[0] <= probe.effect(load_adapter(model, base.parent / label.lower())) <= EFFECTS[1]


def test_known_scales_give_the_same_adapter_again(written, base, tmp_path):
    chosen, scales, _ = written
    names = ["lora_r64", "poly", "pissa"]
    again = {name: scales[name] for name in names}
    peft = Peft(base, torch.float32, "cpu")
    assert not write_adapters(peft, {name: chosen[name] for name in names}, tmp_path, again, *LENGTHS)
    for name in names:
        file = "adapter_model.safetensors"
        assert (tmp_path / name / file).read_bytes() == (base.parent / name / file).read_bytes()


def rows(errors: dict, **changed) -> list[dict]:
    chosen = {name: every_method.recipes()[name] for name in ("lora_r8", "hra", "osf")}
    figures = {name: dict(FIGURES) for name in [*chosen, None] if name not in errors}
    figures["hra"] |= changed
    return judged.rows_of("scute", "float16", chosen, figures, errors, {}, Namespace(tp=1))


def test_a_failure_is_a_row_that_is_not_ok():
    found = {row["adapter"]: row for row in rows({"osf": "refused"})}
    assert [row["ok"] for row in found.values()] == [True, True, False, True]
    assert found["osf"]["error"] == "refused" and "NOT OK: refused" in judged.line(found["osf"])
    lines = tables.every(list(found.values())).splitlines()
    assert len(lines) == 2 + len(found) and "| OSF | osf | 1 | failed |" in lines[4]


@pytest.mark.parametrize(
    "change", [{"mean_error": 0.0026}, {"p999_error": 0.0151}, {"effect": 0.29}, {"effect": 1.1}, {"mean_error": float("nan")}]
)
def test_each_limit_holds(change):
    row = next(row for row in rows({}, **change) if row["adapter"] == "hra")
    assert not row["ok"] and "(not ok)" in tables.every([row])


def test_without_the_base_or_a_plain_lora_nothing_is_ok():
    assert not any(row["ok"] for row in rows({None: "failed"}))
    assert not next(row for row in rows({"lora_r8": "failed"}) if row["adapter"] == "hra")["ok"]


@pytest.mark.parametrize(
    ("tenants", "methods", "replays", "device", "wrong"),
    [(2, 2, 23, "cuda", ""), (2, 2, 0, "cpu", ""), (1, 2, 23, "cuda", "held 1 adapters"), (2, 2, 22, "cuda", "only 22 of 23")],
)
def test_the_batch_must_be_one_and_replayed(tenants, methods, replays, device, wrong):
    state = {"max_tenants_in_forward": tenants, "max_methods_in_forward": methods}
    replies = iter([{"replays": 9}, "answers", state | {"replays": 9 + replays}])
    engine = Namespace(ask=lambda *_, **__: next(replies))
    args = Namespace(new_tokens=24, device=device)
    answers, found = exactness.answer(engine, ["lora_r8", "hra", None], {}, every_method.recipes(), args)
    assert answers == "answers" and (wrong in found if wrong else found == "")


def test_what_peft_has_read_is_kept_before_the_rest(written, base):
    chosen, _, _ = written
    names = ["lora_r8", "hra"]
    args = Namespace(device="cpu", rows=1, tp=1)
    ids = torch.arange(12)[None] % TINY["vocab_size"]
    tokens = torch.arange(20).expand(1, 4, 20)
    answers = {name: Namespace(ids=ids, tokens=tokens, served=torch.zeros(1, 4, 20)) for name in [*names, None]}
    kept, errors = [], {}
    folders = {name: base.parent / name for name in names}

    def keep(figures: list[dict]) -> None:
        few = {name: chosen[name] for name in names}
        kept.append(judged.rows_of("scute", "float16", few, figures[0], errors, {}, args))

    judged.judge([answers], base, folders, torch.float32, errors, args, keep)
    read = [[row["adapter"] for row in rows if "error" not in row] for rows in kept]
    assert read == [["base"], ["lora_r8", "base"], ["lora_r8", "hra", "base"]]
    assert kept[0][0]["error"] == "not read by PEFT yet" and not kept[0][0]["ok"]
