import pytest
import torch
from ops_cases import DEVICES, NO_PLAN, Case, make_plan, row_slots, world

from scute_sgl import layout, ops, reference
from scute_sgl.reference_reads import tenants


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture
def slots(device):
    return world(torch.float32, 24, 8, device).slots


def used(plan: torch.Tensor) -> list:
    """The words of a plan that mean something: header, both lists of tiles, both of rows, and all shares."""
    plan, n = plan.cpu(), layout.plan_rows(len(plan))
    sizes = [layout.PLAN_HEADER, 4 * n, 4 * n, 4 * max(n, layout.WORKERS), 2 * n]
    _, tiles, shared_tiles, shares, _ = plan.split(sizes)
    lists = [
        (part.view(-1, 4)[:count].tolist(), [(key, rows.tolist()) for key, rows in tenants(plan, shared)])
        for shared, (part, count) in enumerate(zip((tiles, shared_tiles), plan[:2].tolist()))
    ]
    return [plan[:6].tolist(), *lists, shares.view(-1, 4).tolist()]


def workers(shares: list) -> dict:
    """How many shares each tile has, by its first two words; shares without rows are nobody's."""
    counts = {}
    for slot, where, _, _ in shares:
        if where:
            counts[slot, where] = counts.get((slot, where), 0) + 1
    return counts


@pytest.mark.parametrize("rows", [0, 1, 7, 511, 512, 513, 514, 4096])
def test_rows_of_a_plan_of_any_size(rows):
    assert layout.plan_rows(layout.plan_size(rows)) == rows


@pytest.mark.parametrize("popularity", ["base", "distinct", "uniform", "skewed"])
@pytest.mark.parametrize("rows", [0, 1, 7, 64, 133, 2100])
@pytest.mark.parametrize("tile_rows", [1, 8, 64])
def test_is_the_reference(device, popularity, rows, tile_rows):
    slots = world(torch.float32, 24, 64, device).slots  # of different ranks
    row_slot = row_slots(Case(24, 8, rows, popularity, device=device))
    blank = torch.full((layout.plan_size(rows),), NO_PLAN, dtype=torch.int32)
    want = reference.plan(row_slot.cpu(), slots.cpu(), tile_rows, blank)
    assert used(make_plan(row_slot, slots, tile_rows)) == used(want)


def test_spelled_out(device, slots):
    # In the zoo, slots 0 and 5 have factors of their own, 3 is in set 1, 2 and 6 are in set 0, 4 has nothing.
    row_slot = torch.tensor([5, 0, -1, 4, 0, 3, 6, 0, 2], dtype=torch.int32, device=device)
    header, (tiles, private), (shared_tiles, shared), shares = used(make_plan(row_slot, slots, 8))
    assert private == [(0, [1, 4, 7]), (5, [0])]
    assert shared == [(0, [6, 8]), (1, [5])]
    assert header == [2, 2, layout.DELTA | layout.SHARED | layout.ROTATED, 512, 8, 8]
    # All ranks are 8, so that each of the four tiles has the same number of workers.
    assert tiles == [[0, 0, 3, 0], [5, 3, 1, 128]]
    assert shared_tiles == [[0, 0, 2, 256], [1, 2, 1, 384]]
    part, on_shared = 2**31 // 128, -(2**31)
    assert shares[0] == [0, 0 | 3 << 20, 0, part] and shares[1] == [0, 3 << 20, part, 2 * part]
    assert shares[255] == [5, 3 | 1 << 20, 127 * part, -(2**31)]  # the end of the columns, 2**31, as an int32
    assert shares[256] == [0, (0 | 2 << 20) + on_shared, 0, part]
    assert shares[384] == [1, (2 | 1 << 20) + on_shared, 0, part] and len(shares) == 512


def test_the_shares_of_a_tile_are_all_its_columns(device, slots):
    """Three tiles: parts that do not come out even."""
    row_slot = torch.tensor([0, 5, 3], dtype=torch.int32, device=device)
    header, (tiles, _), (shared_tiles, _), shares = used(make_plan(row_slot, slots, 8))
    assert header[3] == 510 and shares[510:] == [[0, 0, 0, 0]] * 2
    begins = [worker for _, _, _, worker in tiles + shared_tiles]
    assert begins == [0, 170, 340]
    for begin in begins:
        mine = [(first % 2**32, last % 2**32) for _, _, first, last in shares[begin : begin + 170]]
        assert mine[0][0] == 0 and mine[-1][1] == 2**31
        assert all(last == first for (_, last), (first, _) in zip(mine, mine[1:]))
        widths = [last - first for first, last in mine]
        assert max(widths) - min(widths) <= 1


def test_large_ranks_weigh_more(device):
    """Nine times the weight, nine times the workers; of a shared set the largest rank among its tenants counts."""
    own, shared = [layout.DELTA, -1], [layout.SHARED, 1]
    slots = torch.tensor([own + [136], own + [8], shared + [8], shared + [136]], dtype=torch.int32, device=device)
    row_slot = torch.tensor([0, 1, 2, 3], dtype=torch.int32, device=device)
    header, *_, shares = used(make_plan(row_slot, slots, 8))
    over, weights = layout.WORKERS - 3, {(0, 1 << 20): 144, (1, 1 | 1 << 20): 16, (1, (2 << 20) - 2**31): 144}
    assert workers(shares) == {tile: 1 + over * weight // 304 for tile, weight in weights.items()}
    assert header[3:] == [sum(workers(shares).values()), 136, 136]
    _, *_, shares = used(make_plan(row_slot[:3], slots, 8))  # without the set's larger tenant
    assert workers(shares)[1, (1 << 20) - 2**31] == workers(shares)[1, 1 | 1 << 20]


def test_more_tiles_than_workers(device, slots):
    """Each has one, and so it has where there are as many, or where one is over that no tile has a right to."""
    for rows in (layout.WORKERS - 1, layout.WORKERS, layout.WORKERS + 1, 2 * layout.WORKERS):
        row_slot = torch.tensor([0, 3], dtype=torch.int32, device=device).repeat(rows)[:rows]
        header, (tiles, _), (shared_tiles, _), shares = used(make_plan(row_slot, slots, 1))
        assert header[:2] == [(rows + 1) // 2, rows // 2] and header[3] == rows
        assert [worker for _, _, _, worker in tiles + shared_tiles] == list(range(rows))
        assert all(where and (first, last) == (0, -(2**31)) for _, where, first, last in shares[:rows])
        assert len(shares) == max(rows, layout.WORKERS) and shares[rows:] == [[0] * 4] * (layout.WORKERS - rows)


def test_slot_past_the_table(device, slots):
    row_slot = torch.tensor([0, len(slots)], dtype=torch.int32, device=device)
    if device == "cpu":
        with pytest.raises(RuntimeError, match=r"row_slot\[1\] is 7; want it below the 7 slots"):
            make_plan(row_slot, slots, 8)
    else:  # the host cannot know; the row is nobody's
        assert used(make_plan(row_slot, slots, 8))[1][1] == [(0, [0])]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda a: a | {"row_slot": a["row_slot"].long()}, "row_slot is Long; want Int"),
        (lambda a: a | {"slots": a["slots"].float()}, "slots is Float; want Int"),
        (lambda a: a | {"slots": a["slots"][:, :1]}, r"slots has shape \[7, 1\]; want \[-1, 3\]"),
        (lambda a: a | {"slots": a["slots"].T.contiguous().T}, r"slots has strides \[1, 7\]; want it contiguous"),
        (lambda a: a | {"plan": a["plan"][1:]}, r"plan has shape \[2093\]; want \[2094\]"),
        (lambda a: a | {"tile_rows": 0}, "tile_rows is 0; want 1 to 2047"),
        (lambda a: a | {"tile_rows": 2048}, "tile_rows is 2048; want 1 to 2047"),
    ],
)
def test_refusals(device, slots, change, message):
    row_slot = row_slots(Case(24, 8, 3, "distinct", device=device))
    plan = torch.zeros(layout.plan_size(3), dtype=torch.int32, device=device)
    with pytest.raises(RuntimeError, match=message):
        ops.plan(**change({"row_slot": row_slot, "slots": slots, "tile_rows": 8, "plan": plan}))
