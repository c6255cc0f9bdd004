import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import json
import multiprocessing
import time
import tracemalloc
from concurrent.futures import ProcessPoolExecutor

import pytest

collect_ignore = ["test_latest.py"]  # the same tests under another SGLang: make test-latest names it


@pytest.fixture(scope="session")
def kit(tmp_path_factory):
    from servers import Kit

    return Kit(tmp_path_factory.mktemp("kit"))


@pytest.fixture(scope="session")
def server(kit, tmp_path_factory):
    """One server for all tests that can share it: a tiny Llama, small chunks of prefill, 8 slots, 8 MiB of arena."""
    from servers import Server

    log = tmp_path_factory.mktemp("server") / "server.log"
    flags = ["--chunked-prefill-size", "64", "--max-loras-per-batch", "8", "--served-model-name", "tiny"]
    flags += ["--scute-arena-mb", "8", "--max-loaded-loras", "16"]
    with Server(kit.base(), log, *flags) as running:
        yield running


@pytest.fixture(scope="session")
def elsewhere():
    """elsewhere(f, ...): f's result, from another process. Engines live there: SGLang's shutdown of one ends every
    child of its process, the server above too."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as worker:
        yield lambda function, *args: worker.submit(function, *args).result()


@pytest.fixture
def loaded(server, kit):
    """load(name, ...) -> names: adapters of the kit under their own names, unloaded when the test ends."""
    names = []

    def load(*adapters: str) -> list[str]:
        for adapter in adapters:
            status, reply = server.load(adapter, kit.adapter(adapter))
            assert status == 200, reply
            names.append(adapter)
        return list(adapters)

    yield load
    for name in names:
        server.unload(name)


@pytest.fixture
def folder(tmp_path):
    """A good adapter of small_files' base; tests spoil it."""
    from safetensors.torch import save_file
    from small_files import lora_config, lora_tensors

    (tmp_path / "adapter_config.json").write_text(json.dumps(lora_config()))
    save_file(lora_tensors(), tmp_path / "adapter_model.safetensors")
    return tmp_path


@pytest.fixture
def quickly_and_in_little_memory():
    tracemalloc.start()
    begin = time.process_time()  # of this process: a busy machine is no fault of the reader
    yield
    seconds, (_, peak) = time.process_time() - begin, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < 10 and peak < 64 << 20, (seconds, peak)
