"""``scute demo``: five kinds of PEFT adapters, served in one batch by SGLang's own server and compared with PEFT.

Everything is made here and now: a tiny Llama with random weights, one adapter of each kind written by PEFT with
parameters far from the identity, PEFT's own float32 log-probabilities, and the real ``sglang.launch_server``
on this machine's CPU, asked over HTTP.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

VOCABULARY = 128
PROMPT, NEW_TOKENS = 24, 16
START_SECONDS = 300
TOLERANCE, LEAST_EFFECT = 1e-5, 0.05


def write_base(path: Path) -> None:
    """Save a two-layer Llama with random float32 weights, wide enough in spread that adapters matter."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            initializer_range=0.08,
            bos_token_id=1,
            eos_token_id=2,
        )
    ).save_pretrained(path)


def adapter_configs() -> dict:
    """Name -> PEFT config of the demo's five adapters."""
    from peft import IA3Config, LoraConfig, OFTConfig, VeraConfig

    linears = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return {
        "lora": LoraConfig(r=8, lora_alpha=16, target_modules=linears),
        "dora": LoraConfig(r=8, lora_alpha=16, target_modules=linears, use_dora=True),
        "ia3": IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
        "vera": VeraConfig(r=16, target_modules=["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj"]),
        "oft": OFTConfig(oft_block_size=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"]),
    }


def write_adapter(base: Path, config, path: Path) -> None:
    """Let PEFT write an adapter whose trainable parameters are drawn far from the identity."""
    import torch
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=generator)
            if "ia3" in name or "magnitude" in name:  # factors around one
                parameter.data *= 1 + 0.3 * noise
            else:
                parameter.data = 0.1 * noise
    model.save_pretrained(path)


def reference_logprobs(base: Path, adapter: Path | None, ids: list[int]) -> Tensor:
    """PEFT's float32 log-probabilities (len(ids), vocabulary) of the next token after each of ``ids``."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        return model.eval()(torch.tensor([ids])).logits[0].log_softmax(-1)


def run(as_json: bool = False) -> int:
    """Run the demo; print the table (or JSON objects alone); 0 if everything is exact and shared one forward."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    say = (lambda *_: None) if as_json else (lambda text: print(text, flush=True))
    with tempfile.TemporaryDirectory(prefix="scute-demo-") as scratch:
        folder = Path(scratch)
        say("Writing a tiny Llama and five adapters with PEFT ...")
        write_base(folder / "base")
        configs = adapter_configs()
        for name, config in configs.items():
            write_adapter(folder / "base", config, folder / name)
        say("Starting sglang.launch_server --enable-lora --lora-backend scute ...")
        started = time.monotonic()
        flags = ["--skip-tokenizer-init", "--device", "cpu", "--dtype", "float32"]
        with Server(folder / "base", folder / "server.log", flags) as server:
            say(f"Serving after {time.monotonic() - started:.0f} s. Loading the adapters and sending one mixed batch ...")
            for name in configs:
                server.post("/load_lora_adapter", {"lora_name": name, "lora_path": str(folder / name)})
            tenants = [None, *configs]
            prompts = [[3 + (7 * row + 5 * i) % (VOCABULARY - 3) for i in range(PROMPT)] for row in range(len(tenants))]
            answers = server.post(
                "/generate",
                {
                    "input_ids": prompts,
                    "lora_path": tenants,
                    "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
                    "return_logprob": True,
                    "logprob_start_len": 0,
                    "top_logprobs_num": VOCABULARY,
                },
            )
            state = server.scute_state()
        rows = [
            compare(folder, tenant, prompt, answer, state)
            for tenant, prompt, answer in zip(tenants, prompts, answers, strict=True)
        ]
    together = state["max_tenants_in_forward"]
    exact = all(row["max_error"] <= TOLERANCE for row in rows)
    effective = all(row["effect"] > LEAST_EFFECT for row in rows[1:])
    if as_json:
        print(json.dumps([*rows, {"tenants_in_one_forward": together, "methods_in_one_forward": state["max_methods_in_forward"]}]))
    else:
        say(table(rows))
        say(f"Most tenants in one forward pass, counted by the server: {together} (and base rows beside them)")
        say("Exact." if exact and effective else "NOT exact, or an adapter without effect.")
    return 0 if exact and effective and together == len(configs) else 1


def compare(folder: Path, tenant: str | None, prompt: list[int], answer: dict, state: dict) -> dict:
    """One row of the table: the server's log-probabilities against PEFT's, over prompt and generated tokens."""
    served = answer["meta_info"]["input_top_logprobs"][1:] + answer["meta_info"]["output_top_logprobs"]
    ids = (prompt + answer["output_ids"])[: len(served)]
    expected = reference_logprobs(folder / "base", folder / tenant if tenant else None, ids)
    base = reference_logprobs(folder / "base", None, ids)
    errors = [abs(p - expected[i, token].item()) for i, position in enumerate(served) for p, token, _ in position]
    info = state["tenants"].get(tenant, {"method": "base", "live": [], "bytes": 0})
    return {
        "name": tenant or "base",
        "method": info["method"],
        "live": info["live"],
        "bytes": info["bytes"],
        "effect": (expected - base).abs().max().item(),
        "max_error": max(errors),
    }


def table(rows: list[dict]) -> str:
    lines = ["", f"{'adapter':8} {'method':8} {'live slots':14} {'own bytes':>10} {'effect':>8} {'largest error':>14}"]
    for row in rows:
        live = ", ".join(row["live"]) or "-"
        lines.append(
            f"{row['name']:8} {row['method']:8} {live:14} {row['bytes']:>10,} {row['effect']:>8.3f} {row['max_error']:>14.1e}"
        )
    return "\n".join([*lines, "", "effect, error: largest differences of log-probabilities, from the base and from PEFT float32"])


class Server:
    """``sglang.launch_server`` with a LoRA backend on a free loopback port, for the length of a with block."""

    def __init__(
        self, model: Path, log: Path, flags: list[str], start_seconds: float = START_SECONDS,
        backend: str = "scute", environment: dict[str, str] | None = None,
    ):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.model, self.log, self.flags, self.start_seconds = model, log, flags, start_seconds
        self.backend, self.environment = backend, os.environ | (environment or {})

    def __enter__(self) -> Server:
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(self.model), *self.flags]
        command += ["--enable-lora", "--lora-backend", self.backend]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--log-level", "warning"]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=self.environment, start_new_session=True
            )
        deadline = time.monotonic() + self.start_seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                    return self
            except OSError:
                time.sleep(0.5)
        self.__exit__()
        raise RuntimeError("the server did not start; the end of its log:\n" + self.log.read_text(errors="replace")[-4000:])

    def __exit__(self, *_) -> None:
        try:
            os.killpg(self.process.pid, 9)
        except ProcessLookupError:
            pass
        self.process.wait()

    def post(self, path: str, body: dict):
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as refusal:
            raise RuntimeError(f"{path}: HTTP {refusal.code}: {refusal.read().decode()}") from None

    def scute_state(self) -> dict:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/server_info", timeout=30) as reply:
            return json.load(reply)["internal_states"][0]["scute"]
