"""What tenants cost in the arena, what they share there, and that ops read nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fakes import FakeModel
from safetensors.torch import load_file
from servers import TOLERANCE, prompt

from scute_sgl import layout, ops
from scute_sgl.fold import fold_adapter
from scute_sgl.image import Image, pack
from scute_sgl.methods import METHODS
from scute_sgl.plan import BatchPlan
from scute_sgl.pool import Pool
from scute_sgl.slots import BaseShape, Target

KINDS = ["lora", "dora", "ia3", "vera", "oft"]
OFT_BLOCK, RANK = 16, 16
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def checkpoint(kind: str, model: FakeModel) -> tuple[dict, dict[str, torch.Tensor]]:
    """Config and random tensors of an adapter on all linear layers, as PEFT writes them."""
    random = torch.Generator().manual_seed(KINDS.index(kind))
    config = {"peft_type": "LORA" if kind == "dora" else kind.upper(), "target_modules": list(LINEARS)}
    config |= {
        "lora": {"r": RANK, "lora_alpha": 16},
        "dora": {"r": RANK, "lora_alpha": 16, "use_dora": True},
        "ia3": {"feedforward_modules": ["down_proj"]},
        "vera": {"r": RANK, "save_projection": True},
        "oft": {"oft_block_size": OFT_BLOCK, "use_cayley_neumann": True, "peft_version": "0.21.2"},
    }[kind]
    tensors = {}

    def add(key: str, *shape: int) -> None:
        tensors[f"base_model.{key}"] = 0.1 + 0.01 * torch.randn(shape, generator=random)

    for path, (inputs, outputs) in model.shapes.items():
        module = f"model.{path}."
        if not path.endswith(LINEARS):
            continue
        if kind in ("lora", "dora"):
            add(module + "lora_A.weight", RANK, inputs), add(module + "lora_B.weight", outputs, RANK)
        if kind == "dora":
            add(module + "lora_magnitude_vector", outputs)
        if kind == "ia3":
            add(module + "ia3_l", *((1, inputs) if path.endswith("down_proj") else (outputs, 1)))
        if kind == "vera":
            add(module + "vera_lambda_d", RANK), add(module + "vera_lambda_b", outputs)
        if kind == "oft":
            add(module + "oft_R.weight", inputs // OFT_BLOCK, OFT_BLOCK * (OFT_BLOCK - 1) // 2)
    if kind == "vera":
        add("vera_A", RANK, 128), add("vera_B", 128, RANK)
    return config, tensors


def packed(kind: str, model: FakeModel, dtype: torch.dtype) -> tuple[Image, int]:
    """An adapter's image, and the bytes of its checkpoint's own tensors in that dtype."""
    config, tensors = checkpoint(kind, model)
    base = BaseShape(model.shapes, dtype=dtype, vocab_size=96)
    adapter = METHODS[config["peft_type"]].read(config, tensors, base)
    own = sum(tensor.numel() for key, tensor in tensors.items() if not key.startswith("base_model.vera_"))
    return pack(fold_adapter(adapter, model.targets()), dtype), own * dtype.itemsize


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_costs_at_most_a_tenth_more_than_its_checkpoint(kind):
    """OFT's file holds a block's triangle, its image the whole block, which the kernels multiply by."""
    image, own = packed(kind, FakeModel(layers=64), torch.float16)
    assert own > 64 << 10
    assert image.nbytes <= 1.1 * own * (2 * OFT_BLOCK / (OFT_BLOCK - 1) if kind == "oft" else 1)


def extents(pool: Pool, slot: int, t: Target) -> Iterator[tuple[int, int]]:
    """Where the ops read one tenant's tensors of one module, by the table."""
    entry = pool.table[slot, t.module].tolist()
    meta, inputs, outputs = entry[layout.META], t.inputs[1] - t.inputs[0], t.outputs[1] - t.outputs[0]
    rank8, block, one_block = meta & 0xFFFF, meta >> 16 & 0xFFFF, meta >> 32 & 1
    sizes = {
        layout.A: rank8 * inputs,
        layout.B: rank8 * outputs,
        layout.SCALE: outputs,
        layout.BIAS: outputs,
        layout.D: layout.round_up(RANK, 8),
        layout.E: outputs,
        layout.ROTATION: block * (1 if block == 1 and not one_block else block) * (1 if one_block else inputs // max(block, 1)),
    }
    for field, size in sizes.items():
        if entry[field] >= 0:
            yield entry[field], entry[field] + size * pool.dtype.itemsize


def set_extents(pool: Pool, row: int) -> Iterator[tuple[int, int]]:
    A, B, rank8, inputs, outputs = pool.sets[row].tolist()
    for offset, width in ((A, inputs), (B, outputs)):
        yield offset, offset + rank8 * width * pool.dtype.itemsize


def run(pool: Pool, t: Target) -> torch.Tensor:
    """Every op of one module, on three rows of every tenant."""
    plan = BatchPlan(64, pool)
    plan.build([slot for slot in pool.uid_to_slot.values() for _ in range(3)] + [-1], tile_rows=8)
    rows, columns, tables = len(plan.row_slot), [0, t.out_features], (pool.arena, pool.table)
    x = torch.randn(rows, t.in_features, generator=torch.Generator().manual_seed(1))
    rotated, y = torch.full((1, *x.shape), torch.nan), torch.ones(rows, t.out_features)
    v, xA = torch.full((2, 1, rows, plan.rank_max), torch.nan)
    ops.rotate(x, plan.row_slot, *tables, t.module, 1, rotated)
    ops.shrink(x, *tables, plan.words, 8, t.module, 1, v)
    ops.project(x, plan.row_slot, *tables, pool.sets, plan.words, 8, t.module, 1, 0, xA)
    ops.expand(v, xA, plan.row_slot, *tables, pool.sets, plan.words, 8, t.module, columns, [0], y)
    return torch.cat([rotated[0], y], dim=1)


def test_every_tensor_that_an_op_reads_lies_inside_the_arena_in_its_tenants_block():
    model = FakeModel(layers=2)
    targets = [t for t in model.targets().values() if t.path.endswith(LINEARS)]
    pool = Pool(1 << 20, 8, len(model.shapes), "cpu", torch.float32, poison=True)
    for kind in KINDS:
        pool.register(kind, packed(kind, model, torch.float32)[0])
    pool.ensure(KINDS)
    read = []
    for tenant in pool._resident.values():
        found = sorted(extent for t in targets for extent in extents(pool, tenant.slot, t))
        assert found and tenant.offset <= found[0][0] and found[-1][1] <= tenant.offset + tenant.size
        read += found
    (shared,) = pool._resident_sets()
    assert all(shared.offset <= begin < end <= shared.offset + shared.size for begin, end in set_extents(pool, shared.row))
    read = sorted(read + list(set_extents(pool, shared.row)))
    assert read[0][0] >= 0 and read[-1][1] <= pool.arena.numel()
    assert all(end <= begin for (_, end), (begin, _) in zip(read, read[1:])), "tensors overlap"

    before = [run(pool, t) for t in targets]
    kept = torch.full_like(pool.arena, 0xFF)  # NaN, wherever no tensor is
    for begin, end in read:
        kept[begin:end] = pool.arena[begin:end]
    pool.arena.copy_(kept)
    for t, want in zip(targets, before):
        got = run(pool, t)
        assert got.isfinite().all() and torch.equal(got, want), t.path


# In the server, whose free arena is filled with NaN


def test_the_arena_holds_the_images_of_its_tenants_and_no_more(server, loaded):
    names = loaded(*KINDS)
    server.generate([prompt(i) for i in range(5)], names, n=2)
    state = server.state()
    pool, own = state["pool"], {name: state["tenants"][name]["bytes"] for name in names}
    assert pool["resident"] == 5 and pool["used"] == sum(own.values()) + pool["shared_bytes"]
    assert pool["used"] + pool["free"] == pool["arena_bytes"] == 8 << 20
    assert max(own["ia3"], own["vera"]) < own["lora"] / 8


@pytest.mark.parametrize("adapter", ["lora_rslora", "lora_r200", "lora_r500"])
def test_a_large_tenant_costs_what_its_file_holds(server, kit, loaded, adapter):
    file = load_file(Path(kit.adapter(adapter)) / "adapter_model.safetensors")
    own = sum(tensor.nbytes for tensor in file.values())
    loaded(adapter)
    assert own > 64 << 10 and own <= server.state()["tenants"][adapter]["bytes"] <= 1.03 * own


def test_tenants_with_the_same_shared_matrices_store_them_once(server, kit, loaded):
    """A saved pair, the same pair with other vectors, and the same pair drawn again from its seed."""
    loaded("vera", "vera_bias_only", "vera_unsaved")
    shared = set()
    for tenants in (["vera"], ["vera", "vera_bias_only", "vera_unsaved"], ["vera_unsaved", "vera_bias_only", None]):
        for tenant, served in zip(tenants, server.logprobs([prompt(i) for i in range(len(tenants))], tenants, n=2)):
            assert kit.error(tenant, served) <= TOLERANCE, tenant
        shared.add(server.state()["pool"]["shared_bytes"])
    assert len(shared) == 1


def test_three_groups_of_tenants_with_different_shared_matrices_in_one_batch(server, kit, loaded):
    groups = [["vera", "vera_bias_only"], ["vera_r16"], ["vera_unsaved_seed", "vera_seed"], ["vera_all"]]
    tenants = [None, *loaded(*sum(groups, [])), None]
    for tenant, served in zip(tenants, server.logprobs([prompt(i) for i in range(len(tenants))], tenants, n=8)):
        assert kit.error(tenant, served) <= TOLERANCE, tenant
        assert tenant is None or kit.effect(tenant, served) > 0.05
    state = server.state()
    # In float32: A (r8, 64) and B (outputs, r8). vera_unsaved_seed has gate_proj's 96 outputs, vera_all down_proj's 96 inputs.
    sets = [8 * (64 + 64), 16 * (64 + 64), 8 * (64 + 96), 8 * (64 + 64), 8 * (96 + 96)]
    assert state["pool"]["shared_bytes"] == 4 * sum(sets)
