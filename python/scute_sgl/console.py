"""What the commands share: arguments that are counts, and progress beside the result on standard output."""

from __future__ import annotations

import argparse
import sys


def positive(text: str) -> int:
    """An argparse type."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, want a whole number above 0")
    return int(text)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
