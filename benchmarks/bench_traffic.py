"""SGLang's own serving benchmark against a server with 20 tenants of five methods.

Starts ``python -m sglang.launch_server --lora-backend scute`` on a Llama-3.1-8B shape (dummy weights), loads four
adapters of each method over HTTP, and runs ``python -m sglang.bench_serving --lora-name ...`` for every distribution
of requests over tenants. A request that fails makes the run fail.

    python benchmarks/bench_traffic.py --out benchmarks/results/traffic_h200.json
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from adapters import write_adapter
from record import save
from workloads import LLAMA_8B, LLAMA_8B_CONFIG, WORKLOADS, Kind, Shape, llama_shape

from scute_sgl.demo import Server

TINY_CONFIG = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
TINY_CONFIG |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
REPORTED = ("completed", "request_throughput", "output_throughput", "median_ttft_ms", "p99_ttft_ms")
REPORTED += ("median_tpot_ms", "p99_tpot_ms", "median_e2e_latency_ms")


def write_model(folder: Path, config: dict) -> None:
    """A config without weights, and a tokenizer in which token i is the word "wi"."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, config["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


def load_tenants(server: Server, scratch: Path, shape: Shape, device: str) -> list[str]:
    kinds = dict(WORKLOADS["mix5x20_bs20"].tenants)
    names = {name: kind for kind, count in kinds.items() for name in kind.names(count)}
    for name, kind in names.items():
        small = Kind(kind.method, min(kind.size, 16)) if shape is not LLAMA_8B else kind
        path = write_adapter(scratch, small, name, shape, device)
        server.post("/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
        shutil.rmtree(path)
    return list(names)


def drive(port: int, model: Path, names: list[str], distribution: str, args) -> dict:
    """One run of sglang.bench_serving; its summary."""
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as output:
        command = [sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang", "--host", "127.0.0.1"]
        command += ["--port", str(port), "--model", str(model), "--tokenizer", str(model)]
        command += ["--dataset-name", "random-ids", "--random-range-ratio", "1.0", "--num-prompts", str(args.prompts)]
        command += ["--random-input-len", str(args.input), "--random-output-len", str(args.output)]
        command += ["--max-concurrency", str(args.concurrency), "--output-file", output.name, "--disable-tqdm"]
        if names:
            command += ["--lora-name", *names, "--lora-request-distribution", distribution]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = Path(output.name).read_text().splitlines()
    if done.returncode or not lines:
        raise SystemExit(f"bench_serving failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    summary = json.loads(lines[-1])
    if summary["completed"] != args.prompts:
        raise SystemExit(f"{summary['completed']} of {args.prompts} requests were answered")
    return {"distribution": distribution, "tenants": len(names)} | {name: summary[name] for name in REPORTED}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--input", type=int, default=256)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--concurrency", type=int, default=20)
    parser.add_argument("--tiny", action="store_true", help="a two-layer model on the CPU, to try the script")
    args = parser.parse_args()
    config, shape, device = LLAMA_8B_CONFIG, LLAMA_8B, "cuda"
    flags = ["--dtype", "float16", "--attention-backend", "triton", "--sampling-backend", "pytorch"]
    flags += ["--mem-fraction-static", "0.7", "--cuda-graph-bs-decode", "1", "4", "8", "16", str(args.concurrency)]
    if args.tiny:
        config, shape, device = LLAMA_8B_CONFIG | TINY_CONFIG, llama_shape(2, 64, 32, 96), "cpu"
        flags = ["--device", "cpu", "--dtype", "float32"]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_model(folder / "model", config)
        flags += ["--load-format", "dummy", "--grammar-backend", "none"]
        with Server(folder / "model", folder / "server.log", flags) as server:
            names = load_tenants(server, folder, shape, device)
            rows = [drive(server.port, folder / "model", [], "base only", args)]
            rows += [drive(server.port, folder / "model", names, how, args) for how in ("uniform", "distinct", "skewed")]
            state = server.scute_state()
    for row in rows:
        print("  ".join(f"{key} {value:.5g}" if isinstance(value, float) else f"{value}" for key, value in row.items()))
    print(f"most tenants in one forward pass: {state['max_tenants_in_forward']}, methods {state['max_methods_in_forward']}")
    save(args.out, rows, most_tenants_in_forward=state["max_tenants_in_forward"], pool=state["pool"])


if __name__ == "__main__":
    main()
