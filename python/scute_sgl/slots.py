"""The normal form: what one adapter does to one linear layer.

    F(x) = mix( gain * ( ((x R) W) * s + b + sum_k ((x A_k^T) * d_k) B_k^T * e_k + x S^T ) )

x is a row vector, W is the base weight transposed to (in, out). The low-rank terms and S, a Kronecker product, a sparse
matrix or one made of the base weight, take the input before R and are not scaled by s. ``b`` is the total bias, the
base's included. ``mix`` takes pairs of outputs. A module has S or a mix, not both: its ``structure``. An absent slot is
the identity. An adapter with norms of its own gives the layers behind them x * norm for x, in R and the terms alike. One
with rows of the vocabulary of its own has them in place of the base's: F(x)_t = x . row_t in an output head, row_t in an
embedding.
Readers in ``methods/`` fill a :class:`Slots` from a checkpoint alone; ``fold.py`` turns it, with the base
weight, into the :class:`Folded` tensors that the kernels apply to a base output y that holds the base bias:

    y' = y + y * scale + bias + v B^T  (+ ((x A_s^T) * d) B_s^T * e),   v = x A^T,   y from x + x (R - I)
    y'' = y' + x S^T, or mix(y')

``Folded.scale`` is s - 1 and ``Folded.rotation`` is R - I: trained values lie so near the identity that a
16-bit s would round to 1.

Orientation and dtype of every tensor are PEFT's own: A is (rank, in), B is (out, rank), vectors are flat.
Checkpoint tensors keep their file's dtype in Slots; Folded is float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Term:
    """One private low-rank term; its scalar c is already in B. For an embedding A is (rank, vocabulary)."""

    A: Tensor
    B: Tensor


@dataclass(frozen=True)
class SharedTerm:
    """A low-rank term whose matrices other tenants may share (VeRA): only d and e belong to the tenant.

    A is (rank, in_max) and B is (out_max, rank), at least as large as the layer; the layer uses the leading
    ``A[:, :in]`` and ``B[:out]``. d is (rank,), e is (out,).
    """

    A: Tensor
    B: Tensor
    d: Tensor
    e: Tensor


@dataclass(frozen=True)
class Kronecker:
    """S = kron(w1, w2), so that (x S^T)[l, o] = sum over p, q of w1[l, p] x[p, q] w2[o, q].

    w1 (l, p), w2 (o, q); with w2_b (r, q) the second matrix is w2 @ w2_b and w2 is (o, r).
    """

    w1: Tensor
    w2: Tensor
    w2_b: Tensor | None = None

    @property
    def inner(self) -> tuple[int, int]:
        """(o, q)"""
        return len(self.w2), (self.w2 if self.w2_b is None else self.w2_b).shape[1]


@dataclass(frozen=True)
class Sparse:
    """S (out, in) = ``shape`` with values (n,) at rows and columns, int64 (n,): in the order of rows, no place twice.

    ``rounded``: PEFT adds the values to W in W's own dtype, so that what it applies is round(W + value) - W.
    """

    rows: Tensor
    columns: Tensor
    values: Tensor
    shape: tuple[int, int]
    rounded: bool = False


@dataclass(frozen=True)
class Hadamard:
    """S = W o (B A), the base weight (out, in) times a low-rank matrix, element by element: of any rank itself.

    A is (rank, in), B is (out, rank); a scalar is already in B.
    """

    A: Tensor
    B: Tensor


@dataclass(frozen=True)
class BlockAffine:
    """S of W's square blocks: block (k, n), of outputs k and inputs n, of S is W_kn M_k + M_k.

    M (out / r, r, r): one matrix for each r outputs.
    """

    M: Tensor


@dataclass(frozen=True)
class Mix:
    """Output a and output a + group / 2 of each group of outputs are a pair: y * f1 + (-second, first) * f2.

    f1 and f2 are (out,), or with ``one_each`` (out / 2,), the same for both of a pair.
    """

    f1: Tensor
    f2: Tensor
    group: int
    one_each: bool = False


Structure = Kronecker | Sparse | Hadamard | BlockAffine | Mix


@dataclass(frozen=True)
class Tokens:
    """Rows that take the base's place for some tokens: of an embedding's output, or of an output head's weight.

    ids int64 (n,), ascending; rows (n, width). In Folded ids count from this rank's first token.
    """

    ids: Tensor
    rows: Tensor


@dataclass(frozen=True)
class FromWeight:
    """Terms and a bias that depend on the base weight W (out, in), which only the fold sees.

    ``finish(P, b0)`` returns them for the whole module, as (terms, bias or None). P is ``W @ right`` (out, k) or
    ``left @ W`` (k, in), float64 on the host and the same on all ranks. With neither operand P is W itself, in the
    base's dtype and place, and a module that ranks share is refused. b0 is the bias of the base layer, float64
    (out,) on the host, or None. ``right`` is (in, k), ``left`` is (k, out). ``cancels``: these
    terms nearly cancel each other or the module's own, so that their sum has to be formed before it is rounded.
    """

    finish: Callable[[Tensor, Tensor | None], tuple[tuple[Term, ...], Tensor | None]]
    right: Tensor | None = None
    left: Tensor | None = None
    cancels: bool = False


@dataclass(frozen=True)
class Slots:
    """The normal form of one module as a checkpoint gives it. None and () mean the identity."""

    terms: tuple[Term, ...] = ()
    shared: SharedTerm | None = None
    from_weight: FromWeight | None = None  # more terms and bias, once the base weight is known
    scale: Tensor | None = None  # s (out,): scales x R W, not the bias, not the terms
    magnitude: Tensor | None = None  # DoRA's m (out,): s = m / ||W + sum_k B_k A_k|| per row, and scales the terms too
    bias: Tensor | None = None  # (out,) added to the total bias
    base_bias: Tensor | None = None  # (out,) takes the base bias's place (PEFT's bias="all" and "<method>_only")
    base_weight: Tensor | None = None  # copy of the base weight in the file, as the base stores it; must equal the served one
    gain: Tensor | None = None  # (out,) scales everything, bias and terms included ((IA)3)
    input_scale: Tensor | None = None  # (in,): R = diag(input_scale)
    rotation: Tensor | None = None  # (in / b or 1, b, b) blocks of R; x_block @ block; a single block serves all
    structure: Structure | None = None
    tokens: Tokens | None = None  # own rows; of an embedding or output head that has nothing else but a norm
    norm: Tensor | None = None  # (in,): trained over base weight of the norm before the layer; the fold sets it


@dataclass(frozen=True)
class Folded:
    """What the kernels need of one module on this rank, in float32. None: nothing to apply.

    A (rank, in), B (out, rank), scale = s - 1 (out,), bias (out,) added after scaling (b - s * base bias),
    rotation = R - I as (in / b or 1, b, b) blocks, or (in,) for a diagonal R (input_scale - 1).
    ``shared`` keeps its matrices whole; its d and e are this rank's. A ``structure`` is this rank's, a Mix with f1 - 1.
    """

    A: Tensor | None = None
    B: Tensor | None = None
    scale: Tensor | None = None
    bias: Tensor | None = None
    rotation: Tensor | None = None
    shared: SharedTerm | None = None
    structure: Structure | None = None
    tokens: Tokens | None = None


@dataclass(frozen=True)
class Adapter:
    """A validated adapter, before it meets a base weight: method label and slots by HF module path.

    With ``invocation``, token ids, it applies to the rows of a request from their last occurrence in its prompt on.
    """

    method: str  # label shown to users: "LORA", "DORA", "IA3", "VERA", "OFT", ...
    modules: dict[str, Slots] = field(default_factory=dict)
    norms: dict[str, Tensor] = field(default_factory=dict)  # path of a norm -> its trained weight (width,)
    invocation: tuple[int, ...] = ()


@dataclass(frozen=True)
class Target:
    """One projection of the base model as this tensor-parallel rank holds it.

    ``path`` is the HF module path that checkpoints use (``model.layers.0.self_attn.q_proj``). ``inputs`` and
    ``outputs`` are this rank's half-open ranges of the full in/out features. ``module`` is the row of the
    device table; the projections of one fused SGLang layer have consecutive rows, in output order.
    ``kind`` is "column", "row", "replicated", "head" or "embedding".
    """

    path: str
    module: int
    kind: str
    in_features: int
    out_features: int
    inputs: tuple[int, int]
    outputs: tuple[int, int]
    weight: Callable[[], Tensor]  # this rank's (outputs, inputs) part, in the base dtype; not a copy
    bias: Callable[[], Tensor | None]  # this rank's (outputs,) part of the base bias that y already holds
    gated_by: str = ""  # for a gated MLP's down_proj: the path of the up_proj whose output it reads
    norm: str = ""  # path of the RMSNorm whose output it reads, and nothing else with it
    norm_weight: Callable[[], Tensor | None] = lambda: None  # (in,) whole, as the norm holds it


class BaseShape(dict[str, tuple[int, int]]):
    """HF module path -> (in_features, out_features) of every adaptable module, in the model's order.

    All that a reader may know of the base model; config.json is enough to build one. ``dtype`` is the base's
    torch dtype (PEFT rounds regenerated shared matrices to it), ``vocab_size`` its vocabulary. ``unlisted`` names
    a layer with a weight matrix that is not adaptable and so not listed; "" if there is none. ``counted`` gives every
    linear layer and embedding of Hugging Face's own model with its sizes, in that model's order, by which PEFT numbers
    modules; without it the shapes are taken to be those. ``norms``: path -> width of every norm that an adapter may have
    of its own, because only adaptable layers read it. ``tied``: whether the output head has the embedding's weight.
    """

    def __init__(
        self,
        shapes,
        *,
        dtype,
        vocab_size: int,
        unlisted: str = "",
        counted: Callable[[], dict[str, tuple[int, int]]] | None = None,
        norms: dict[str, int] | None = None,
        tied: bool = False,
    ):
        super().__init__(shapes)
        self.dtype, self.vocab_size, self.unlisted = dtype, vocab_size, unlisted
        self.counted = counted or (lambda: self)
        self.norms, self.tied = norms or {}, tied
