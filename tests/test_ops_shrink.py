from dataclasses import replace

import pytest
import torch
from ops_cases import DEVICES, DTYPES, SHAPES, Case, cases, row_slots, shrink_arguments, world_of
from ops_checks import check_close, one_row, oracle, same_bits

from scute_sgl import layout, ops, reference


@pytest.mark.parametrize("case", cases(*SHAPES), ids=str)
def test_is_the_reference(case):
    given = shrink_arguments(case)
    want, terms = oracle(reference.shrink, given, case.dtype)
    ops.shrink(**given)
    check_close(given["v"], want, terms, torch.float32)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("case", cases(Case(2056, 16, 64, "skewed", tile_rows=64)), ids=str)
def test_neighbours_change_no_bit(case, split):
    case = replace(case, split=split)
    given, row_slot, slots = shrink_arguments(case), row_slots(case), world_of(case).slots
    alone = {row: one_row(given, row, row_slot, slots) for row in range(0, case.rows, 7)}
    ops.shrink(**given)
    for row, arguments in alone.items():
        ops.shrink(**arguments)
        assert same_bits(given["v"][:, row : row + 1], arguments["v"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_chunk_sums_the_chunks_in_order(dtype):
    """On the CPU to the bit; CUDA may order a sum within a chunk by the number of chunks."""
    shape = {"inputs": 3080, "rank": 16, "rows": 7, "popularity": "distinct", "dtype": dtype}
    whole, split = shrink_arguments(Case(**shape)), shrink_arguments(Case(**shape, split=True))
    ops.shrink(**whole)
    ops.shrink(**split)
    v = split["v"]
    assert same_bits(whole["v"][0], v[0] + v[1] + v[2] + v[3])


@pytest.mark.parametrize("device", DEVICES)
def test_empty(device):
    ops.shrink(**shrink_arguments(Case(24, 8, 0, "base", device=device)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "change, message",
    [
        (lambda a: a | {"x": a["x"].double()}, "x is Double; want Float, Half or BFloat16"),
        (lambda a: a | {"x": a["x"].T.contiguous().T}, "x has strides .*; want its last dimension contiguous"),
        (lambda a: a | {"x": a["x"][:, :20]}, "x has 20 columns; want a positive multiple of 8"),
        (lambda a: a | {"x": a["x"][:2]}, r"plan has shape \[2134\]; want \[2084\]"),
        (lambda a: a | {"arena": a["arena"].view(torch.int8)}, "arena is Char; want Byte"),
        (lambda a: a | {"table": a["table"][..., :7]}, r"table has shape .*; want \[-1, -1, 10\] \(-1: any\)"),
        (lambda a: a | {"table": a["table"][:, 1:]}, "table has strides .*; want it contiguous"),
        (lambda a: a | {"module": 4}, "modules 4 to 6 are asked for; want them within table's 6"),
        (lambda a: a | {"module": -1}, "modules -1 to 1 are asked for"),
        (lambda a: a | {"slices": 0}, "slices is 0; want 1 to 4"),
        (lambda a: a | {"v": a["v"].half()}, "v is Half; want Float"),
        (lambda a: a | {"v": a["v"][:, :6].contiguous()}, "v has 6 rows; want at least 7"),
        (lambda a: a | {"v": a["v"][:, :, 1:].contiguous()}, "v has 47 columns; want a multiple of 4 for each of the 3 slices"),
        (lambda a: a | {"v": a["v"].repeat(2, 1, 1)}, "v has 2 chunks; want 1, or one for every 1024 inputs"),
    ],
)
def test_refusals(device, change, message):
    with pytest.raises(RuntimeError, match=message):
        ops.shrink(**change(shrink_arguments(Case(24, 8, 7, "distinct", device=device))))


def test_refuses_what_only_the_cpu_sees():
    given = shrink_arguments(Case(24, 8, 7, "distinct"))
    with pytest.raises(RuntimeError, match="v has 4 columns a slice; want at least the rank 8 of slot \\d"):
        ops.shrink(**given | {"v": given["v"][:, :, :12].contiguous()})
    with pytest.raises(RuntimeError, match="table points at arena bytes .*; want them within 256"):
        ops.shrink(**given | {"arena": given["arena"][: layout.BLOCK]})


def test_refuses_a_second_device():
    given = shrink_arguments(Case(24, 8, 7, "distinct"))
    with pytest.raises(RuntimeError, match="tensors are on cpu, meta; want one device"):
        ops.shrink(**given | {"v": given["v"].to("meta")})


@pytest.mark.skipif("cuda" not in DEVICES, reason="needs a GPU")
def test_refuses_a_table_on_the_cpu():
    given = shrink_arguments(Case(24, 8, 7, "distinct", device="cuda"))
    with pytest.raises(RuntimeError, match="table is on cpu; want cuda:0"):
        ops.shrink(**given | {"table": given["table"].cpu()})
