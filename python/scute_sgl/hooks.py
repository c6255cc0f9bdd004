"""Hooks into SGLang that prove themselves.

SGLang's plugin loader logs and swallows whatever goes wrong, which here would mean stock LoRA code running under
our name. So a hook says what it relies on; :func:`register` checks that before it asks SGLang to apply it, and
:func:`verify`, called before anything is served, raises unless every hook is really in place.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Hook:
    """``around(original, *args, **kwargs)`` in place of the function at ``target``.

    ``target`` is a dotted path; where releases differ, alternatives separated by " | ", of which the first that
    exists counts. ``parameters`` are the names that ``around`` relies on.
    """

    target: str
    around: Callable
    parameters: tuple[str, ...] = ()


_registered: list[tuple[str, Hook]] = []
_problems: list[str] = []


def register(hooks: Iterable[Hook]) -> None:
    """Hand the hooks whose targets are as expected to SGLang; remember the others for :func:`verify`."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in hooks:
        path = next((path for path in hook.target.split(" | ") if _find(path) is not None), None)
        if path is None:
            _problems.append(f"{hook.target} does not exist")
            continue
        missing = set(hook.parameters) - inspect.signature(_find(path)).parameters.keys()
        if missing:
            _problems.append(f"{path} has no parameter {', '.join(sorted(missing))}")
            continue
        HookRegistry.register(path, hook.around, HookType.AROUND)
        _registered.append((path, hook))


def count() -> int:
    """Hooks of this process; after :func:`verify` all of them are in place."""
    return len(_registered)


def verify() -> None:
    """RuntimeError, naming the hook, unless all of them are in place in this process."""
    from sglang.version import __version__

    problems = list(_problems)
    problems += [f"{path} was not hooked" for path, hook in _registered if not _in_place(_find(path), hook.around)]
    if not _registered:
        problems.append("the plugin has not registered its hooks (is it excluded by SGLANG_PLUGINS or SGLANG_PLATFORM?)")
    if problems:
        raise RuntimeError(f"scute refuses to start on SGLang {__version__}: {'; '.join(problems)}")


def _find(path: str):
    """The function at a dotted path, without its staticmethod or classmethod wrapper; None if there is none."""
    parent, _, name = path.rpartition(".")
    try:
        found = getattr(pkgutil.resolve_name(parent), name)
    except (ImportError, AttributeError):
        return None
    return getattr(found, "__func__", found)


def _in_place(function, around: Callable) -> bool:
    """Whether ``around`` is in the chain of wrappers: SGLang's registry closes over the hook that it applies."""
    while function is not None:
        if any(cell.cell_contents is around for cell in getattr(function, "__closure__", None) or ()):
            return True
        function = getattr(function, "__wrapped__", None)
    return False
