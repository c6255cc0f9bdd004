"""Served log-probabilities against PEFT's: one batch of an engine, and PEFT reading the same tokens.

``scute verify`` and benchmarks/exactness.py judge with this. Needs the package peft.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import peft.tuners.boft.layer as boft_layer
import torch
from peft import PeftModel
from peft.tuners.lora.variants import get_alora_offsets_for_generate
from peft.tuners.poly.layer import PolyLayer
from torch import Tensor
from transformers import AutoModelForCausalLM

from scute_sgl.checkpoint import read_config
from scute_sgl.methods import alora

TOP = 20  # judged at every position, beside the chosen token
FLOAT32_ERROR = 1e-5  # the largest of any log-probability
PEFT_ERROR = 1.25  # in 16 bit: mean error over the one that PEFT makes in that dtype


@dataclass(frozen=True)
class Answers:
    """What one adapter's rows got: ids (rows, prompt + new), judged tokens and log-probabilities (rows, new, k)."""

    ids: Tensor
    tokens: Tensor
    served: Tensor


def generate(
    engine,
    names: list[str | None],
    vocabulary: int,
    rows: int,
    prompt: int,
    new_tokens: int,
    folders: Mapping[str | None, Path] | None = None,
) -> dict[str | None, Answers]:
    """One batch: ``rows`` rows for each name (None: the base), sampled at temperature 1 so that positions differ.

    Prompts of an activated LoRA among ``folders`` have its invocation tokens in the middle, if they are long enough.
    """
    generator = torch.Generator().manual_seed(5)
    prompts = torch.randint(3, vocabulary, (len(names) * rows, prompt), generator=generator)
    for mine, name in zip(prompts.split(rows), names):
        tokens = read_config(folders[name]).get(alora.FIELD) if folders and name else None
        if tokens and len(tokens) <= prompt:
            begin = (prompt - len(tokens)) // 2
            mine[:, begin : begin + len(tokens)] = torch.tensor(tokens)
    replies = engine.generate(
        input_ids=prompts.tolist(),
        lora_path=[name for name in names for _ in range(rows)],
        sampling_params={"temperature": 1.0, "max_new_tokens": new_tokens, "ignore_eos": True},
        return_logprob=True,
        top_logprobs_num=TOP,
    )
    result = {}
    for number, name in enumerate(names):
        mine = slice(number * rows, (number + 1) * rows)
        judged = torch.tensor([_judged(reply["meta_info"]) for reply in replies[mine]], dtype=torch.float64)
        served, tokens = judged[..., 0].float(), judged[..., 1].long()
        result[name] = Answers(torch.cat([prompts[mine], tokens[:, :, 0]], 1), tokens, served)
    return result


def _judged(meta: dict) -> list[list[list[float]]]:
    """(positions, 1 + TOP, 2) of an answer: log-probability and token, the chosen one first."""
    chosen, top = meta["output_token_logprobs"], meta["output_top_logprobs"]
    return [[list(pair[:2]) for pair in [one, *likeliest]] for one, likeliest in zip(chosen, top, strict=True)]


def figures(served: Tensor, expected: Tensor, bare: Tensor, peft: Tensor) -> dict[str, float]:
    """Effect and errors of log-probabilities (rows, positions, k), all of the same tokens.

    expected and bare: PEFT in float32 with and without the adapter; peft: with it, in the serving dtype.
    """
    errors, own = (served - expected).abs(), (peft - expected).abs()
    return {
        "positions": served.shape[0] * served.shape[1],
        "effect": (expected - bare).abs().mean().item(),
        "mean_error": errors.mean().item(),
        "p999_error": errors.flatten().quantile(0.999).item(),
        "max_error": errors.max().item(),
        "peft_error": own.mean().item(),
        "peft_p999_error": own.flatten().quantile(0.999).item(),
    }


def excess(found: dict, dtype: str, tolerance: float | None) -> str:
    """Why :func:`figures` are past the tolerance (None: the limit above); "" if they are not. NaN is."""
    if dtype == "float32":
        what, error, limit = "largest error", found["max_error"], FLOAT32_ERROR if tolerance is None else tolerance
    else:
        what, error = "mean error", found["mean_error"]
        limit = found["peft_error"] * (PEFT_ERROR if tolerance is None else tolerance)
    return "" if error <= limit else f"{what} {error:.2e}, want at most {limit:.2e}"


class Peft:
    """PEFT's log-probabilities in one dtype, with one adapter after the other on one base in memory.

    Some adapters leave their mark on the base's weights (PiSSA's residual, trained biases). The base is then read
    again for the next one.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: str):
        self.folder, self.dtype, self.device = folder, dtype, device
        self.base = None

    @contextmanager
    def lent(self) -> Iterator[torch.nn.Module]:
        """The base, to somebody who gives it back without the adapter."""
        if self.base is None:
            self.base = load_base(self.folder, self.dtype, self.device)
            self.sums = _sums(self.base)
        try:
            yield self.base
        except BaseException:
            self.base = None  # half an adapter may still sit in it
            raise
        if _sums(self.base) != self.sums:
            self.base = None

    def logprobs(self, adapter: Path | None, ids: Tensor, tokens: Tensor, rows: int = 4) -> Tensor:
        """What :func:`logprobs` says, on the host; adapter None is the base itself."""
        with self.lent() as base, with_adapter(base, adapter) as model:
            return logprobs(model, ids.to(self.device), tokens.to(self.device), rows).cpu()


def _sums(model) -> dict[str, float]:
    """One number for each parameter, which a change of its values changes too."""
    integers = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    return {name: p.data.view(integers[p.element_size()]).sum().item() for name, p in model.named_parameters()}


def load_base(folder: Path, dtype: torch.dtype, device: str):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()


def load_adapter(base, folder: Path) -> PeftModel:
    """PEFT's model of an adapter, in eval mode; ``base`` becomes a part of it.

    Some methods take singular vectors out of the base when they load. PEFT computes them in float32, which errs by up
    to 5e-6 of a weight of 0.1 where singular values lie close; here they are as exact as float64 makes them. Not those
    of AdaMSS: its clusters must come out as when it was trained.
    """
    config = read_config(Path(folder))
    svd = torch.linalg.svd if config["peft_type"] == "ADAMSS" else _svd
    with mock.patch("torch.linalg.svd", svd):
        model = PeftModel.from_pretrained(base, folder).eval()
    set_task(model, config.get("task_id", 0))
    return model


def set_task(model: PeftModel, task: int) -> None:
    """Poly's, which PEFT wants in every call for every row. Other methods have none."""

    def with_task(_, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return args, kwargs | {"task_ids": torch.full((len(args[0]),), task, device=args[0].device)}

    for module in model.modules():
        if isinstance(module, PolyLayer):
            module.register_forward_pre_hook(with_task, with_kwargs=True)


@contextmanager
def with_adapter(base, folder: Path | None) -> Iterator[torch.nn.Module]:
    """The base with an adapter loaded by PEFT (None: the bare base), and its own layers again afterwards."""
    if folder is None:
        yield base
        return
    model = load_adapter(base, folder)
    try:
        yield model
    finally:
        model.unload()


@torch.inference_mode()
def logprobs(model, ids: Tensor, tokens: Tensor, rows: int = 4) -> Tensor:
    """Log-probabilities of ``tokens`` (rows, positions, k) as successors of the last but one ids before each.

    ids (rows, length): prompt and answer; tokens of position p stand for the ids at length - positions + p.
    """
    positions = tokens.shape[1]
    parts = []
    for chunk, wanted in zip(ids.split(rows), tokens.split(rows), strict=True):
        logits = model(input_ids=chunk, **_offsets(model, chunk, positions)).logits[:, -positions - 1 : -1]
        parts.append(logits.float().log_softmax(-1).gather(-1, wanted))
    return torch.cat(parts)


def _offsets(model, ids: Tensor, answered: int) -> dict[str, list[int | None]]:
    """Where an activated LoRA begins, counted from the end. Found in the prompt alone, as by PEFT's generate: its
    forward would search the answer too."""
    if not isinstance(model, PeftModel):
        return {}
    found = get_alora_offsets_for_generate(model, input_ids=ids[:, :-answered]).get("alora_offsets")
    return {} if found is None else {"alora_offsets": [offset and offset + answered for offset in found]}


class _BlockDiagonal:
    """What BOFT's CUDA extension computes, which PEFT would try to build: (n, k, b, b) -> (n, k b, k b)."""

    @staticmethod
    def forward(blocks: Tensor) -> tuple[Tensor]:
        return (torch.stack([torch.block_diag(*stage) for stage in blocks]),)


boft_layer.get_fbd_cuda = lambda: _BlockDiagonal


def _svd(matrix: Tensor, full_matrices: bool = True, svd=torch.linalg.svd) -> tuple[Tensor, ...]:
    return tuple(factor.to(matrix.dtype) for factor in svd(matrix.double(), full_matrices=full_matrices))
