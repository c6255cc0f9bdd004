"""The ``scute`` command; also ``python -m scute_sgl``."""

from __future__ import annotations

import argparse
import os
import sys
from importlib import metadata

from scute_sgl import load, verify
from scute_sgl.boot import has_gpu


def serve_command(model: str, flags: list[str]) -> list[str]:
    """The launch_server command line of ``scute serve``; flags given by the user win."""
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", model]
    command += ["--enable-lora", "--lora-backend", "scute"]
    if not has_gpu() and not any(flag == "--device" or flag.startswith("--device=") for flag in flags):
        command += ["--device", "cpu"]
    return command + flags


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scute", description="Serve PEFT adapters of many methods, exactly, with SGLang.")
    parser.add_argument("--version", action="version", version=f"scute {metadata.version('scute_sgl')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="sglang.launch_server with the scute backend",
        usage="scute serve MODEL [any flag of sglang.launch_server]",
        description="sglang.launch_server with the scute backend; on the CPU where there is no GPU.",
        epilog="All flags, those of scute among them: python -m sglang.launch_server --help",
        allow_abbrev=False,
    )
    serve.add_argument("model", metavar="MODEL", help="folder or hub name of the base model")
    demo = commands.add_parser("demo", help="serve five kinds of adapters in one batch and compare them with PEFT")
    demo.add_argument("--json", action="store_true", help="print a JSON list and nothing else")
    demo.set_defaults(run=_demo)
    verify.add_parser(commands)
    load.add_parser(commands)
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    args, rest = parser.parse_known_args(argv)
    if args.command == "serve":
        command = serve_command(args.model, rest)
        os.execv(command[0], command)
    if "rest" in args:  # a command of another program
        args.rest = rest
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return args.run(args)


def _demo(args: argparse.Namespace) -> int:
    from scute_sgl import demo

    return demo.run(as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
