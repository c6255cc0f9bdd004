"""What the benchmarks of a server share: a model without weights, stages with a limit."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from workloads import LLAMA_8B_CONFIG, Kind, llama_shape

TINY_CONFIG = LLAMA_8B_CONFIG | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
TINY_SHAPE = llama_shape(layers=2, hidden=64, key_value=32, intermediate=96)
BEGIN = time.monotonic()


def smaller(kind: Kind) -> Kind:
    """The same for the tiny model."""
    return Kind(kind.method, min(kind.size, 16))


def say(text: str) -> None:
    print(f"{time.monotonic() - BEGIN:6.1f} s  {text}", flush=True)


@contextmanager
def stage(what: str, limit: int) -> Iterator[None]:
    """Say how long it took. RuntimeError after ``limit`` seconds, whatever it is waiting for; in the main thread only."""

    def expire(*_):
        raise RuntimeError(f"{what}: not done after {limit} s")

    started = time.monotonic()
    signal.signal(signal.SIGALRM, expire)
    signal.alarm(limit)
    try:
        yield
    finally:
        signal.alarm(0)
    say(f"{what}: {time.monotonic() - started:.1f} s")


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
