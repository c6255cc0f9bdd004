"""``scute serve``, and real adapters on a base of which only the shapes are real (--load-format dummy)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from servers import Server, prompt


class ScuteServe(Server):
    program = ("scute_sgl", "serve")


@pytest.fixture(scope="module")
def dummy(kit, tmp_path_factory):
    log = tmp_path_factory.mktemp("dummy") / "server.log"
    with ScuteServe(kit.base(), log, "--load-format", "dummy", env={"SGLANG_PLUGINS": "scute"}) as running:
        yield running


def test_adapters_work_on_dummy_weights(dummy, kit, tmp_path):
    """SGLang draws weights of 1e-3: only on the output head does a usual adapter show beside rounding."""
    whole = tmp_path / "whole"
    shutil.copytree(kit.adapter("lora_head"), whole)
    status, reply = dummy.load("head", str(whole))
    assert status == 400 and "refused [wrong_base]: lm_head base_weight" in reply["error_message"]

    file = whole / "adapter_model.safetensors"
    save_file({key: t for key, t in load_file(file).items() if "base_layer" not in key}, Path(file))
    for name, folder in {"head": str(whole), "dora": kit.adapter("dora"), "oft": kit.adapter("oft")}.items():
        assert dummy.load(name, folder)[0] == 200
    (_, base), (_, head), *others = dummy.logprobs([prompt(5)] * 4, [None, "head", "dora", "oft"], n=1)
    assert (head - base).abs().max() > 1e-5
    assert all(table.isfinite().all() for _, table in [([], head), *others])
    assert dummy.state()["max_tenants_in_forward"] == 3
