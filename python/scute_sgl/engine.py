"""``scute_sgl.Engine``: SGLang's offline engine with the scute backend."""

from __future__ import annotations

import os
import sys

from scute_sgl import boot, options


def Engine(model_path: str, *, lora_paths=None, device: str | None = None, **arguments):
    """``sglang.Engine`` with ``enable_lora`` and ``lora_backend="scute"``.

    ``lora_paths``: adapters to load at once, {name: folder}, as --lora-paths. Keywords ``scute_*`` are the
    ``--scute-*`` options; all others are SGLang's. On a machine without a GPU, or with ``device="cpu"``, it runs
    on the CPU. Like ``sglang.Engine`` it starts processes: a script needs ``if __name__ == "__main__"``.
    """
    settings = {name: arguments.pop(name) for name in list(arguments) if name.startswith("scute_")}
    options.write(**{name.removeprefix("scute_"): value for name, value in settings.items()})
    if device == "cpu" or (device is None and boot.wants_cpu()):
        if "sglang" in sys.modules and os.environ.get(boot.CPU_ENGINE) != "1":
            raise RuntimeError(f'import sglang after scute_sgl.Engine(device="cpu"), or set {boot.CPU_ENGINE}=1 before')
        os.environ[boot.CPU_ENGINE], device = "1", "cpu"

    import sglang

    from scute_sgl.hooks_args import Given

    if "max_loras_per_batch" in arguments:
        arguments["max_loras_per_batch"] = Given(arguments["max_loras_per_batch"])
    if device is not None:
        arguments["device"] = device
    engine = sglang.Engine(
        model_path=model_path, enable_lora=True, lora_backend="scute", lora_paths=lora_paths, **arguments
    )
    if options.Options.read().adapter_dir:
        from scute_sgl import startup

        engine.loop.run_until_complete(startup.finish(engine.tokenizer_manager))
    return engine
