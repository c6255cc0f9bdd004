"""One batch with a tenant of every method that the support table names, on a server that has room for them."""

from __future__ import annotations

import pytest
from servers import TOLERANCE, Server, prompt

from scute_sgl.supported import SUPPORT

LABELS = [row.label for row in SUPPORT]  # in lower case each is the name of an adapter of make_adapters.py


@pytest.fixture(scope="module")
def roomy(kit, tmp_path_factory):
    flags = ["--max-loras-per-batch", str(len(LABELS)), "--max-loaded-loras", str(len(LABELS))]
    with Server(kit.base(), tmp_path_factory.mktemp("roomy") / "server.log", "--scute-arena-mb", "64", *flags) as server:
        yield server


def test_all_methods_in_one_batch_equal_peft(roomy, kit):
    tenants = [label.lower() for label in LABELS]
    for tenant in tenants:
        status, reply = roomy.load(tenant, kit.adapter(tenant))
        assert status == 200, reply
    rows = [None, *tenants, None]
    prompts = [prompt(i) for i in range(len(rows))]
    for tenant, served in zip(rows, roomy.logprobs(prompts, rows)):
        assert kit.error(tenant, served) <= TOLERANCE, tenant
        assert tenant is None or kit.effect(tenant, served) > 0.05, tenant
    state = roomy.state()
    assert state["max_tenants_in_forward"] == len(tenants) and state["max_methods_in_forward"] == len(LABELS)
    assert {name: state["tenants"][name]["method"] for name in tenants} == dict(zip(tenants, LABELS))
    for tenant, ids, answer in zip(rows, prompts, roomy.generate(prompts, rows, n=8)):
        assert answer["output_ids"] == kit.greedy(tenant, ids, 8), tenant
