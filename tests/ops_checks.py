"""Comparisons and variations of op arguments; ``ops_cases`` makes the arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from ops_cases import make_plan
from torch import Tensor

FLOAT32_SUM = 2e-6  # rounding of a float32 sum of up to 2,056 terms, relative to the sum of their absolute values


def one_row(arguments: dict, row: int, row_slot: Tensor, slots: Tensor) -> dict:
    """The same arguments for a batch of this row alone, with copies of whatever the op writes."""
    alone = {"plan": make_plan(row_slot[row : row + 1], slots, arguments.get("tile_rows", 8))}
    for name in ("x", "y", "row_slot"):
        alone[name] = arguments[name][row : row + 1].clone() if name in arguments else None
    for name in ("v", "shared_v", "out"):
        alone[name] = arguments[name][:, row : row + 1].clone() if name in arguments else None
    return {name: alone.get(name, value) for name, value in arguments.items()}


def on_cpu(arguments: dict) -> dict:
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in arguments.items()}


def oracle(function, arguments: dict, dtype: torch.dtype) -> tuple:
    """What the reference computes, and the same with every number positive: its sums of absolute terms."""
    given = on_cpu(arguments)
    return function(**given), function(**signless(given, dtype))


def signless(given: dict, dtype: torch.dtype) -> dict:
    """The same arguments with every number positive."""
    names = [name for name in ("x", "weight", "bias", "v", "shared_v", "y", "out") if given.get(name) is not None]
    arena = given["arena"].view(dtype).abs().view(torch.uint8)
    return given | {name: given[name].abs() for name in names} | {"arena": arena}


def ulp(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance between neighbours of ``dtype`` at each value, in float64."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(values.abs().double().clamp_min(info.smallest_normal)).exponent - 1
    return torch.exp2(exponent.double()) * info.eps


def check_close(got: Tensor, want: Tensor, terms: Tensor, dtype: torch.dtype) -> None:
    """Within one ulp of the output's dtype, and what float32 accumulation costs where terms cancel.

    NaN is wanted where nothing may be written.
    """
    got, blank = got.cpu().double(), want.isnan()
    assert got[blank].isnan().all(), "written where nothing was to be written"
    excess = ((got - want).abs() / (ulp(want, dtype) + FLOAT32_SUM * terms))[~blank]
    assert not excess.isnan().any(), "something was read that must not be, or not written"
    assert excess.numel() == 0 or excess.max() <= 1, f"{excess.max():.2f} times the error allowed"


def check_update(got: Tensor, before: Tensor, want: Tensor, terms: Tensor) -> None:
    """As ``check_close``, and what nobody adapts keeps its bits."""
    check_close(got, want, terms, got.dtype)
    kept = want == before.cpu().double()
    assert same_bits(got.cpu()[kept], before.cpu()[kept])


def check_neighbours(op: Callable, given: dict, slots: Tensor, rows: Iterable[int], out: str = "y", axis: int = 0) -> None:
    """Each of these rows has the same bits in the tensor ``out`` when it is alone; rows run along ``axis``."""
    alone = {row: one_row(given, row, given["row_slot"], slots) for row in rows}
    op(**given)
    for row, row_arguments in alone.items():
        op(**row_arguments)
        assert same_bits(given[out].narrow(axis, row, 1), row_arguments[out])


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
