"""The native ops, typed. ``reference.py`` defines what they compute, ``layout.py`` what they read.

Common to all: every tensor is on one device; ``arena``, ``table``, ``slots``, ``sets`` and ``plan`` are as in
layout.py; results go into tensors that the caller passes; work is queued on the current stream. A wrong dtype,
device, shape or stride, a range outside the table and partial sums too narrow raise RuntimeError naming the
tensor. n is the number of rows, and the plan is one of exactly n rows. ``tile_rows`` is what the plan was made
with. The serving dtype (float32, float16 or bfloat16) is that of x or y, and of everything in the arena.

``v`` holds partial sums: float32 (chunks, >= n, slices * stride), contiguous, chunks either 1 or one for every
K_CHUNK inputs. Slice i owns columns [i * stride, i * stride + rank8), so stride is at least every rank met.
x and y may have any row stride; their last dimension is contiguous, and x has a multiple of 8 columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, library

from scute_sgl.build import REBUILD

try:
    from scute_sgl import _C
except ImportError as error:  # not built, or for another torch
    message = f"scute_sgl's extension does not load with torch {torch.__version__} ({error})"
    raise ImportError(f"{message}; build it, in a clone of scute_sgl: {REBUILD}") from error

build_info = _C.build_info
_ops = torch.ops.scute


def linear_runs(device: torch.device) -> bool:
    """Whether op linear runs there: a GPU of compute capability 9.0 or 10.0, and an extension with code for it."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return _C.linear_runs()


def plan(row_slot: Tensor, slots: Tensor, tile_rows: int, plan: Tensor) -> None:
    """Lists the rows that have work, by tenant and by shared set, in tiles of at most ``tile_rows``.

    row_slot int32 (n,): each row's slot, negative for nobody. slots int32 (slots, SLOT_FIELDS).
    plan int32 (plan_size(n),): written. On the CPU a slot past the table raises; on CUDA it is nobody's row.
    """
    _ops.plan(row_slot, slots, tile_rows, plan)


def shrink(
    x: Tensor, arena: Tensor, table: Tensor, plan: Tensor, tile_rows: int, module: int, slices: int, v: Tensor
) -> None:
    """v = x A^T for rows whose tenant has an A, for the ``slices`` modules from ``module`` on.

    x (n, in). Rows and slices without an A are left as they were in v.
    """
    _ops.shrink(x, arena, table, plan, tile_rows, module, slices, v)


def lookup(
    ids: Tensor,
    arena: Tensor,
    table: Tensor,
    plan: Tensor,
    tile_rows: int,
    module: int,
    first_id: int,
    held_ids: int,
    dtype: torch.dtype,
    v: Tensor,
) -> None:
    """The shrink of an embedding: v[0, row] = A[ids[row] - first_id], zeros for ids outside the held ones.

    ids int64 (n,). A holds the ``held_ids`` tokens from ``first_id`` on, in ``dtype``. v has 1 chunk, 1 slice.
    """
    _ops.lookup(ids, arena, table, plan, tile_rows, module, first_id, held_ids, dtype, v)


def project(
    x: Tensor,
    row_slot: Tensor,
    arena: Tensor,
    table: Tensor,
    sets: Tensor,
    plan: Tensor,
    tile_rows: int,
    module: int,
    slices: int,
    in_begin: int,
    v: Tensor,
) -> None:
    """The shrink of shared sets: v = x A^T, once for all slices, for rows whose tenant has d and e in any of them.

    x (n, in), which meets A[:, in_begin:in_begin + in], a multiple of 8; row_slot int32 (n,), the one the plan was
    made from. v has one slice; the sums go to v[0], and what chunks it has beyond that is room to work in.
    """
    _ops.project(x, row_slot, arena, table, sets, plan, tile_rows, module, slices, in_begin, v)


def expand(
    v: Tensor | None,
    shared_v: Tensor | None,
    row_slot: Tensor,
    arena: Tensor,
    table: Tensor,
    sets: Tensor,
    plan: Tensor,
    tile_rows: int,
    module: int,
    columns: Sequence[int],
    out_begin: Sequence[int],
    y: Tensor,
) -> None:
    """y += y * scale + bias + v B^T, in float32 and rounded once, where the tenant has any of the three.

    For tenants of a shared set the last is ((shared_v * d) B^T) * e, with the set's B; slice i,
    y[:, columns[i]:columns[i + 1]], meets B from row out_begin[i] on. v comes from shrink or lookup, shared_v from
    project; None: no tenant of that kind is served. y (n, out). ``columns`` are the ascending bounds of the slices
    in y, one more than slices.
    """
    _ops.expand(v, shared_v, row_slot, arena, table, sets, plan, tile_rows, module, columns, out_begin, y)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    v: Tensor | None,
    shared_v: Tensor | None,
    row_slot: Tensor,
    arena: Tensor,
    table: Tensor,
    slots: Tensor,
    sets: Tensor,
    module: int,
    columns: Sequence[int],
    out_begin: Sequence[int],
    y: Tensor,
) -> None:
    """y = x W^T + bias, and what expand does to such a y: the base's GEMM of few rows and the adapters' part in one.

    x (1 or slices, n, in): one input for all slices, or each slice's own; ``weight`` (columns[-1], in), its rows
    contiguous; ``bias`` (columns[-1],) or None, both of x's dtype. v, shared_v, ``columns``, which begin with 0, and
    out_begin as for expand; instead of a plan, row_slot int32 (n,) and ``slots`` as for plan say whose a row is.
    y (n, columns[-1]) of x's dtype: written, never read; rows of nobody too.

    On CUDA, where :func:`linear_runs`: float16 and bfloat16, at most LINEAR_ROWS rows; rows of x and of the weight
    begin at multiples of 16 bytes, one slice's rows right behind another's; all in float32 and rounded once. In a captured
    graph v or shared_v must come from the shrink or project right before, and x from what was before that: it is read
    while they run. On the CPU 16 bits round x W^T + bias before the adapters' part is added, and a slot past the table raises.
    """
    _ops.linear(
        x, weight, bias, v, shared_v, row_slot, arena, table, slots, sets, module, columns, out_begin, y
    )  # fmt: skip


def rotate(
    x: Tensor, row_slot: Tensor, arena: Tensor, table: Tensor, module: int, slices: int, out: Tensor
) -> None:
    """out[i] = x + x (R - I) for rows whose tenant rotates the input of slice i, and a copy of x for all others.

    x (n, in); row_slot int32 (n,); out (slices, n, in), contiguous, of x's dtype: every row is written.
    """
    _ops.rotate(x, row_slot, arena, table, module, slices, out)


def structured(
    x: Tensor, row_slot: Tensor, arena: Tensor, table: Tensor, module: int, columns: Sequence[int], y: Tensor
) -> None:
    """y += x S^T, in float32 and rounded once, or the tenant's mix of y, where it has such a structure.

    x (n, in); row_slot int32 (n,); y (n, out) of x's dtype, which expand has updated. ``columns`` as for expand.
    """
    _ops.structured(x, row_slot, arena, table, module, columns, y)


def reweigh(
    x: Tensor,
    weight: Tensor,
    row_slot: Tensor,
    arena: Tensor,
    table: Tensor,
    module: int,
    columns: Sequence[int],
    y: Tensor,
) -> None:
    """y += x S^T, in float32 and rounded once, where the tenant has a structure whose S is made of the weight.

    x (n, in); ``weight`` (at least columns[-1], in) of x's dtype: the layer's own, row j for column j of y;
    row_slot int32 (n,); y (n, out) of x's dtype, which expand has updated. ``columns`` as for expand.
    """
    _ops.reweigh(x, weight, row_slot, arena, table, module, columns, y)


def token_rows(ids: Tensor, row_slot: Tensor, arena: Tensor, table: Tensor, module: int, y: Tensor) -> None:
    """y[row] = the tenant's own row of token ids[row], where it has one: the last op of an embedding.

    ids int64 (n,), which count from this rank's first token, as those of the tenants' blocks do; row_slot int32 (n,);
    y (n, width). Other rows keep their bits.
    """
    _ops.token_rows(ids, row_slot, arena, table, module, y)


def token_logits(x: Tensor, row_slot: Tensor, arena: Tensor, table: Tensor, module: int, y: Tensor) -> None:
    """y[row, id] = x[row] . the tenant's own row of token id, for each of its tokens: the last op of an output head.

    x (n, in), the input before any rotation; row_slot int32 (n,); y (n, out). In float32, rounded once; other columns
    keep their bits. On the CPU an id past y's columns raises; on CUDA it is skipped.
    """
    _ops.token_logits(x, row_slot, arena, table, module, y)


def _fake(*args) -> None:
    """Nothing to allocate and nothing to infer, but one device is needed here as well."""
    devices = {str(arg.device) for arg in args if isinstance(arg, Tensor)}
    if len(devices) != 1:
        raise RuntimeError(f"tensors are on {', '.join(sorted(devices))}; want one device")


_NAMES = "plan shrink lookup project expand linear rotate structured reweigh token_rows token_logits"

for _name in _NAMES.split():
    library.register_fake(f"scute::{_name}", _fake)
