"""Tensor parallelism on one machine: as exact as one GPU, the same answers while adapters come and go, whole refusals.

    python benchmarks/tp_checks.py --tp 2 --out benchmarks/results
    python benchmarks/tp_checks.py --tp 2 --adapters every --out benchmarks/results
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

With --adapters every there are but the exactness rows, the difference and the refusals, in exactness_every_tpN.json and
tp_checks_every_tpN.json: of one adapter of each method, those refused that need a weight which no rank holds whole.

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

import every_method
import exactness
import judged
import record
import torch
import tp_engine
from engines import EngineProcess
from exactness import ASK_SECONDS
from peft_models import TINY, write_adapters, write_base
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tp_engine import Job, Request, agreeing, decoded, in_common

from scute_sgl.judge import Peft

SMALL = TINY | {"intermediate_size": 128}  # on CPU ranks SGLang pads widths that are no multiples of 64
LIMIT = 1.5
FLOAT32_DIFFERENCE = 1e-5
BROKEN = "base_model.model.model.layers.0.self_attn.q_proj."
BAD = {"overflow": "refused [bad_config]: model.layers.0.self_attn.q_proj B", "wrong_base": "refused [wrong_base]"}
NOT_WHOLE = "refused [unsupported_method]", "this method needs all of the base weight"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True, help="folder for the result files")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--steps", type=int, default=2000, help="decode steps of the storm")
    parser.add_argument("--disable-custom-all-reduce", action="store_true", help="all-reduce over NCCL alone")
    exactness.add_sizes(parser)
    args = parser.parse_args(argv)
    exactness.set_sizes(args, SMALL)
    os.environ["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "0"  # the first GPU serves more engines than the others
    if args.device == "cpu":
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    with tempfile.TemporaryDirectory(prefix="scute-tp-") as scratch:
        rows = Checks(args, Path(scratch)).run()
    return 0 if all(row["ok"] for row in rows) else 1


class Checks:
    def __init__(self, args, scratch: Path):
        self.args, self.scratch, self.base = args, scratch, scratch / "base"
        self.rows, self.exact, self.scales, self.errors = [], [], {}, {}
        self.has_graphs, self.every = args.device == "cuda", args.adapters == "every"
        self.chosen = exactness.choose(args)
        whole = every_method.recipes() if self.every else {}
        self.refused = {name: recipe for name, recipe in whole.items() if name not in self.chosen}

    def run(self) -> list[dict]:
        args = self.args
        write_base(self.base, args.config, getattr(torch, args.dtype), args.device)
        with ExitStack() as stack:
            sizes = (4, 8, tp_engine.WORKERS, (1 + len(self.chosen)) * args.rows)
            jobs = [self.job(1, sizes), self.job(args.tp, sizes), self.job(args.tp, ())]
            engines = [
                stack.enter_context(EngineProcess(tp_engine.start, job))
                for job in jobs[: 3 if self.has_graphs and not self.every else 2]
            ]
            one, many, eager = engines[0], engines[1], engines[-1]
            exact = Peft(self.base, torch.float32, args.device)
            everything = self.chosen | self.refused
            self.errors |= write_adapters(exact, everything, self.scratch, self.scales, args.prompt, args.new_tokens)
            del exact
            record.stage("adapters are written")
            folders = {name: self.scratch / name for name in self.chosen}
            for engine in engines:
                exactness.hold(engine, folders, self.errors)
            record.stage("engines hold them")
            self.paths = {name: folder for name, folder in folders.items() if name not in self.errors}
            self.folders = {name: str(folder) for name, folder in self.paths.items()}
            answers = [self.generate(one, 1), self.generate(many, args.tp)]
            self.differences(one, many, *answers)
            with ThreadPoolExecutor(1) as pool:  # the rest meanwhile
                judged = pool.submit(self.judge, answers)
                if not self.every:
                    self.storm(many, eager)
                self.refusals(many)
                judged.result()
            record.stage("done")
        return [*self.exact, *self.rows]

    def job(self, tp: int, graphs: tuple[int, ...]) -> Job:
        args = self.args
        # The tenants fit at once; beside the copies that a storm loads, some must leave.
        roomy = tp == 1 or self.every
        arena_mb = (64 if roomy else 2) if args.tiny else (2048 if roomy else 192)
        tokens = max(65536, 2 * (1 + len(self.chosen)) * args.rows * (args.prompt + args.new_tokens))
        return Job(self.base, args.dtype, args.device, tp, graphs, arena_mb, tokens, not args.disable_custom_all_reduce)

    def file(self, kind: str) -> Path:
        return self.args.out / f"{kind}{'_every' if self.every else ''}_tp{self.args.tp}.json"

    # Exactness

    def generate(self, engine: EngineProcess, tp: int) -> dict:
        answers, wrong = exactness.answer(engine, [*self.folders, None], self.paths, self.chosen, self.args)
        record.stage(f"tp {tp} has answered")
        if wrong:
            self.add({"check": "batch", "of_tp": tp, "wrong": wrong, "ok": False})
        return answers

    def judge(self, answers: list[dict]) -> None:
        args = self.args
        figures = judged.judge(answers, self.base, self.paths, getattr(torch, args.dtype), self.errors, args)
        for tp, found in zip((1, args.tp), figures, strict=True):
            of_tp = argparse.Namespace(**vars(args) | {"tp": tp})
            self.exact += judged.rows_of("scute", args.dtype, self.chosen, found, self.errors, self.scales, of_tp)
        record.save(self.file("exactness"), self.exact, limits=judged.LIMITS, base=args.config)
        print("\n".join(map(judged.line, self.exact)), flush=True)

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
        names = [*self.folders, None]
        asked = [Request(name, name, [7, 8, 9, 10 + i], [0] * 24, []) for i, name in enumerate(names * 2)]
        calm = engine.ask(tp_engine.answer, asked, seconds=ASK_SECONDS)
        before = engine.ask(tp_engine.state, seconds=ASK_SECONDS)["tenants"]
        for name, reasons in self.bad_adapters().items():
            loaded, error, seconds = engine.ask(tp_engine.try_load, name, str(self.scratch / name), seconds=ASK_SECONDS)
            whole = engine.ask(tp_engine.state, seconds=ASK_SECONDS)["tenants"] == before
            says = all(reason in error for reason in reasons)
            row = {"check": "refusal", "adapter": name, "refused": not loaded, "error": error}
            self.add(row | {"seconds": round(seconds, 2), "ok": not loaded and says and whole})
        self.compare_answers("after refusals", calm, engine.ask(tp_engine.answer, asked, seconds=ASK_SECONDS))

    def bad_adapters(self) -> dict[str, tuple[str, ...]]:
        """Adapters that must be refused, and what is to be said."""
        if self.every:
            return dict.fromkeys(self.refused, NOT_WHOLE)
        for name in BAD:
            write_bad(self.scratch / name, name, self.scratch / "lora_r8", self.base)
        return {name: (reason, f"(on tensor-parallel rank {self.args.tp - 1})") for name, reason in BAD.items()}

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
            row = {"check": check, "to": to, "method": self.chosen[name].method if name else "base", "adapter": name}
            row |= {"dtype": self.args.dtype, "tp": self.args.tp, "values": len(gap)} | (more or {}).get(name, {})
            row |= {"mean": gap.mean().item(), "max": gap.max().item(), "bit_equal": not gap.any()}
            row |= {"base_mean": base.mean().item(), "base_max": base.max().item()}
            within = max(LIMIT * row["base_mean"], FLOAT32_DIFFERENCE if self.args.dtype == "float32" else 0.0)
            self.add(row | {"ok": row["mean"] <= within})

    def add(self, row: dict) -> None:
        self.rows.append(row)
        record.save(self.file("tp_checks"), self.rows, limit=LIMIT)
        texts = {key: f"{value:.3g}" if isinstance(value, float) else value for key, value in row.items()}
        print(" ".join(f"{key}={text}" for key, text in texts.items()), flush=True)


def write_bad(folder: Path, kind: str, good: Path, base: Path) -> None:
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


if __name__ == "__mp_main__" and os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    tp_engine.let_cpu_ranks_talk()

if __name__ == "__main__":
    raise SystemExit(main())
