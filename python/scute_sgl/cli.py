"""The ``scute`` command; also ``python -m scute_sgl``."""

from __future__ import annotations

import argparse
import io
import os
import sys
from importlib import metadata
from pathlib import Path

from scute_sgl import inspect_cli, load, plan_cli, top, verify
from scute_sgl.boot import has_gpu
from scute_sgl.console import say
from scute_sgl.errors import printable


def serve_command(model: str, flags: list[str]) -> list[str]:
    """The launch_server command line of ``scute serve``; flags given by the user win."""
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", model]
    command += ["--enable-lora", "--lora-backend", "scute"]
    if not has_gpu() and not any(flag == "--device" or flag.startswith("--device=") for flag in flags):
        command += ["--device", "cpu", "--sleep-on-idle"]  # SGLang's loop would keep a core busy for nothing
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
    serve.add_argument("--adapter-dir", metavar="DIR", help="folder whose adapters are loaded, by folder name")
    serve.add_argument("--adapter-root", metavar="DIR", help="where later loads must lie; default: the adapter dir")
    serve.set_defaults(parser=serve)
    demo = commands.add_parser("demo", help="serve five kinds of adapters in one batch and compare them with PEFT")
    demo.add_argument("--json", action="store_true", help="print a JSON list and nothing else")
    demo.set_defaults(run=_demo)
    inspect_cli.add_parser(commands)
    plan_cli.add_parser(commands)
    top.add_parser(commands)
    verify.add_parser(commands)
    load.add_parser(commands)
    return parser


def _demo(args: argparse.Namespace) -> int:
    from scute_sgl import demo

    return demo.run(as_json=args.json)


def _serve(args: argparse.Namespace, flags: list[str]) -> None:
    """Becomes the server. Whatever is wrong with a folder is said at once, not after the model has loaded."""
    if adapter_base := base_of_adapter(args.model):
        args.parser.error(f"{args.model} is an adapter of {adapter_base}; serve that, and load this with --lora-paths")
    folders = []
    for name, folder in (("adapter-dir", args.adapter_dir), ("adapter-root", args.adapter_root)):
        if folder is not None and not os.path.isdir(folder):
            args.parser.error(f"--{name} {folder!r} is no folder")
        folders += [] if folder is None else [f"--scute-{name}", folder]
    command = serve_command(args.model, folders + flags)
    os.execv(command[0], command)


def base_of_adapter(folder: str) -> str:
    """Name of the base model if ``folder`` is an adapter's and no model's, else ""."""
    config = Path(folder, "adapter_config.json")
    if not config.is_file() or Path(folder, "config.json").exists():
        return ""
    from scute_sgl.checkpoint import read_config  # it imports torch, which takes seconds

    try:
        return printable(str(read_config(Path(folder))["base_model_name_or_path"]))[:200]
    except (ValueError, LookupError):
        return "an unknown base model"


def main(argv: list[str] | None = None) -> int:
    if sys.stdout is None:  # closed
        sys.stdout = open(os.devnull, "w")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names that it cannot encode
    parser = build_parser()
    args, rest = parser.parse_known_args(argv)
    if "rest" in args:  # a command of another program
        args.rest = rest
    elif rest and args.command != "serve":
        parser.error(f"unrecognized arguments: {printable(' '.join(rest))}")
    try:
        if args.command == "serve":
            _serve(args, rest)
        code = args.run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever reads has seen enough; Python would complain once more when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        say(f"scute {args.command}: {str(error) or type(error).__name__}")
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
