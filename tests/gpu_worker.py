"""A process that builds SGLang's ModelRunner as a scheduler does, and runs a Runner's methods for a test.

    worker = Worker("scute", base, SCUTE_PDL="1")         # or "none": the same runner without adapters
    worker.load("dora", folder)
    worker.replays(steps=500, seed=0)                     # -> {"mismatches": 0, ...}
    worker.close()

Workers start in the background; the first call waits for the start.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from pathlib import Path

SIZES = [1, 2, 4, 8, 16]  # captured batch sizes


class Worker:
    """A Runner in another process; its methods can be called here."""

    def __init__(self, backend: str, base: str, device: str = "cuda", **environment: str):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, backend, base, device, environment), daemon=True)
        self._process.start()

    def __getattr__(self, name: str):
        def call(*args, **kwargs):
            self._pipe.send((name, args, kwargs))
            ok, result = self._pipe.recv()
            if not ok:
                raise RuntimeError(f"{name} failed in the worker:\n{result}")
            return result

        return call

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def _serve(pipe, backend: str, base: str, device: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    runner, failure = None, ""
    try:
        from gpu_runner import Runner

        runner = Runner(backend, base, device)
    except Exception:
        failure = traceback.format_exc()
    while True:
        name, args, kwargs = pipe.recv()
        try:
            if runner is None:
                raise RuntimeError(failure)
            pipe.send((True, getattr(runner, name)(*args, **kwargs)))
        except Exception:
            pipe.send((False, traceback.format_exc()))


def write_base(folder: Path, hidden: int) -> str:
    """Two layers; from 1,024 on, wide enough that every op runs several tiles, several chunks and several blocks."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=hidden, intermediate_size=hidden * 11 // 4, num_hidden_layers=2,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 256, max_position_embeddings=512,
        initializer_range=0.03, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).half().save_pretrained(folder)
    return str(folder)


def start_model_runner(backend: str, base: str, device: str):
    """A ModelRunner as the scheduler builds it."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry

    load_plugins()
    if backend == "scute":
        from scute_sgl import hooks, hooks_scheduler

        hooks.register(hooks_scheduler.HOOKS)  # this process is parent and scheduler in one
        HookRegistry.apply_hooks()
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed.parallel_state_wrapper import ParallelState
    from sglang.srt.entrypoints.engine import _set_envs_and_config
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import PortArgs, ServerArgs

    arguments = {"model_path": base, "skip_tokenizer_init": True, "device": device, "log_level": "warning"}
    arguments |= {"dtype": "float16", "max_total_tokens": 4096, "max_running_requests": 64, "random_seed": 0}
    if device == "cuda":
        arguments |= {"attention_backend": "triton", "sampling_backend": "pytorch", "grammar_backend": "none"}
        arguments |= {"cuda_graph_bs_decode": SIZES, "cuda_graph_backend_prefill": "disabled"}
        arguments |= {"mem_fraction_static": 0.3}
    if backend == "scute":
        arguments |= {"enable_lora": True, "lora_backend": "scute"}
    server_args = ServerArgs(**arguments)
    _set_envs_and_config(server_args)
    server_args.check_server_args()
    initialize_moe_config(server_args)
    runner = ModelRunner(
        model_config=ModelConfig.from_server_args(server_args),
        mem_fraction_static=server_args.mem_fraction_static,
        gpu_id=0,
        ps=ParallelState.trivial(),
        nccl_port=PortArgs.init_new(server_args).nccl_port,
        server_args=server_args,
    )
    runner.alloc_memory_pool()
    runner.init_attention_backends()
    runner.init_cuda_graphs()
    return runner
