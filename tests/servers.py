"""Real SGLang servers on loopback for the tests, and what they answer. Not a test module."""

from __future__ import annotations

import http.client
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import make_adapters
import peft_answers
import torch
from adapters_plain import INVOCATION
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

START_SECONDS, REPLY_SECONDS = 300, 120
TOLERANCE = 1e-5  # of float32 log-probabilities, from PEFT's
VOCABULARY = make_adapters.SIZES["vocab_size"]


class Kit:
    """Tiny bases and PEFT adapters in one folder, each made when it is first asked for."""

    def __init__(self, root: Path):
        self.root = root

    def base(self, name: str = "llama") -> str:
        folder = make_adapters.make_base(name, self.root)
        if not (Path(folder) / "tokenizer.json").exists():
            write_tokenizer(folder)
        return folder

    def adapter(self, name: str, base: str = "llama") -> str:
        folder = self.root / f"{base}-adapters" / name
        if not (folder / "adapter_config.json").exists():
            make_adapters.write_adapter(self.base(base), folder, name)
        return str(folder)

    def logprobs(
        self, adapter: str | None, ids: list[int], base: str = "llama", prompt: int | None = None
    ) -> torch.Tensor:
        return peft_answers.peft_logprobs(self.base(base), adapter and self.adapter(adapter, base), ids, prompt)

    def greedy(self, adapter: str | None, ids: list[int], n: int, base: str = "llama") -> list[int]:
        return peft_answers.peft_greedy(self.base(base), adapter and self.adapter(adapter, base), ids, n)

    def error(
        self, adapter: str | None, served: tuple[list[int], torch.Tensor], base: str = "llama",
        prompt: int | None = None,
    ) -> float:  # fmt: skip
        """Largest difference of served log-probabilities, over prompt and generated tokens, from PEFT's."""
        ids, table = served
        assert not table.isnan().any()
        return (table - self.logprobs(adapter, ids, base, prompt)).abs().max().item()

    def effect(self, adapter: str, served: tuple[list[int], torch.Tensor], base: str = "llama") -> float:
        """Largest difference that the adapter makes there, by PEFT."""
        return (self.logprobs(adapter, served[0], base) - self.logprobs(None, served[0], base)).abs().max().item()


def write_tokenizer(folder: str) -> None:
    """Token i is the word "wi"; a chat is its contents in a row."""
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    fast.save_pretrained(folder)


def prompt(seed: int, length: int = 24) -> list[int]:
    """Random tokens; from the ninth on, those that invoke the activated LoRAs of the kit."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
    return (ids[:8] + INVOCATION + ids[8 + len(INVOCATION) :])[:length] if length > 8 else ids


ALL_LOGPROBS = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": VOCABULARY}


def log_table(ids: list[int], answer: dict) -> tuple[list[int], torch.Tensor]:
    """All tokens but the last generated one, and the served log-probabilities (tokens, vocabulary) after each."""
    served = answer["meta_info"]["input_top_logprobs"][1:] + answer["meta_info"]["output_top_logprobs"]
    table = torch.full((len(served), VOCABULARY), float("nan"))
    for row, position in enumerate(served):
        for value, token, _ in position:
            table[row, token] = value
    return (ids + answer["output_ids"])[: len(served)], table


class Server:
    """``sglang.launch_server --lora-backend scute`` ; a context manager that always ends it. On the CPU where there is no GPU."""

    program = ("sglang.launch_server", "--enable-lora", "--lora-backend", "scute", "--model-path")

    def __init__(self, base: str, log: Path, *flags: str, env: dict[str, str] | None = None):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.base, self.log, self.flags, self.env = base, log, flags, env or {}

    def command(self) -> list[str]:
        command = [sys.executable, "-m", *self.program, self.base, "--dtype", "float32", "--scute-poison"]
        command += ["--sleep-on-idle", "--host", "127.0.0.1", "--port", str(self.port), *self.flags]
        return command + shlex.split(os.environ.get("SCUTE_TEST_FLAGS", ""))  # such as backends that a GPU needs

    def __enter__(self) -> Server:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | self.env
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                self.command(), stdout=log, stderr=log, env=environment, start_new_session=True
            )
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if self.call("/health")[0] == 200:
                    return self
            except OSError:
                pass
            time.sleep(0.5)
        self.__exit__()
        raise RuntimeError(f"the server did not start; the end of {self.log}:\n{self.log.read_text(errors='replace')[-4000:]}")

    def __exit__(self, *_) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()

    def call(self, path: str, body: dict | None = None, timeout: float = REPLY_SECONDS) -> tuple[int, dict]:
        """HTTP status and JSON reply; GET without a body, else POST."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout) as reply:
                status, text = reply.status, reply.read()
        except urllib.error.HTTPError as refusal:
            status, text = refusal.code, refusal.read()
        return status, json.loads(text) if text else {}

    def hang_up(self, path: str, body: dict) -> None:
        """Begin to read a streamed answer, then close the connection."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=REPLY_SECONDS)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        assert connection.getresponse().read(1)
        connection.close()

    def ok(self, path: str, body: dict | None = None, timeout: float = REPLY_SECONDS):
        status, reply = self.call(path, body, timeout)
        assert status == 200, f"{path}: HTTP {status}: {reply}"
        return reply

    def load(self, name: str, folder: str, **fields) -> tuple[int, dict]:
        return self.call("/load_lora_adapter", {"lora_name": name, "lora_path": folder, **fields})

    def unload(self, name: str, timeout: float = 20) -> tuple[int, dict]:
        return self.call("/unload_lora_adapter", {"lora_name": name}, timeout)

    def generate(self, ids, adapter=None, n: int = 8, **fields):
        """/generate, greedily; fields of its body, or of the sampling parameters."""
        sampling = {"temperature": 0, "max_new_tokens": n, "ignore_eos": True, **fields.pop("sampling", {})}
        return self.ok("/generate", {"input_ids": ids, "lora_path": adapter, "sampling_params": sampling, **fields})

    def logprobs(self, ids, adapter=None, n: int = 8):
        """(tokens, log-probabilities) of one prompt, or a list of them, as :func:`log_table` gives them."""
        answers = self.generate(ids, adapter, n, **ALL_LOGPROBS)
        if isinstance(ids[0], list):
            return [log_table(prompt_ids, answer) for prompt_ids, answer in zip(ids, answers, strict=True)]
        return log_table(ids, answers)

    def state(self) -> dict:
        return self.ok("/server_info")["internal_states"][0]["scute"]
