"""What the commands share: arguments, and progress beside the result on standard output."""

from __future__ import annotations

import argparse
import ast
import math
import os
import re
import sys
import urllib.parse
from pathlib import Path

from scute_sgl.errors import printable

PICTURES = (".png", ".svg")


def positive(text: str) -> int:
    """An argparse type."""
    if not text.isdecimal() or len(text) > 9 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text[:80]!r}, want a whole number above 0, of at most nine digits")
    return int(text)


def assignment(text: str) -> tuple[str, object]:
    """An argparse type: NAME=VALUE; a value that is no Python literal is a string."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"found {text!r}, want NAME=VALUE")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return name, value


def url(text: str) -> str:
    """An argparse type: a server's address, without a slash at its end."""
    try:
        parts = urllib.parse.urlsplit(text)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        known = known and parts.hostname.encode("idna")
    except ValueError:  # brackets, a port that is none, or a part of a name that is none
        known = False
    if not known or not re.fullmatch(r"[!-~]+", text):
        raise argparse.ArgumentTypeError(f"found {text!r}, want a URL such as http://127.0.0.1:30000")
    return text.rstrip("/")


def token(text: str) -> str:
    """An argparse type: what an HTTP header may hold."""
    if not re.fullmatch(r"[!-~]+", text):
        raise argparse.ArgumentTypeError(f"found {text[:80]!r}, want printable ASCII without spaces")
    return text


def label(text: str) -> str:
    """A name as a picture shows it, which takes no control characters and reads $ as the beginning of a formula."""
    return printable(text).replace("$", r"\$")


def above_0(text: str) -> float:
    """An argparse type: a number above 0 that is no absurd one, so that products with it are finite."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 1e-9 <= value <= 1e9:
        raise argparse.ArgumentTypeError(f"found {text[:80]!r}, want a number above 0, from 1e-9 to 1e9")
    return value


def picture(text: str) -> Path:
    """An argparse type: a picture's file that can be written, as far as its folder tells."""
    path = Path(text)
    if path.suffix.lower() not in PICTURES or os.path.isdir(path):
        raise argparse.ArgumentTypeError(f"found {text!r}, want a name that ends in {' or '.join(PICTURES)}")
    if not os.path.isdir(path.parent):
        raise argparse.ArgumentTypeError(f"found {text!r}, but there is no such folder")
    return path


def say(text: str) -> None:
    """One line on standard error; servers and files may have put anything into ``text``."""
    print(printable(text), file=sys.stderr, flush=True)
