"""Command line and server arguments: the backend's name, its flags, its defaults, and what it refuses.

A configuration under which some forward pass could not be exact stops the start, naming the flag, instead of
serving something else.
"""

from __future__ import annotations

import os

from scute_sgl import hooks, options
from scute_sgl.hooks import Hook

# Set once the arguments have been checked; the scheduler, a child process, refuses to run without it.
CHECKED = "SCUTE_CHECKED"

# field of ServerArgs: (values that are served, why others are not). None, False, "" and 0 are always served.
# Not every release has every field.
REFUSED = {
    "attn_dp_size": ((1,), "MLP and output head see rows gathered from ranks whose adapters this rank does not know"),
    "attn_cp_size": ((1,), "context parallelism splits rows in a way that the row plan does not know"),
    "cpu_offload_gb": ((), "offloaded weights are not where adapters are folded"),
    "dcp_size": ((1,), "context parallelism splits rows in a way that the row plan does not know"),
    "disaggregation_mode": (("null",), "a decode worker admits requests without asking whether their adapters fit"),
    "dllm_algorithm": ((), "diffusion decoding calls the output head with other rows"),
    "dp_size": ((1,), "an adapter loaded at run time would reach one replica only"),
    "enable_dp_attention": ((), "MLP and output head see rows gathered from ranks whose adapters this rank does not know"),
    "enable_flexkv": ((), "its keys ignore the adapter, so tenants would share KV"),
    "enable_fp32_lm_head": ((), "the output head's adapters are computed in the serving dtype"),
    "enable_lmcache": ((), "its keys ignore the adapter, so tenants would share KV"),
    "enable_lora_overlap_loading": ((), "swapping in is asynchronous already"),
    "enable_memory_saver": ((), "released weights may come back changed under folded adapters"),
    "enable_mis": ((), "multi-item scoring calls the output head with other rows"),
    "enable_pdmux": ((), "two forward passes at a time would share one row plan"),
    "enable_quant_communications": ((), "a quantised all-reduce is not exact"),
    "enable_session_radix_cache": ((), "a session's KV may come from the previous turn's adapter"),
    "enable_single_batch_overlap": ((), "layers would run outside the order that the row plan is made for"),
    "enable_streaming_session": ((), "a session's KV may come from the previous turn's adapter"),
    "enable_torch_compile": ((), "not tested yet"),
    "enable_two_batch_overlap": ((), "two forward passes at a time would share one row plan"),
    "grpc_mode": ((), "that server replaces the process in which adapters get their names"),
    "hicache_storage_backend": ((), "its page hashes ignore the adapter, so tenants would share KV"),
    "lora_eviction_policy": (("lru",), "eviction is least recently used"),
    "offload_group_size": ((-1,), "offloaded weights are not where adapters are folded"),
    "pp_size": ((1,), "a stage holds only some of the modules that an adapter is checked against"),
    "quantization": ((), "adapters are exact on unquantised weights only"),
    "radix_cache_backend": ((), "an outside prefix cache may ignore the adapter, so tenants would share KV"),
    "rl_on_policy_target": ((), "it computes the output head in another dtype"),
    "smg_grpc_mode": ((), "that server replaces the process in which adapters get their names"),
    "speculative_algorithm": ((), "draft tokens are not planned for yet"),
    "tokenizer_worker_num": ((1,), "each worker would know other adapters"),
    "torchao_config": ((), "adapters are exact on unquantised weights only"),
    "uno_lora_path": ((), "it brings its own adapter layers"),
    "use_ray": ((), "Ray actors do not load SGLang plugins"),
}  # fmt: skip
REFUSED_ENVIRONMENT = {
    "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE": "its keys ignore the adapter, so tenants would share KV",
    "SGLANG_RUST_SERVER": "that server replaces the process in which adapters get their names",
}

SGLANG_DEFAULT_SLOTS = 8


class Given(int):
    """A number that the user wrote, as opposed to an equal default."""


def add_cli_args(original, parser):
    original(parser)
    known = parser._option_string_actions  # argparse has no public way to amend an argument
    known["--lora-backend"].choices = [*known["--lora-backend"].choices, "scute"]
    known["--max-loras-per-batch"].type = Given
    options.add_flags(parser)


def check_lora_server_args(original, server_args):
    view = _view(server_args)
    if view.lora_backend == "scute" and (view.enable_lora or view.lora_paths):
        hooks.verify()
        refuse(view)
        _settle(server_args, **defaults(view))
        os.environ[CHECKED] = "1"
    return original(server_args)


def refuse(view) -> None:
    """ValueError naming the first setting that cannot be served exactly."""
    for name, (served, why) in REFUSED.items():
        value = getattr(view, name, None)
        if value and value not in served:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"--lora-backend scute does not support {flag} {value}: {why}")
    if view.max_loras_per_batch > options.MOST_SLOTS:
        flag = f"--max-loras-per-batch {view.max_loras_per_batch}"
        raise ValueError(f"--lora-backend scute does not support {flag}: want at most {options.MOST_SLOTS}")
    for name, why in REFUSED_ENVIRONMENT.items():
        if os.environ.get(name, "0").lower() in ("1", "true", "yes"):
            raise ValueError(f"--lora-backend scute does not support {name}: {why}")


def defaults(view) -> dict:
    """What scute sets where the user did not."""
    # SGLang insists on both of these without --lora-paths; an own-size arena needs neither.
    changes = {"max_lora_rank": view.max_lora_rank or 1, "lora_target_modules": view.lora_target_modules or {"all"}}
    slots = view.max_loras_per_batch
    if slots == SGLANG_DEFAULT_SLOTS and not isinstance(slots, Given):
        slots = min(options.DEFAULT_SLOTS, view.max_loaded_loras or options.DEFAULT_SLOTS)
    changes["max_loras_per_batch"] = int(slots)
    if view.device == "cpu" and view.max_total_tokens is None:
        changes["max_total_tokens"] = options.CPU_MAX_TOTAL_TOKENS
    if view.device == "cpu" and view.grammar_backend == "xgrammar":
        # Its mask kernels ask for an NVIDIA driver, and the scheduler ends; without it such a request is refused.
        changes["grammar_backend"] = "none"
    return changes


def _view(server_args):
    """The arguments as resolved so far; newer releases keep decisions beside the raw values."""
    try:
        from sglang.srt.arg_groups.overrides import resolving_view
    except ImportError:
        return server_args
    return resolving_view(server_args)


def _settle(server_args, **changes) -> None:
    """Change arguments after their resolution, which forbids plain assignment."""
    if hasattr(server_args, "override"):
        server_args.override("scute", **changes)
    else:
        from sglang.srt.arg_groups.overrides import declare_resolution

        declare_resolution(server_args, "scute", **changes)


HOOKS = [
    Hook("sglang.srt.server_args.ServerArgs.add_cli_args", add_cli_args, ("parser",)),
    Hook(
        "sglang.srt.server_args.ServerArgs.check_lora_server_args"
        " | sglang.srt.arg_groups.lora_hook.check_lora_server_args",
        check_lora_server_args,
    ),
]
