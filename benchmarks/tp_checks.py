"""Tensor parallelism on one machine: as exact as one GPU, the same answers while adapters come and go, whole refusals.

    python benchmarks/tp_checks.py --tp 2 --out benchmarks/results
    python benchmarks/tp_checks.py --tp 2 --tiny --device cpu --dtype float32 --out /tmp/tp       # to try it

Three engines serve the base and the nine adapters of exactness.py side by side: on one GPU, on --tp GPUs, and on --tp
GPUs without CUDA graphs (the CPU has none; there the second also stands for the third). Those on several compare their
ranks' slot tables, batches and decisions before every pass.

exactness_tpN.json   the rows of exactness.py for tp 1 and N
tp_checks_tpN.json   difference: log-probabilities of tp N against those of tp 1, beside the base rows' own, on the same
                       tokens ("prefill") and as far as the sampled answers agree ("decode")
                     storm: --steps decode steps with other tenants in nearly every one, loads and unloads in between
                     answers: each tenant's answers in that storm against the engine without graphs, beside the base's
                     refusal: adapters that only the last rank's part makes bad; afterwards all answer as before

A difference is ok if its mean is at most 1.5 times that of the base's rows, the limit that exactness.py has for errors.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import exactness
import record
import torch
import tp_engine
from engines import EngineProcess
from peft_models import LLAMA_1B, TINY, recipes, write_adapters, write_base
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tp_engine import Job, Request

from scute_sgl.judge import load_base

SMALL = TINY | {"intermediate_size": 128}  # on CPU ranks SGLang pads widths that are no multiples of 64
LIMIT = 1.5
FLOAT32_DIFFERENCE = 1e-5
ASK_SECONDS = 150  # without an answer for so long, something hangs
BROKEN = "base_model.model.model.layers.0.self_attn.q_proj."
BAD = {"overflow": "refused [bad_config]: model.layers.0.self_attn.q_proj B", "wrong_base": "refused [wrong_base]"}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True, help="folder for the result files")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="two small layers and few tokens, to try the script")
    parser.add_argument("--steps", type=int, default=2000, help="decode steps of the storm")
    parser.add_argument("--rows", type=int, help="rows of the exactness batch for each adapter and for the base")
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new-tokens", type=int)
    parser.add_argument("--disable-custom-all-reduce", action="store_true", help="all-reduce over NCCL alone")
    args = parser.parse_args(argv)
    args.config = SMALL if args.tiny else LLAMA_1B
    args.rows = args.rows or (2 if args.tiny else 8)
    args.new_tokens = args.new_tokens or (16 if args.tiny else 256)
    os.environ["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "0"  # the first GPU serves more engines than the others
    if args.device == "cpu":
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    with tempfile.TemporaryDirectory(prefix="scute-tp-") as scratch:
        rows = Checks(args, Path(scratch)).run()
    return 0 if all(row["ok"] for row in rows) else 1


class Checks:
    def __init__(self, args, scratch: Path):
        self.args, self.scratch, self.base = args, scratch, scratch / "base"
        self.rows, self.exact = [], []
        self.has_graphs, self.began = args.device == "cuda", time.perf_counter()

    def run(self) -> list[dict]:
        args = self.args
        write_base(self.base, args.config, getattr(torch, args.dtype), args.device)
        with ExitStack() as stack:
            sizes = (4, 8, tp_engine.WORKERS, (1 + len(recipes())) * args.rows)
            jobs = [self.job(1, sizes), self.job(args.tp, sizes), self.job(args.tp, ())]
            engines = [
                stack.enter_context(EngineProcess(tp_engine.start, job)) for job in jobs[: 3 if self.has_graphs else 2]
            ]
            one, many, eager = engines[0], engines[1], engines[-1]
            exact = load_base(self.base, torch.float32, args.device)
            self.scales = write_adapters(exact, self.scratch, exactness.EFFECTS, exactness.TOP, args.device)
            del exact
            self.folders = {name: str(self.scratch / name) for name in recipes()}
            self.log("adapters are written")
            for engine in engines:
                engine.ask(tp_engine.load, self.folders)  # waits for the start
            self.log("engines hold them")
            answers = self.generate(one, 1), self.generate(many, args.tp)
            self.differences(one, many, *answers)
            with ThreadPoolExecutor(1) as pool:  # the storm meanwhile
                judged = pool.submit(lambda: [self.judge(*pair) for pair in zip((1, args.tp), answers, strict=True)])
                self.storm(many, eager)
                self.refusals(many)
                judged.result()
            self.log("done")
        return [*self.exact, *self.rows]

    def job(self, tp: int, graphs: tuple[int, ...]) -> Job:
        args = self.args
        # The tenants fit at once; beside the copies that a storm loads, some must leave.
        arena_mb = (2 if args.tiny else 192) if tp > 1 else 1024
        return Job(self.base, args.dtype, args.device, tp, graphs, arena_mb, not args.disable_custom_all_reduce)

    # Exactness

    def generate(self, engine: EngineProcess, tp: int) -> dict:
        answers = engine.ask(exactness.generate, [*recipes(), None], self.args, seconds=ASK_SECONDS)
        exactness.check_one_batch(engine.ask(tp_engine.state, seconds=ASK_SECONDS))
        self.log(f"tp {tp} has answered")
        return answers

    def judge(self, tp: int, answers: dict) -> None:
        args = argparse.Namespace(**vars(self.args) | {"tp": tp})
        folders = {name: self.scratch / name for name in recipes()}
        figures = exactness.judge(answers, self.base, folders, getattr(torch, args.dtype), args)
        self.exact += exactness.rows_of("scute", args.dtype, figures, self.scales, args)
        file = args.out / f"exactness_tp{self.args.tp}.json"
        record.save(file, self.exact, limits=exactness.LIMITS, base=args.config)
        print("\n".join(map(exactness.line, self.exact[-len(figures) :])), flush=True)

    def differences(self, one: EngineProcess, many: EngineProcess, of_one: dict, of_many: dict) -> None:
        names = [name for name in of_one for _ in range(self.args.rows)]
        ids = torch.cat([answers.ids for answers in of_one.values()]).tolist()
        scored = [
            engine.ask(tp_engine.score, ids, names, self.args.prompt, seconds=ASK_SECONDS) for engine in (one, many)
        ]
        pairs = {name: [] for name in of_one}
        for name, left, right in zip(names, *scored, strict=True):
            pairs[name] += in_common(left, right)
        self.compare("difference", "prefill", pairs)
        sampled = {name: [] for name in of_one}
        for name in of_one:
            for left, right in zip(decoded(of_one[name]), decoded(of_many[name]), strict=True):
                same = agreeing([next(iter(likeliest)) for likeliest in left], [next(iter(r)) for r in right])
                sampled[name] += in_common(left[: same + 1], right[: same + 1])  # they part after a common context
        self.compare("difference", "decode", sampled)

    # Replays while adapters come and go

    def storm(self, many: EngineProcess, eager: EngineProcess) -> None:
        args = self.args
        begun = time.perf_counter()
        arguments = (self.folders, args.steps, 3, args.config["vocab_size"])
        requests, counts = many.ask(tp_engine.storm, *arguments, seconds=ASK_SECONDS + args.steps / 20)
        counted = counts["replays"] if self.has_graphs else counts["forwards"]
        ok = counted >= args.steps and counts["rank_checks"] == counts["forwards"] and counts["unloads"] > 0
        self.add({"check": "storm", **counts, "seconds": round(time.perf_counter() - begun, 1), "ok": ok})
        calm = eager.ask(tp_engine.answer, requests, seconds=ASK_SECONDS)
        self.compare_answers("eager", requests, calm)

    # Refusals

    def refusals(self, engine: EngineProcess) -> None:
        asked = [Request(name, name, [7, 8, 9, 10 + i], [0] * 24, []) for i, name in enumerate([*recipes(), None] * 2)]
        calm = engine.ask(tp_engine.answer, asked, seconds=ASK_SECONDS)
        before = engine.ask(tp_engine.state, seconds=ASK_SECONDS)["tenants"]
        for name, reason in BAD.items():
            folder = write_bad(self.scratch / name, name, self.scratch / "lora_r8", self.base)
            loaded, error, seconds = engine.ask(tp_engine.try_load, name, str(folder), seconds=ASK_SECONDS)
            whole = engine.ask(tp_engine.state, seconds=ASK_SECONDS)["tenants"] == before
            says = reason in error and f"(on tensor-parallel rank {self.args.tp - 1})" in error
            row = {"check": "refusal", "adapter": name, "refused": not loaded, "error": error}
            self.add(row | {"seconds": round(seconds, 2), "ok": not loaded and says and whole})
        self.compare_answers("after refusals", calm, engine.ask(tp_engine.answer, asked, seconds=ASK_SECONDS))

    # Comparisons

    def compare_answers(self, to: str, answers: list[Request], others: list[Request]) -> None:
        pairs, equal = {}, {}
        for left, right in zip(answers, others, strict=True):
            same = agreeing(left.tokens, right.tokens)
            pairs.setdefault(left.adapter, []).extend(zip(left.logprobs[:same], right.logprobs[:same], strict=True))
            equal.setdefault(left.adapter, []).append(left.tokens == right.tokens)
        shares = {name: {"equal_answers": round(sum(found) / len(found), 4)} for name, found in equal.items()}
        self.compare("answers", to, pairs, shares)

    def compare(self, check: str, to: str, pairs: dict[str | None, list], more: dict | None = None) -> None:
        """A row for every adapter from pairs of log-probabilities that should be equal, judged beside the base's."""
        found = {name: torch.tensor(values, dtype=torch.float64) for name, values in pairs.items()}
        gaps = {name: (values[:, 0] - values[:, 1]).abs() for name, values in found.items()}
        base = gaps[None]
        for name, gap in gaps.items():
            row = {"check": check, "to": to, "method": recipes()[name].method if name else "base", "adapter": name}
            row |= {"dtype": self.args.dtype, "tp": self.args.tp, "values": len(gap)} | (more or {}).get(name, {})
            row |= {"mean": gap.mean().item(), "max": gap.max().item(), "bit_equal": not gap.any()}
            row |= {"base_mean": base.mean().item(), "base_max": base.max().item()}
            within = max(LIMIT * row["base_mean"], FLOAT32_DIFFERENCE if self.args.dtype == "float32" else 0.0)
            self.add(row | {"ok": row["mean"] <= within})

    def add(self, row: dict) -> None:
        self.rows.append(row)
        record.save(self.args.out / f"tp_checks_tp{self.args.tp}.json", self.rows, limit=LIMIT)
        texts = {key: f"{value:.3g}" if isinstance(value, float) else value for key, value in row.items()}
        print(" ".join(f"{key}={text}" for key, text in texts.items()), flush=True)

    def log(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.began:5.0f} s] {text}", flush=True)


def agreeing(left: list[int], right: list[int]) -> int:
    """Length of the common beginning."""
    return next((i for i, (a, b) in enumerate(zip(left, right)) if a != b), min(len(left), len(right)))


def in_common(left: list[dict[int, float]], right: list[dict[int, float]]) -> list[tuple[float, float]]:
    """Log-probabilities of every token that both have at a position."""
    return [(a[token], b[token]) for a, b in zip(left, right) for token in a.keys() & b.keys()]


def decoded(answers: exactness.Answers) -> list[list[dict[int, float]]]:
    """Rows of positions of log-probabilities by token, the chosen one first."""
    rows = zip(answers.tokens.tolist(), answers.served.tolist(), strict=True)
    return [[dict(zip(*position, strict=True)) for position in zip(*row, strict=True)] for row in rows]


def write_bad(folder: Path, kind: str, good: Path, base: Path) -> Path:
    """A copy of a LoRA adapter that is bad in its last outputs alone, which the last rank holds."""
    shutil.copytree(good, folder)
    tensors = load_file(good / "adapter_model.safetensors")
    if kind == "overflow":
        B = tensors[BROKEN + "lora_B.weight"].double()
        B[-1] = 1e39  # beyond float32 too
        tensors[BROKEN + "lora_B.weight"] = B
    else:
        with safe_open(base / "model.safetensors", "pt") as file:
            weight = file.get_tensor("model.layers.0.self_attn.q_proj.weight")
        weight[-1] += 1
        tensors[BROKEN + "base_layer.weight"] = weight
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


if __name__ == "__mp_main__" and os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    tp_engine.let_cpu_ranks_talk()

if __name__ == "__main__":
    raise SystemExit(main())
