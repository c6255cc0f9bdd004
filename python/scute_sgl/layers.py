"""The served model's layers with the batch's adapters around their GEMM.

    x' = rotate(x);   y = base(x');   v = shrink(x), project(x);   y = y + y * (s - 1) + b + expand(v)
    y = structured(x, y), reweigh(x, W, y)

Decoding up to LINEAR_ROWS rows on a recent GPU, base and expand are one op, linear, which reads W while the sums v are
made. With more rows the sums, which need the layer's input alone, are made beside the base's GEMM on a second stream: a
GEMM of few rows waits for memory and leaves multiprocessors idle.

SGLang's layers leave their GEMM to a "quant method" object. Wrapping that object, instead of the layer, keeps
everything else the layer does: splitting inputs, adding the bias on one rank only, one all-reduce after the
adapters' part or none at all, gathering. A batch without adapters reaches the base's own method untouched.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from sglang.srt.layers.quantization.base_config import LinearMethodBase
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod
from sglang.srt.lora.layers import BaseLayerWithLoRA
from sglang.srt.utils import replace_submodule
from torch import Tensor

from scute_sgl import ops
from scute_sgl.backend import DECODE_TILE, Rows, ScuteBackend
from scute_sgl.layout import DELTA, K_CHUNK, ROTATED, SHARED, STRUCTURED
from scute_sgl.targets import Site

# A GEMM of few rows costs what reading W costs: up to here the slices' rotated inputs share one, stacked.
STACKED_ROWS = 192


def attach(model: torch.nn.Module, sites: list[Site], backend: ScuteBackend) -> None:
    """Put adapters around every site of the model."""
    for site in sites:
        kind = site.targets[0].kind
        if kind == "head":
            replace_submodule(model, site.name, ScuteHead(site, backend))
        elif kind == "embedding":
            site.layer.quant_method = ScuteEmbedding(site, backend)
        else:
            site.layer.quant_method = ScuteLinear(site, backend)


class Adapters:
    """The ops of one site, on one batch."""

    def __init__(self, site: Site, backend: ScuteBackend):
        self.backend, self.module, self.columns = backend, site.module, site.columns
        self.slices = len(site.targets)
        self.in_begin = site.targets[0].inputs[0]
        self.out_begin = [target.outputs[0] for target in site.targets]

    def rotate(self, rows: Rows, x: Tensor) -> Tensor:
        """(slices, rows, in): every slice's own input."""
        plan, pool = rows.planned(x.shape[0]), self.backend.pool
        rotated = x.new_empty((self.slices, *x.shape))
        ops.rotate(x, plan.row_slot, pool.arena, pool.table, self.module, self.slices, rotated)
        return rotated

    def around(self, rows: Rows, x: Tensor, weight: Tensor, base: Callable[[], Tensor]) -> Tensor:
        """``base()`` with the adapters' part added; x is the layer's input before any rotation, ``weight`` its own."""
        v, shared_v = self._partials(rows, x)
        with self.backend.beside(base, rows.tile_rows == DECODE_TILE and (v is not None or shared_v is not None)) as y:
            self._sum(rows, x, v, shared_v)
        self._expand(rows, v, shared_v, y)
        self._add_structures(rows, x, weight, y)
        return y

    def linear(self, rows: Rows, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The same for few rows, with the base's GEMM in the op: x W^T + bias."""
        plan, pool = rows.planned(x.shape[0]), self.backend.pool
        # In this order: linear reads its inputs while the sums are made.
        inputs = self.rotate(rows, x) if self.backend.live & ROTATED else x.unsqueeze(0)
        v, shared_v = self._partials(rows, x)
        self._sum(rows, x, v, shared_v)
        y = x.new_empty((x.shape[0], self.columns[-1]))
        ops.linear(
            inputs, weight, bias, v, shared_v, plan.row_slot, pool.arena, pool.table, pool.slots, pool.sets,
            self.module, self.columns, self.out_begin, y,
        )  # fmt: skip
        self._add_structures(rows, x, weight, y)
        return y

    def _sum(self, rows: Rows, x: Tensor, v: Tensor | None, shared_v: Tensor | None) -> None:
        plan, pool = rows.planned(x.shape[0]), self.backend.pool
        if v is not None:
            ops.shrink(x, pool.arena, pool.table, plan.words, rows.tile_rows, self.module, self.slices, v)
        if shared_v is not None:
            ops.project(
                x, plan.row_slot, pool.arena, pool.table, pool.sets, plan.words, rows.tile_rows,
                self.module, self.slices, self.in_begin, shared_v,
            )  # fmt: skip

    def _add_structures(self, rows: Rows, x: Tensor, weight: Tensor, y: Tensor) -> None:
        if self.backend.live & STRUCTURED:
            plan, pool = rows.planned(x.shape[0]), self.backend.pool
            ops.structured(x, plan.row_slot, pool.arena, pool.table, self.module, self.columns, y)
            ops.reweigh(x, weight, plan.row_slot, pool.arena, pool.table, self.module, self.columns, y)

    def _expand(self, rows: Rows, v: Tensor | None, shared_v: Tensor | None, y: Tensor) -> None:
        plan, pool = rows.planned(y.shape[0]), self.backend.pool
        if v is not None or shared_v is not None:
            ops.expand(
                v, shared_v, plan.row_slot, pool.arena, pool.table, pool.sets, plan.words, rows.tile_rows,
                self.module, self.columns, self.out_begin, y,
            )  # fmt: skip

    def look_up(self, rows: Rows, ids: Tensor, held: int, y: Tensor) -> None:
        """The same for an embedding, whose input is ids that count from this rank's first."""
        if self.backend.live & DELTA:
            plan, pool = rows.planned(ids.shape[0]), self.backend.pool
            v = torch.empty((1, ids.shape[0], self.backend.stride), dtype=torch.float32, device=ids.device)
            ops.lookup(ids, pool.arena, pool.table, plan.words, rows.tile_rows, self.module, 0, held, y.dtype, v)
            self._expand(rows, v, None, y)
            ops.token_rows(ids, plan.row_slot, pool.arena, pool.table, self.module, y)

    def give_logits(self, rows: Rows, x: Tensor, y: Tensor) -> None:
        """An output head's logits of the tokens for which tenants have rows of their own."""
        if self.backend.live & DELTA:
            plan, pool = rows.planned(x.shape[0]), self.backend.pool
            ops.token_logits(x, plan.row_slot, pool.arena, pool.table, self.module, y)

    def _partials(self, rows: Rows, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Scratch for sums over inputs, of private and of shared factors. Few rows leave the GPU to many inputs: decoding
        sums its chunks apart. Allocated before a fork: memory that main gives back later may still be in use there."""
        chunks = -(-x.shape[1] // K_CHUNK) if rows.tile_rows == DECODE_TILE else 1

        def scratch(slices: int) -> Tensor:
            size = chunks, x.shape[0], slices * self.backend.stride
            return torch.empty(size, dtype=torch.float32, device=x.device)

        live = self.backend.live
        return scratch(self.slices) if live & DELTA else None, scratch(1) if live & SHARED else None


class ScuteLinear(LinearMethodBase):
    """The linear method of a column-, row-parallel, merged or replicated layer."""

    def __init__(self, site: Site, backend: ScuteBackend):
        self.base, self.backend, self.adapters = site.layer.quant_method, backend, Adapters(site, backend)

    def __getattr__(self, name: str):  # whatever else SGLang asks of a linear method
        return getattr(self.base, name)

    def create_weights(self, *args, **kwargs):
        return self.base.create_weights(*args, **kwargs)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self.base.process_weights_after_loading(layer)

    def apply(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        self.backend.reached.add(self.adapters.module)
        if not self.backend.live:
            return self.base.apply(layer, x, bias)
        if self.backend.fuses(x):
            return self.adapters.linear(self.backend.body, x, layer.weight, bias)
        return self.adapters.around(self.backend.body, x, layer.weight, lambda: self._project(layer, x, bias))

    def apply_into(self, layer: torch.nn.Module, x: Tensor, out: Tensor, bias: Tensor | None = None) -> Tensor:
        """SGLang's ``output_tensor=``: the same into a tensor of the caller's."""
        if not self.backend.live:
            self.backend.reached.add(self.adapters.module)
            return self.base.apply_into(layer, x, out, bias)
        return out.copy_(self.apply(layer, x, bias))

    def _project(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        if not self.backend.live & ROTATED:
            return self.base.apply(layer, x, bias)
        rotated = self.adapters.rotate(self.backend.body, x)
        if len(rotated) == 1:
            return self.base.apply(layer, rotated[0], bias)
        bounds = self.adapters.columns
        if len(rotated) * x.shape[0] <= STACKED_ROWS:
            stacked = self.base.apply(layer, rotated.flatten(0, 1), bias).view(*rotated.shape[:2], -1)
            return torch.cat([stacked[i, :, begin:end] for i, (begin, end) in enumerate(pairwise(bounds))], dim=1)
        y = x.new_empty((x.shape[0], bounds[-1]))
        for part, (begin, end) in zip(rotated, pairwise(bounds), strict=True):
            y[:, begin:end] = torch.nn.functional.linear(
                part, layer.weight[begin:end], None if bias is None else bias[begin:end]
            )
        return y


class ScuteEmbedding(UnquantizedEmbeddingMethod):
    """The embedding method of a vocabulary-parallel embedding; SGLang reduces over ranks after it."""

    def __init__(self, site: Site, backend: ScuteBackend):
        layer, target = site.layer, site.targets[0]
        self.base, self.backend, self.adapters = layer.quant_method, backend, Adapters(site, backend)
        self.held = target.inputs[1] - target.inputs[0]
        # SGLang's fused lookup does not come here; it is the base's own kernel, so it serves the base alone.
        if hasattr(layer, "_use_triton_embedding"):
            fused = layer._use_triton_embedding
            layer._use_triton_embedding = lambda ids: not backend.live and fused(ids)

    def embedding(self, layer: torch.nn.Module, ids: Tensor) -> Tensor:
        y = self.base.embedding(layer, ids)
        if self.backend.live:
            self.adapters.look_up(self.backend.body, ids.contiguous(), self.held, y)
        return y


class ScuteHead(BaseLayerWithLoRA):
    """The output head: a layer of its own, because SGLang's LogitsProcessor multiplies by a plain head's weight itself."""

    def __init__(self, site: Site, backend: ScuteBackend):
        super().__init__(site.layer, backend)
        self.backend, self.adapters = backend, Adapters(site, backend)
        self.set_lora = self.apply_lora = True  # their presence makes LogitsProcessor call forward

    def forward(self, hidden: Tensor) -> Tensor:
        x = hidden.to(self.weight.dtype)
        if not self.backend.live:
            return torch.matmul(x, self.weight.T)
        rows = self.backend.head_rows(hidden.shape[0])

        def base() -> Tensor:
            inputs = self.adapters.rotate(rows, x)[0] if self.backend.live & ROTATED else x
            return torch.matmul(inputs, self.weight.T)

        y = self.adapters.around(rows, x, self.weight, base)
        self.adapters.give_logits(rows, x, y)
        return y

    def set_lm_head_pass(self, index: int) -> None:
        self.backend._lm_head_pass_idx = index

    def reset_lm_head_pass(self) -> None:
        self.backend._lm_head_pass_idx = None
