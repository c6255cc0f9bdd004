"""RandLoRA: one pair of frozen random matrices for all modules, whose N = ceil(m / r) low-rank terms have a module's
whole rank m = min(in, out) together.

    F(x) = x W + b + (x A^T) B^T,   A = P, B = Q where in <= out, else A = Q^T, B = P^T

    P (r N, m)            row k N + n is c * lambda[k, n] * randlora_A[k, 0, :m] * gamma[n],   c = randlora_alpha / r
    Q (max(in, out), r N) column n r + k is randlora_B[:, n, k]

PEFT flattens one with k outside and the other with n outside: row j meets column j, of another k and n. Where r N > m
the product itself is kept. An adapter costs as much as a LoRA of rank m, though its file has lambda (r, N) and gamma
(N, m) only: their scales lie on both sides of the matrices, which no op applies to shared ones.

PEFT repeats randlora_A (r, 1, m) and randlora_B (max(in, out), N, r), of the largest sizes over all targets, under every
layer, and reads the model's own last: that one counts, and another is refused. Without save_projection they are drawn
again from projection_prng_key, bit for bit, divided by their standard deviations and rounded to the base's dtype. The
dense ones are drawn in bfloat16, as PEFT does wherever torch has that: on CPUs and CUDA devices, emulated or not.

Checked against peft/tuners/randlora/{layer,model}.py of PEFT 0.21.2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from scute_sgl import names
from scute_sgl.errors import AdapterError, NeedsBase
from scute_sgl.linalg import all_finite, dense
from scute_sgl.methods import common, vera
from scute_sgl.names import Module
from scute_sgl.slots import Adapter, BaseShape, Slots, Term

FIELDS = vera.FIELDS | {"r": 32, "randlora_alpha": 640.0, "sparse": False, "very_sparse": False}
NEUTRAL = frozenset({"randlora_dropout"})
PARAMETERS = ("randlora_lambda", "randlora_gamma")
SHARED = ("randlora_A", "randlora_B")
MAX_PRODUCTS = 1 << 42  # multiplications of all Q P: r comes from a file that lambda and gamma hardly make larger


def read(config: dict, tensors: dict[str, Tensor], base: BaseShape | None) -> Adapter:
    c = common.settings(config, FIELDS, NEUTRAL)
    r = common.rank(c["r"])
    scale = common.number(c["randlora_alpha"], "randlora_alpha") / r
    modules, saved = names.group(tensors, base, PARAMETERS + SHARED, SHARED)
    if not c["save_projection"]:
        vera.check_unsaved(saved, modules)
    else:
        kept = vera.kept(saved, SHARED[0], r, 1, "inputs"), vera.kept(saved, SHARED[1], "outputs", "N", r)
    if base is None:
        raise NeedsBase("wrong_base", "which side of a layer is the smaller, and has gamma, only the base tells")
    _check_work(modules, r)
    whole_A, whole_B = kept if c["save_projection"] else _draw(c, r, base)

    def read_one(module: Module) -> Slots:
        common.refuse_embedding(module, "RandLoRA")
        m, longer = sorted((module.in_features, module.out_features))
        n = -(-m // r)
        for name, whole in saved.items():
            copy = module.take(name, *whole.shape)
            if copy is not None and not torch.equal(copy.to(whole.dtype), whole):
                raise module.error("bad_config", name, f"differs from base_model.{name}, of which it should be a copy")
        weights, gamma = module.need("randlora_lambda", r, n), module.need("randlora_gamma", n, m)
        weights = common.scaled(weights, scale, module, "randlora_lambda")
        if whole_A.shape[2] < m or len(whole_B) < longer or whole_B.shape[1] < n:
            found = f"found shared matrices {tuple(whole_A.shape)} and {tuple(whole_B.shape)}"
            raise module.error("bad_shape", "", f"{found}, want at least {(r, 1, m)} and {(longer, n, r)}")
        A, B, weights, gamma = common.alike(whole_A[:, :, :m], whole_B[:longer, :n], weights, gamma)
        P, Q = (weights[:, :, None] * A * gamma).flatten(0, 1), B.flatten(1)
        product = Q @ P if r * n > m else P
        if not all_finite(product):
            raise module.error("bad_config", "randlora_gamma", "not finite times lambda, alpha and the shared matrices")
        if r * n > m:
            return Slots(terms=(dense(product if m == module.in_features else product.T),))
        P, Q = _balanced(P, Q)
        return Slots(terms=(Term(P, Q) if m == module.in_features else Term(Q.T, P.T),))

    return common.build("RANDLORA", config, modules, read_one)


def _check_work(modules: list[Module], r: int) -> None:
    common.check_all_expanded(modules, lambda module: module.in_features, "randlora_lambda")
    sizes = [(module.in_features, module.out_features) for module in modules if module.adapted]
    work = sum(-(-min(size) // r) * r * math.prod(size) for size in sizes if min(size) % r)
    if work > MAX_PRODUCTS:
        hint = f"found {r}, for {work} multiplications; want up to {MAX_PRODUCTS}, or a divisor of the layers' sizes"
        raise AdapterError("too_large", hint, key="r")


def _balanced(P: Tensor, Q: Tensor) -> tuple[Tensor, Tensor]:
    """P (k, m) and Q (n, k) with powers of two moved from columns of Q to rows of P, until their largest values are of
    one size: lambda times gamma alone is so small that float16 would lose it."""
    low, high = (torch.frexp(tensor.abs().amax(dim)).exponent for tensor, dim in ((P, 1), (Q, 0)))
    shift = (high - low) // 2
    return torch.ldexp(P, shift[:, None]), torch.ldexp(Q, -shift)


def _draw(c: dict, r: int, base: BaseShape) -> tuple[Tensor, Tensor]:
    """The (r, 1, m) and (longer, N, r) that PEFT draws for these targets."""
    inputs, outputs, generator = vera.sizes_and_generator(c, base)
    m, longer = sorted((inputs, outputs))
    n = -(-m // r)
    vera.check_draw((r, 1, m), (longer, n, r))
    if c["sparse"] or c["very_sparse"]:
        one_in = math.sqrt(m) if c["very_sparse"] else 3
        drawn = [_signs(shape, one_in, generator) for shape in ((r, 1, m), (longer, n, r))]
    else:
        drawn = [_uniform((r, 1, m), generator), torch.cat([_uniform((longer, 1, r), generator) for _ in range(n)], 1)]
    return tuple((tensor / tensor.std()).to(base.dtype) for tensor in drawn)


def _signs(shape: tuple[int, ...], one_in: float, generator: torch.Generator) -> Tensor:
    """1 and -1, each in one of 2 * ``one_in`` places, else 0."""
    drawn = torch.rand(shape, generator=generator)
    return (drawn > 1 - 1 / (2 * one_in)).float() - (drawn < 1 / (2 * one_in)).float()


def _uniform(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.nn.init.kaiming_uniform_(torch.empty(shape, dtype=torch.bfloat16), a=math.sqrt(5), generator=generator)
