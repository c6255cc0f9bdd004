import pytest
import torch
from ops_cases import DEVICES, DTYPES, Arena, make_plan
from ops_checks import on_cpu

from scute_sgl import layout, ops, reference

RANKS = (3, 0, 16)  # of the tenants' embeddings; 0: this tenant leaves the embedding alone
FIRST_ID, HELD_IDS = 5, 11


def arguments(dtype: torch.dtype, device: str, rows: int = 40) -> dict:
    generator = torch.Generator().manual_seed(rows)
    arena = Arena(dtype, generator)
    table = torch.full((len(RANKS), 2, layout.FIELDS), -1)
    for slot, rank in enumerate(RANKS):
        if rank:
            table[slot, 1, layout.A] = arena.put(layout.pack_embedding_a(arena.random(rank, HELD_IDS)))
            table[slot, 1, layout.META] = layout.pack_meta(layout.round_up(rank, layout.RANK_STEP))
    arena.fill(layout.BLOCK)
    words = [[layout.DELTA, -1, layout.round_up(rank, layout.RANK_STEP)] for rank in RANKS]
    slots = torch.tensor(words, dtype=torch.int32, device=device)
    row_slot = torch.randint(-1, len(RANKS), (rows,), generator=generator).to(torch.int32).to(device)
    return {
        "ids": torch.randint(0, FIRST_ID + HELD_IDS + 5, (rows,), generator=generator).to(device),
        "arena": torch.cat(arena.pieces).to(device),
        "table": table.to(device),
        "plan": make_plan(row_slot, slots, 8),
        "tile_rows": 8,
        "module": 1,
        "first_id": FIRST_ID,
        "held_ids": HELD_IDS,
        "dtype": dtype,
        "v": torch.full((1, rows, 24), torch.nan, device=device),
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_is_exactly_the_reference(device, dtype):
    given = arguments(dtype, device)
    want = reference.lookup(**on_cpu(given))
    ops.lookup(**given)
    assert torch.equal(given["v"].cpu().nan_to_num(7.0).double(), want.nan_to_num(7.0))


@pytest.mark.parametrize("device", DEVICES)
def test_any_id_is_safe(device):
    given = arguments(torch.float32, device, rows=4)
    given["ids"] = torch.tensor([-1, -(2**62), 2**62, FIRST_ID + HELD_IDS], device=device)
    ops.lookup(**given)
    assert torch.equal(given["v"].nan_to_num(0.0), torch.zeros_like(given["v"]))


@pytest.mark.parametrize("device", DEVICES)
def test_empty(device):
    ops.lookup(**arguments(torch.float32, device, rows=0))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "change, message",
    [
        (lambda a: a | {"ids": a["ids"].int()}, "ids is Int; want Long"),
        (lambda a: a | {"dtype": torch.int8}, "dtype is Char; want Float, Half or BFloat16"),
        (lambda a: a | {"ids": a["ids"][None]}, r"ids has shape \[1, 40\]; want \[-1\]"),
        (lambda a: a | {"ids": a["ids"].repeat(2)[::2]}, r"ids has strides \[2\]; want it contiguous"),
        (lambda a: a | {"v": a["v"].repeat(2, 1, 1)}, "v has 2 chunks; want 1"),
        (lambda a: a | {"held_ids": -1}, "held_ids is -1; want at least 0"),
    ],
)
def test_refusals(device, change, message):
    with pytest.raises(RuntimeError, match=message):
        ops.lookup(**change(arguments(torch.float32, device)))
