"""token_rows and token_logits: tenants' own rows of the vocabulary, in an embedding and in an output head."""

import pytest
import torch
from ops_cases import DEVICES, DTYPES, Arena
from ops_checks import check_update, on_cpu, oracle, same_bits

from scute_sgl import layout, ops, reference

MODULE, VOCABULARY = 1, 40
COUNTS = (3, None, 1, 0, VOCABULARY, 9)  # of own tokens; None: a tenant with none and no block
SHAPES = [(1, 8), (7, 24), (40, 136), (133, 1032), (0, 24)]  # rows, width


def world(dtype: torch.dtype, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    arena = Arena(dtype, torch.Generator().manual_seed(width))
    table = torch.full((len(COUNTS), 3, layout.FIELDS), -1)
    for slot, count in enumerate(COUNTS):
        if count is not None:
            ids = torch.randperm(VOCABULARY, generator=arena.generator)[:count].sort().values
            block = layout.pack_rows(ids, arena.random(count, width, std=width**-0.5).to(dtype))
            arena.fill(layout.ALIGN)
            table[slot, MODULE, layout.TOKENS] = arena.size
            arena._append(block)
    arena.fill(layout.BLOCK)
    return torch.cat(arena.pieces), table


def common(dtype: torch.dtype, device: str, rows: int, width: int, skewed: bool = False) -> dict:
    arena, table = world(dtype, width)
    generator = torch.Generator().manual_seed(rows)
    slots = torch.randint(-1, len(COUNTS), (rows,), generator=generator)
    if skewed:
        slots = torch.where(torch.rand(rows, generator=generator) < 0.8, 4, slots)
    return {
        "row_slot": slots.int().to(device), "arena": arena.to(device), "table": table.to(device), "module": MODULE
    }  # fmt: skip


def activations(dtype: torch.dtype, device: str, rows: int, width: int, apart: int, seed: int) -> torch.Tensor:
    """(rows, width), ``apart`` elements further apart than they are long."""
    wide = torch.randn(rows, width + apart, generator=torch.Generator().manual_seed(seed))
    return wide.to(dtype).to(device)[:, :width]


def row_arguments(dtype, device, rows=40, width=136, apart=8, skewed=False) -> dict:
    ids = torch.randint(-2, VOCABULARY + 5, (rows,), generator=torch.Generator().manual_seed(rows + 1))
    y = activations(dtype, device, rows, width, apart, seed=1)
    return common(dtype, device, rows, width, skewed) | {"ids": ids.to(device), "y": y}


def logit_arguments(dtype, device, rows=40, width=136, apart=8, skewed=False) -> dict:
    x = activations(dtype, device, rows, width, apart, seed=1)
    y = activations(dtype, device, rows, VOCABULARY + 3, apart, seed=2)
    return common(dtype, device, rows, width, skewed) | {"x": x, "y": y}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("apart", [8, 3])  # elements: aligned to 16 bytes and not
@pytest.mark.parametrize("rows, width", [*SHAPES, (40, 13)])
def test_rows_are_exactly_the_tenants_own(rows, width, apart, dtype, device):
    given = row_arguments(dtype, device, rows, width, apart)
    want = reference.token_rows(**on_cpu(given))
    before = given["y"].clone()
    ops.token_rows(**given)
    assert torch.equal(given["y"].cpu().double(), want)
    assert rows < 7 or not torch.equal(given["y"], before)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("apart", [8, 3])
@pytest.mark.parametrize("rows, width", SHAPES)
def test_logits_are_the_reference(rows, width, apart, dtype, device):
    given = logit_arguments(dtype, device, rows, width, apart)
    want, terms = oracle(reference.token_logits, given, dtype)
    before = given["y"].clone()
    ops.token_logits(**given)
    check_update(given["y"], before, want, terms)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op, make", [(ops.token_rows, row_arguments), (ops.token_logits, logit_arguments)])
def test_neighbours_change_no_bit(op, make, dtype, device):
    given = make(dtype, device, 64, 520, skewed=True)
    alone = [
        {k: v[row : row + 1].clone() if k in ("ids", "x", "y", "row_slot") else v for k, v in given.items()}
        for row in range(64)
    ]
    op(**given)
    for row, one in enumerate(alone):
        op(**one)
        assert same_bits(given["y"][row : row + 1], one["y"])


@pytest.mark.parametrize("device", DEVICES)
def test_any_id_is_safe(device):
    given = row_arguments(torch.float32, device, rows=4) | {"ids": torch.tensor([-1, -(2**62), 2**62, 2**32], device=device)}
    before = given["y"].clone()
    ops.token_rows(**given)
    assert torch.equal(given["y"], before)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op, make, change, message", [
    (ops.token_rows, row_arguments, lambda a: a | {"ids": a["ids"].int()}, "ids is Int; want Long"),
    (ops.token_rows, row_arguments, lambda a: a | {"y": a["y"].int()}, "y is Int; want Float, Half or BFloat16"),
    (ops.token_rows, row_arguments, lambda a: a | {"y": a["y"][:3]}, r"y has shape \[3, 136\]; want \[40, -1\]"),
    (ops.token_rows, row_arguments, lambda a: a | {"row_slot": a["row_slot"][:6]}, r"row_slot has shape \[6\]; want \[40\]"),
    (ops.token_rows, row_arguments, lambda a: a | {"module": 3}, "modules 3 to 3 are asked for; want them within table's 3"),
    (ops.token_logits, logit_arguments, lambda a: a | {"y": a["y"].half()}, "y is Half; want Float"),
    (ops.token_logits, logit_arguments, lambda a: a | {"x": a["x"][:, :132]}, "x has 132 columns; want a positive multiple of 8"),
    (ops.token_logits, logit_arguments, lambda a: a | {"y": a["y"].mT.contiguous().mT}, "y has strides .* last dimension contiguous"),
    (ops.token_logits, logit_arguments, lambda a: a | {"table": a["table"][..., :8]}, r"table has shape \[6, 3, 8\]; want \[-1, -1, 10\]"),
])  # fmt: skip
def test_refusals(device, op, make, change, message):
    with pytest.raises(RuntimeError, match=message):
        op(**change(make(torch.float32, device)))


def test_refuses_what_only_the_cpu_sees():
    given = logit_arguments(torch.float32, "cpu")
    with pytest.raises(RuntimeError, match="slot . has a row for token .*; want one of y's 2 columns"):
        ops.token_logits(**given | {"y": given["y"][:, :2]})
    table = given["table"].clone()
    table[4, MODULE, layout.TOKENS] += layout.ALIGN
    with pytest.raises(RuntimeError, match=f"is of kind .*; want kind {layout.ROWS}"):
        ops.token_logits(**given | {"table": table, "row_slot": torch.full_like(given["row_slot"], 4)})
    table[4, MODULE, layout.TOKENS] = len(given["arena"]) - 8
    with pytest.raises(RuntimeError, match="table points at arena bytes"):
        ops.token_rows(**row_arguments(torch.float32, "cpu", 1) | {"table": table, "row_slot": torch.tensor([4], dtype=torch.int32)})
