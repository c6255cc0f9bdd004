"""The ``scute`` command; also ``python -m scute_sgl``."""

from __future__ import annotations

import argparse
import os
import sys

from scute_sgl.boot import has_gpu


def serve_command(model: str, flags: list[str]) -> list[str]:
    """The launch_server command line of ``scute serve``; flags given by the user win."""
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", model]
    command += ["--enable-lora", "--lora-backend", "scute"]
    if not has_gpu() and not any(flag == "--device" or flag.startswith("--device=") for flag in flags):
        command += ["--device", "cpu"]
    return command + flags


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scute", description="Serve PEFT adapters of many methods, exactly, with SGLang.")
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="sglang.launch_server with the scute backend", add_help=False)
    serve.add_argument("model", help="path or hub name of the base model")
    demo = commands.add_parser("demo", help="serve five kinds of adapters in one batch and compare them with PEFT")
    demo.add_argument("--json", action="store_true", help="print a JSON list and nothing else")
    args, rest = parser.parse_known_args(argv)
    if args.command == "serve":
        command = serve_command(args.model, rest)
        os.execv(command[0], command)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    from scute_sgl import demo as demonstration

    return demonstration.run(as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
