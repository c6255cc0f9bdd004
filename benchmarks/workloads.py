"""What the decode benchmark runs: model shapes, tenants and the workloads of the results table, by name.

A tenant is named after its kind and number ("lora16_3"); tenants of a kind have equal weights, each a copy of its own.
A workload is a batch size and the tenants that its rows use in turn. Comparisons divide one workload by another of the
same backend instead of by the base model's step.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest


@dataclass(frozen=True)
class Shape:
    """Layers of a Llama-like model; ``linears`` maps a projection's name to (inputs, outputs)."""

    layers: int
    linears: dict[str, tuple[int, int]]
    groups: tuple[tuple[str, ...], ...] = (
        ("q_proj", "k_proj", "v_proj"),
        ("o_proj",),
        ("gate_proj", "up_proj"),
        ("down_proj",),
    )  # the fused layers: one input each, one launch of each op


def llama_shape(layers: int, hidden: int, key_value: int, intermediate: int) -> Shape:
    return Shape(
        layers,
        {
            "q_proj": (hidden, hidden),
            "k_proj": (hidden, key_value),
            "v_proj": (hidden, key_value),
            "o_proj": (hidden, hidden),
            "gate_proj": (hidden, intermediate),
            "up_proj": (hidden, intermediate),
            "down_proj": (intermediate, hidden),
        },
    )


LLAMA_8B = llama_shape(layers=32, hidden=4096, key_value=1024, intermediate=14336)

LLAMA_8B_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "torch_dtype": "float16",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_bias": False,
    "mlp_bias": False,
    "initializer_range": 0.02,
}


@dataclass(frozen=True)
class Kind:
    """A method and its one size: the rank, OFT's block size, or 0 for (IA)3."""

    method: str
    size: int = 0

    def names(self, count: int) -> list[str]:
        return [f"{self.method}{self.size or ''}_{number}" for number in range(count)]


LORA8, LORA16, LORA32, LORA64, LORA256 = (Kind("lora", rank) for rank in (8, 16, 32, 64, 256))
DORA16, IA3, VERA256, OFT32 = Kind("dora", 16), Kind("ia3"), Kind("vera", 256), Kind("oft", 32)


@dataclass(frozen=True)
class Workload:
    """``target`` and ``stretch`` are ratios to the base's step; ``best`` is SGLang's best on the same card."""

    bs: int
    tenants: tuple[tuple[Kind, int], ...] = ()
    target: float | None = None
    stretch: float | None = None
    best: float | None = None
    stock: tuple[str, ...] = ("csgmv", "triton", "triton_experimental")  # of SGLang's own backends, if they can run it

    def names(self) -> list[str]:
        """Its tenants, methods taking turns, so that neighbouring rows of a mixed batch differ in kind."""
        turns = zip_longest(*(kind.names(count) for kind, count in self.tenants))
        return [name for turn in turns for name in turn if name]

    def rows(self) -> list[str | None]:
        names = self.names()
        return [names[row % len(names)] for row in range(self.bs)] if names else [None] * self.bs

    def stock_rank(self) -> int | None:
        """The maximum rank that SGLang's own backends need for this; None where none of them is measured."""
        if not self.stock or any(kind.method != "lora" for kind, _ in self.tenants):
            return None
        return max((kind.size for kind, _ in self.tenants), default=16)


WORKLOADS = {
    "lora_r16x16_bs16": Workload(16, ((LORA16, 16),), 1.12, 1.06, 1.32),
    "lora_r16x16_bs64": Workload(64, ((LORA16, 16),), 1.11, 1.06, 1.34),
    "lora_r64x20_bs20": Workload(20, ((LORA64, 20),), 1.40, 1.30, 2.20),
    "lora_r64x20_bs64": Workload(64, ((LORA64, 20),), 1.36, 1.27, 2.24),
    "lora_r16x64_bs64": Workload(64, ((LORA16, 64),), 1.29, 1.22),
    "lora_r16x1_bs64": Workload(64, ((LORA16, 1),), 1.05, 1.03, 1.68),
    "lora_r16x1_bs1": Workload(1, ((LORA16, 1),), 1.10, 1.06, 1.73),
    "lora_r16x20_bs20": Workload(20, ((LORA16, 20),), best=1.38),
    "dora_r16x16_bs16": Workload(16, ((DORA16, 16),)),
    "ia3x16_bs16": Workload(16, ((IA3, 16),), 1.04, 1.02),
    "vera_r256x16_bs16": Workload(16, ((VERA256, 16),), 1.12, 1.06),
    "vera_r256x1_bs16": Workload(16, ((VERA256, 1),)),
    "oftx16_bs16": Workload(16, ((OFT32, 16),), 1.20, 1.12),
    "mix5x20_bs20": Workload(20, tuple((kind, 4) for kind in (LORA16, DORA16, IA3, VERA256, OFT32)), 1.20, 1.12),
    "mix4x16_bs16": Workload(16, tuple((kind, 4) for kind in (LORA16, DORA16, IA3, OFT32))),
    "none_bs16": Workload(16, (), 1.005, 1.0, 1.15),
    "none_bs64": Workload(64, (), 1.005, 1.0, 1.24),
    # the fit of a fixed cost and a bandwidth over ranks, and own-size storage in a batch of mixed ranks
    "lora_r8x16_bs16": Workload(16, ((LORA8, 16),), stock=()),
    "lora_r32x16_bs16": Workload(16, ((LORA32, 16),), stock=()),
    "lora_r64x16_bs16": Workload(16, ((LORA64, 16),)),
    "lora_r8x15_r256x1_bs16": Workload(16, ((LORA8, 15), (LORA256, 1)), stock=()),
    # the five-method mix converted to plain LoRA, VeRA at its own rank (on SGLang's best: 21 slots of rank 256 are 28 GB);
    # all at rank 64 is lora_r64x20_bs20
    "lora_r64x16_r256x4_bs20": Workload(20, ((LORA64, 16), (LORA256, 4)), stock=("triton_experimental",)),
}


@dataclass(frozen=True)
class Comparison:
    workload: str
    reference: str
    target: float | None = None
    stretch: float | None = None


COMPARISONS = {
    "dora_vs_lora": Comparison("dora_r16x16_bs16", "lora_r16x16_bs16", 1.01, 1.002),
    "vera_growth": Comparison("vera_r256x16_bs16", "vera_r256x1_bs16", 1.02, 1.01),
    "mix5_vs_lora": Comparison("mix5x20_bs20", "lora_r16x20_bs20", 1.10, 1.05),
    "mix4_vs_lora": Comparison("mix4x16_bs16", "lora_r16x16_bs16", 1.05, 1.03),
    "mix5_as_r64_vs_mix5": Comparison("lora_r64x20_bs20", "mix5x20_bs20"),
    "mix5_as_r64_r256_vs_mix5": Comparison("lora_r64x16_r256x4_bs20", "mix5x20_bs20"),
}
