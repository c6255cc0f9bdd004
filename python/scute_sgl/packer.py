"""Tensors in the serving dtype, laid one after the other into one buffer: what image.py makes images of."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from scute_sgl import layout, structured
from scute_sgl.errors import AdapterError
from scute_sgl.linalg import all_finite
from scute_sgl.slots import BlockAffine, Hadamard, Kronecker, Structure, Target, Tokens


class Packer:
    """Collects tensors, then lays them into one buffer, each at a multiple of ALIGN; offsets count from its start."""

    def __init__(self, dtype: torch.dtype):
        self.dtype, self.size, self.parts = dtype, 0, []

    def add(self, tensor: Tensor, t: Target, name: str, pack: Callable[[Tensor], Tensor] = Tensor.contiguous) -> int:
        """Offset of the packed tensor. AdapterError ``bad_config`` if a value is not finite in the dtype."""
        return self.append(pack(self._cast(tensor, t, name)))

    def pack_tokens(self, tokens: Tokens, t: Target) -> Tensor:
        return layout.pack_rows(tokens.ids, self._cast(tokens.rows, t, "rows"))

    def append(self, packed: Tensor) -> int:
        offset = self.size
        self.parts.append((offset, packed))
        self.size = layout.round_up(offset + packed.numel() * packed.element_size(), layout.ALIGN)
        return offset

    def _cast(self, tensor: Tensor, t: Target, name: str) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        cast = tensor.to(self.dtype)
        if not cast.is_meta and not all_finite(cast):
            largest = tensor.abs().max().item()
            hint = f"largest value {largest:g} is not finite in {str(self.dtype).removeprefix('torch.')}"
            raise AdapterError("bad_config", hint, module=t.path, key=name)
        return cast

    def add_structure(self, s: Structure, t: Target) -> int:
        """Offset of its block, whose tensors follow one another."""
        if isinstance(s, Kronecker) and not structured.fits(s):
            hint = f"found w1 of {tuple(s.w1.shape)} and {0 if s.w2_b is None else len(s.w2_b)} inner ranks"
            want = f"want up to {layout.KRONECKER_ROWS} columns, and {layout.KRONECKER_VALUES} columns times ranks"
            raise AdapterError("too_large", f"{hint}, {want}", module=t.path, key="w1")
        if isinstance(s, Hadamard):
            check_width(t)
        if isinstance(s, BlockAffine) and s.M.shape[1] > layout.BLOCK_AFFINE_INPUTS:
            hint = f"found blocks of {s.M.shape[1]} inputs, want up to {layout.BLOCK_AFFINE_INPUTS}"
            raise AdapterError("too_large", hint, module=t.path, key="M")
        return [self.add(part, t, name) for name, part in structured.parts(s).items()][0]

    def bytes(self, pin: bool) -> Tensor:
        device = "meta" if any(packed.is_meta for _, packed in self.parts) else "cpu"
        data = torch.zeros(layout.round_up(self.size, layout.BLOCK), dtype=torch.uint8, device=device, pin_memory=pin)
        for offset, packed in self.parts:
            view(data, offset, packed.shape, packed.dtype).copy_(packed)
        return data


def view(data: Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What lies at a byte offset of ``data`` (uint8)."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    return data[offset : offset + nbytes].view(dtype).view(shape)


def check_width(t: Target) -> None:
    """AdapterError ``bad_shape`` where A's inputs do not fill the layout's pieces."""
    width = t.inputs[1] - t.inputs[0]
    if width % 8:
        hint = f"{width} inputs on this rank; the layout needs a multiple of 8"
        raise AdapterError("bad_shape", hint, module=t.path, key="A")
