"""What an adapter of every served method occupies, in float16, beside a LoRA of rank 64: for one 4096 x 4096 projection,
the norm before it, or 16 tokens.

    python benchmarks/own_bytes.py --out benchmarks/results/own_bytes.json

PEFT writes one adapter of each method with its own default config, on the CPU. It is read, folded and packed as in
serving, then put into an arena; the bytes are what the arena says that it holds. ``file`` is the checkpoint's own
tensors in float16, without those that a method shares among adapters: served bytes are at most 1.1 times that, or the
method is among FAT, with its reason.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import peft
import record
import torch
from safetensors.torch import load_file

from scute_sgl import image
from scute_sgl.checkpoint import read_adapter
from scute_sgl.fold import fold_adapter
from scute_sgl.pool import Pool
from scute_sgl.slots import BaseShape, Target

SIDE, ARENA, VOCABULARY = 4096, 1 << 29, 64
PATH, NORM = "model.layers.0.self_attn.q_proj", "model.layers.0.input_layernorm"
EMBED = "model.embed_tokens"
# of a checkpoint, kept once for all adapters or multiplied into each
SHARED = ("vera_A", "vera_B", "pvera_A", "pvera_B", "randlora_A", "randlora_B")
LORA64 = peft.LoraConfig(r=64)
DEFAULTS = {
    "LORA": peft.LoraConfig(),
    "DORA": peft.LoraConfig(use_dora=True),
    "ALORA": peft.LoraConfig(task_type="CAUSAL_LM", alora_invocation_tokens=[0]),
    "PISSA": peft.LoraConfig(init_lora_weights="pissa"),
    "OLORA": peft.LoraConfig(init_lora_weights="olora"),
    "KASA": peft.LoraConfig(kasa_config=peft.KasaConfig()),
    "IA3": peft.IA3Config(feedforward_modules=[]),
    "LN_TUNING": peft.LNTuningConfig(),
    "VERA": peft.VeraConfig(),
    "PVERA": peft.PveraConfig(),
    "FOURIERFT": peft.FourierFTConfig(),
    "WAVEFT": peft.WaveFTConfig(),
    "OFT": peft.OFTConfig(),
    "HRA": peft.HRAConfig(),
    "DEFT": peft.DeftConfig(),
    "PEANUT": peft.PeanutConfig(),
    "GLORA": peft.GloraConfig(),
    "ADAMSS": peft.AdamssConfig(),
    "OSF": peft.OSFConfig(),
    "ADALORA": peft.AdaLoraConfig(total_step=1),
    "BEFT": peft.BeftConfig(),
    "BOFT": peft.BOFTConfig(),
    "DELORA": peft.DeloraConfig(),
    "GRALORA": peft.GraloraConfig(),
    "HIRA": peft.HiraConfig(),
    "LOHA": peft.LoHaConfig(),
    "LOKR": peft.LoKrConfig(),
    "MISS": peft.MissConfig(),
    "POLY": peft.PolyConfig(n_tasks=1),
    "RANDLORA": peft.RandLoraConfig(),
    "ROAD": peft.RoadConfig(),
    "SHIRA": peft.ShiraConfig(),
    "SUPERTUNING": peft.SupertuningConfig(),
    "TINYLORA": peft.TinyLoraConfig(),
    "TRAINABLE_TOKENS": peft.TrainableTokensConfig(token_indices=list(range(16))),
    "UNILORA": peft.UniLoraConfig(),
    "VBLORA": peft.VBLoRAConfig(),
}
FAT = {
    "PISSA": "the term taken away from W has A and B of its own",
    "OLORA": "the term taken away from W has A and B of its own",
    "KASA": "the term taken away from W has A and B of its own",
    "FOURIERFT": "vectors as long as the shared waves",
    "WAVEFT": "four values and their places for each number",
    "OFT": "blocks are stored whole, the file has a triangle of each",
    "HRA": "B is U times W",
    "ADALORA": "12 ranks take the room of 16",
    "OSF": "the low part of W is a term too",
    "GRALORA": "blocks of A and B with zeros between them",
    "LOHA": "a product of two low-rank matrices has rank r^2",
    "MISS": "A is a sum over inputs, which the file leaves out",
    "RANDLORA": "A and B have the weight's whole rank, with the shared matrices multiplied in",
    "TINYLORA": "A and B are folded from a few numbers",
    "UNILORA": "A and B are drawn from one vector",
}


class Base(torch.nn.Module):
    """A base model of one layer, the norm before it and an embedding."""

    prepare_inputs_for_generation = None  # PEFT looks for it where the task is CAUSAL_LM

    def __init__(self, weight: torch.Tensor):
        super().__init__()
        names = PATH.split(".")
        inner = self
        for name in names[:-1]:
            inner.add_module(name, torch.nn.Module())
            inner = inner.get_submodule(name)
        layer = torch.nn.Linear(SIDE, SIDE, bias=False)
        layer.weight.data = weight.clone()
        inner.add_module(names[-1], layer)
        self.get_submodule(NORM.rpartition(".")[0]).add_module(NORM.rpartition(".")[2], torch.nn.RMSNorm(SIDE))
        self.model.add_module("embed_tokens", torch.nn.Embedding(VOCABULARY, SIDE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.get_submodule(PATH)(self.get_submodule(NORM)(x))


def measure(config: peft.PeftConfig, weight: torch.Tensor, folder: Path) -> dict:
    """Bytes in the arena of one adapter, of its shared matrices, and of its own tensors in the file."""
    config.target_modules = [{"LN_TUNING": NORM, "TRAINABLE_TOKENS": EMBED}.get(config.peft_type, PATH)]
    torch.manual_seed(0)
    peft.get_peft_model(Base(weight), config).save_pretrained(folder)
    sizes = {PATH: (SIDE, SIDE), EMBED: (VOCABULARY, SIDE)}
    shapes = BaseShape(sizes, dtype=torch.float16, vocab_size=VOCABULARY, norms={NORM: SIDE})
    whole = (0, SIDE)
    target = Target(
        PATH, 0, "column", SIDE, SIDE, whole, whole, weight=lambda: weight, bias=lambda: None,
        norm=NORM, norm_weight=lambda: torch.ones(SIDE),
    )  # fmt: skip
    rows = {"in_features": VOCABULARY, "inputs": (0, VOCABULARY)}
    tokens = replace(target, path=EMBED, module=1, kind="embedding", norm="", **rows)
    packed = image.pack(fold_adapter(read_adapter(folder, shapes), {PATH: target, EMBED: tokens}), torch.float16)
    pool = Pool(ARENA, 1, 2, "cpu", torch.float16)
    pool.register("adapter", packed)
    pool.ensure(["adapter"])
    stats = pool.stats()
    tensors = load_file(folder / "adapter_model.safetensors")
    own = sum(t.numel() * 2 for name, t in tensors.items() if not name.endswith(SHARED))
    return {"bytes": stats["used"] - stats["shared_bytes"], "shared": stats["shared_bytes"], "file": own}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--methods", nargs="+", choices=DEFAULTS, default=list(DEFAULTS), metavar="METHOD")
    args = parser.parse_args(argv)
    weight = torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(0)) * 0.02
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        lora64 = measure(LORA64, weight, Path(scratch, "lora64"))["bytes"]
        for method in args.methods:
            try:
                row = {"method": method} | measure(DEFAULTS[method], weight, Path(scratch, method)) | {"refused": None}
                row |= {"of_lora64": round(row["bytes"] / lora64, 4), "fat": FAT.get(method)}
            except Exception as error:  # noqa: BLE001 - a refusal is a result too
                row = {"method": method, "refused": f"{type(error).__name__}: {error}"}
            rows.append(row)
            print(row, flush=True)
            record.save(args.out, rows, lora64=lora64)
    unexplained = [r["method"] for r in rows if not r["refused"] and r["bytes"] > 1.1 * r["file"] + 256 and not r["fat"]]
    print("larger than 1.1 times the file, without a reason:", unexplained or "none")
    return bool(unexplained)


if __name__ == "__main__":
    raise SystemExit(main())
