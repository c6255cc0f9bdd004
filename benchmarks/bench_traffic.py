"""SGLang's own serving benchmark against a server with 20 tenants of five methods.

Starts ``python -m sglang.launch_server --lora-backend scute`` on a Llama-3.1-8B shape (dummy weights), loads four
adapters of each method over HTTP, and runs ``python -m sglang.bench_serving --lora-name ...`` for every distribution
of requests over tenants. A request that fails makes the run fail. Each stage says how long it took, and one that
takes longer than its limit ends the run with the server's last words; the first server start on a machine is the
longest, because SGLang's triton kernels are compiled then.

    python benchmarks/bench_traffic.py --out benchmarks/results/traffic_h200.json
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from adapters import write_adapter
from record import save
from serving import TINY_CONFIG, TINY_SHAPE, say, smaller, stage, write_model
from workloads import LLAMA_8B, LLAMA_8B_CONFIG, WORKLOADS, Kind

from scute_sgl.demo import Server

REPORTED = ("completed", "request_throughput", "output_throughput", "median_ttft_ms", "p99_ttft_ms")
REPORTED += ("median_tpot_ms", "p99_tpot_ms", "median_e2e_latency_ms")
START_SECONDS, LOAD_SECONDS, RUN_SECONDS = 170, 30, 60


def tenants(tiny: bool) -> dict[str, Kind]:
    kinds = WORKLOADS["mix5x20_bs20"].tenants
    return {name: smaller(kind) if tiny else kind for kind, count in kinds for name in kind.names(count)}


def load(server: Server, name: str, written: Future) -> None:
    """Load an adapter once it is written, and delete its files."""
    with stage(f"adapter {name} loaded", LOAD_SECONDS):
        path = written.result()
        server.post("/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
        shutil.rmtree(path)


def drive(port: int, model: Path, names: list[str], distribution: str, args) -> dict:
    """One run of sglang.bench_serving; its summary.

    It draws the same prompts every time: without --flush-cache later runs would find some of them in the cache. As
    token ids they have the same length in the server as here. Its warm-up fills a batch.
    """
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as output, stage(f"run {distribution}", RUN_SECONDS):
        command = [sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang", "--host", "127.0.0.1"]
        command += ["--port", str(port), "--model", str(model), "--tokenizer", str(model)]
        command += ["--dataset-name", "random-ids", "--random-range-ratio", "1.0", "--num-prompts", str(args.prompts)]
        command += ["--random-input-len", str(args.input), "--random-output-len", str(args.output), "--tokenize-prompt"]
        command += ["--max-concurrency", str(args.concurrency), "--warmup-requests", str(args.concurrency)]
        command += ["--flush-cache", "--output-file", output.name, "--disable-tqdm"]
        if names:
            command += ["--lora-name", *names, "--lora-request-distribution", distribution]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = Path(output.name).read_text().splitlines()
    if done.returncode or not lines:
        raise RuntimeError(f"bench_serving failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    summary = json.loads(lines[-1])
    want = (args.prompts, args.prompts * args.input, args.prompts * args.output)
    have = tuple(summary[name] for name in ("completed", "total_input_tokens", "total_output_tokens"))
    if have != want:
        raise RuntimeError(f"{have} requests, input tokens and output tokens; want {want}")
    row = {"distribution": distribution, "tenants": len(names)} | {name: summary[name] for name in REPORTED}
    say("  ".join(f"{key} {value:.5g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()))
    return row


def measure(server: Server, model: Path, written: dict[str, Future], args) -> None:
    for name, future in written.items():
        load(server, name, future)
    rows = []
    for distribution in ("base only", "uniform", "distinct", "skewed"):
        names = [] if distribution == "base only" else list(written)
        rows.append(drive(server.port, model, names, distribution, args))
        state = server.scute_state()
        most = {f"most_{what}_in_forward": state[f"max_{what}_in_forward"] for what in ("tenants", "methods")}
        save(args.out, rows, **most, pool=state["pool"])
    say("  ".join(f"{what} {count}" for what, count in most.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--input", type=int, default=256)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--concurrency", type=int, default=20)
    parser.add_argument("--tiny", action="store_true", help="a two-layer model on the CPU, to try the script")
    args = parser.parse_args()
    config, shape, device = LLAMA_8B_CONFIG, LLAMA_8B, "cuda"
    flags = ["--dtype", "float16", "--attention-backend", "triton", "--sampling-backend", "pytorch"]
    flags += ["--mem-fraction-static", "0.7", "--max-total-tokens", "65536"]
    flags += ["--cuda-graph-bs-decode", "1", "4", "8", "16", str(args.concurrency)]
    if args.tiny:
        config, shape, device = TINY_CONFIG, TINY_SHAPE, "cpu"
        flags = ["--device", "cpu", "--dtype", "float32"]
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(1) as writer:
        model, log = Path(scratch, "model"), Path(scratch, "server.log")
        write_model(model, config)
        written = {
            name: writer.submit(write_adapter, Path(scratch), kind, name, shape, device)
            for name, kind in tenants(args.tiny).items()
        }  # while the server starts
        flags += ["--load-format", "dummy", "--grammar-backend", "none"]
        say("server starting")
        with Server(model, log, flags, START_SECONDS) as server:
            say("server ready")
            try:
                measure(server, model, written, args)
            except BaseException:
                say("the end of the server's log:\n" + log.read_text(errors="replace")[-4000:])
                raise


if __name__ == "__main__":
    main()
