"""SGLang's own LoRA layers for bench_ops.py --stock: its triton and csgmv backends as a captured decode step runs them.

Nothing of SGLang's is rebuilt here. Its backend prepares a decoding batch for a captured graph; its layer classes take
weight buffers shaped as its memory pool's, [slots, slices * rank, inputs] and [slots, outputs, rank] at the largest
rank of the batch; their ``apply_lora`` launches its kernels after the base's GEMM, on the same stream. What a server
adds is left out, in its favour: a slot for requests without an adapter, csgmv's idle segments up to the largest
captured batch (here it is these rows), and with tensor parallelism the all-reduce of o's and down's shrunk rows.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from sglang.kernels.ops.gemm import chunked_sgmv_expand, chunked_sgmv_shrink
from sglang.srt.lora import layers
from sglang.srt.lora.backend.chunked_backend import ChunkedSgmvLoRABackend
from sglang.srt.lora.backend.triton_backend import TritonLoRABackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode

if TYPE_CHECKING:
    from op_cases import Bench, Workload

BACKENDS = {"triton": TritonLoRABackend, "csgmv": ChunkedSgmvLoRABackend}
CLASSES = {
    "qkv": layers.QKVParallelLinearWithLoRA,
    "o": layers.RowParallelLinearWithLoRA,
    "gate_up": layers.MergedColumnParallelLinearWithLoRA,
    "down": layers.RowParallelLinearWithLoRA,
}
# the workloads that --stock measures unless --only names others
DEFAULT = r"^lora_(r16x16_bs16|r16x16_bs64|r64x20_bs20|r16x1_bs64|r16x1_bs1)$"


def can_run(workload: Workload) -> bool:
    """Plain LoRA, decoding."""
    return workload.kind == "lora" and workload.rows <= 256


def build(workload: Workload, benches: dict[str, Bench], dtype: torch.dtype) -> dict[str, dict[str, list]]:
    """SGLang's layers by backend and fused layer, one for each set of weights; both backends read the same buffers.

    A backend whose results are wrong for one of the layers is not returned: a wrong kernel's time says nothing.
    """
    for kernel in (chunked_sgmv_shrink._chunked_lora_shrink_kernel, chunked_sgmv_expand._chunked_lora_expand_kernel):
        # SGLang finds csgmv's compiled kernels by a key without rank and dtype: it would run the last workload's
        getattr(kernel, "kernel_cache", {}).clear()
    scalings = [0.5 + slot / len(workload.ranks) for slot in range(len(workload.ranks))]
    buffers = {name: _buffers(workload, bench, dtype) for name, bench in benches.items()}
    result = {}
    for backend in BACKENDS:
        prepared = _prepared(backend, workload, scalings, next(iter(benches.values())))
        built, wrong = {}, []
        for name, bench in benches.items():
            built[name] = [_layer(name, prepared, bench, *pair) for pair in buffers[name]]
            if not is_right(built[name][-1], workload, scalings, bench, *buffers[name][-1]):
                wrong.append(name)
        if wrong:
            print(f"SGLang's {backend} gives wrong results for {', '.join(wrong)}: not timed", flush=True)
        else:
            result[backend] = built
    return result


def _buffers(workload: Workload, bench: Bench, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A and B of every set, for all slots at the largest rank, as SGLang's memory pool holds them."""
    slots, rank, inputs = len(workload.ranks), max(workload.ranks), bench.x.shape[1]
    a, b = (slots, len(bench.outputs) * rank, inputs), (slots, sum(bench.outputs), rank)

    def filled(shape: tuple[int, ...], size: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=bench.x.device).normal_(0, size**-0.5)

    return [(filled(a, inputs), filled(b, rank)) for _ in range(bench.sets)]


def _prepared(backend: str, workload: Workload, scalings: list[float], bench: Bench):
    """The backend with this batch in the static tensors that captured graphs read."""
    settings = SimpleNamespace(max_lora_chunk_size=16)  # SGLang's default
    result = BACKENDS[backend](max_loras_per_batch=len(workload.ranks), device=bench.x.device, server_args=settings)
    result.init_cuda_graph_batch_info(max_bs_in_cuda_graph=workload.rows, num_tokens_per_req=1)
    result.prepare_lora_batch(
        forward_batch=SimpleNamespace(batch_size=workload.rows, forward_mode=ForwardMode.DECODE),
        weight_indices=bench.row_slot.tolist(),
        lora_ranks=list(workload.ranks),
        scalings=scalings,
        use_cuda_graph=True,
    )
    return result


def _layer(name: str, backend, bench: Bench, a: torch.Tensor, b: torch.Tensor):
    base = SimpleNamespace(
        parameters=lambda: iter((bench.x,)),  # read for its device
        output_partition_sizes=list(bench.outputs),
        output_size=sum(bench.outputs),
        q_proj_shard_size=bench.outputs[0],
        kv_proj_shard_size=bench.outputs[-1],
    )
    layer = CLASSES[name](base, backend)
    layer.set_lora_info(a, b)
    return layer


def is_right(layer, workload: Workload, scalings: list[float], bench: Bench, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether it adds scaling * B (A x), computed in float64, up to rounding A x, the product and y to the dtype."""
    before = torch.randn_like(bench.y)
    got, want = before.clone(), before.double()
    layer.apply_lora(got, bench.x)
    for slot, rank in enumerate(workload.ranks):
        rows = (bench.row_slot == slot).nonzero().flatten()
        v = bench.x[rows].double() @ a[slot, : rank * len(bench.outputs)].double().T
        for i, (begin, end) in enumerate(zip(bench.columns, bench.columns[1:])):
            part = v[:, i * rank : (i + 1) * rank]
            want[rows, begin:end] += scalings[slot] * part @ b[slot, begin:end, :rank].double().T
    precision = max(torch.finfo(got.dtype).eps, 2.0**-10)  # tensor cores multiply float32 as TF32
    return bool((got.double() - want).abs().max() <= 8 * precision * want.abs().max())


def verdict(rows: list[dict]) -> str:
    """Every row of ours that took longer than SGLang's best, and every one without a full comparison."""
    times: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        if "backend" in row:
            place = row["workload"], row.get("layer", "step")
            times.setdefault(place, {})[row["backend"]] = row["added_ms"] * 1e3 if row["op"] == "step" else row["us"]
    slower, missing = [], []
    for (workload, place), taken in times.items():
        stock = {backend: taken[backend] for backend in BACKENDS if backend in taken}
        missing += [f"{workload} {place} {backend}" for backend in BACKENDS if backend not in taken]
        best = min(stock, key=stock.get, default=None)
        if best and taken["scute"] > stock[best]:
            slower.append(f"{workload} {place} ({taken['scute']:.1f} us, {best} {stock[best]:.1f})")
    told = f"slower than SGLang's best in {len(slower)} of {len(times)} rows"
    if slower:
        told += ": " + "; ".join(slower)
    if missing:
        told += ". Not compared: " + "; ".join(missing)
    return told
