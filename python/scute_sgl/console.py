"""What the commands share: arguments, and progress beside the result on standard output."""

from __future__ import annotations

import argparse
import ast
import sys


def positive(text: str) -> int:
    """An argparse type."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, want a whole number above 0")
    return int(text)


def assignment(text: str) -> tuple[str, object]:
    """An argparse type: NAME=VALUE; a value that is no Python literal is a string."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"found {text!r}, want NAME=VALUE")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
