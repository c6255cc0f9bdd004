"""Choose the adapter of one call in a program of SGLang's frontend language.

    import sglang as sgl
    from scute_sgl import lang

    @sgl.function
    def triage(s, ticket):
        s += ticket + "\\nTeam: " + lang.select("team", ["billing", "support"], adapter="router")
        s += "\\nReply: " + lang.gen("reply", adapter="tone-formal", max_tokens=64)

Calls without ``adapter`` use the base model; adapters may differ between calls and between forks. Works with
every ``sgl.RuntimeEndpoint`` (and ``sgl.Runtime``). Any other backend cannot honour an adapter: adding such
an expression to its program raises ValueError at once. A name that the server does not serve is the server's
refusal, and surfaces as every failed call does, in ``state.error()``.

Importing this module extends three methods of the frontend: the interpreter has no per-call argument that
reaches the request, so the executor remembers the adapter of the expression that it is executing and the
endpoint puts it into each request that it builds for that executor.
"""

from __future__ import annotations

import functools

from sglang.lang import api
from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint
from sglang.lang.interpreter import StreamExecutor
from sglang.lang.ir import SglExpr, SglExprList


def gen(name: str | None = None, *args, adapter: str | None = None, **kwargs) -> SglExpr:
    """``sgl.gen`` (all its arguments, ``choices`` too), generated with ``adapter``."""
    return _with_adapter(api.gen(name, *args, **kwargs), adapter)


def select(name: str | None = None, *args, adapter: str | None = None, **kwargs) -> SglExpr:
    """``sgl.select``: every request that scores the choices uses ``adapter``."""
    return _with_adapter(api.select(name, *args, **kwargs), adapter)


def _with_adapter(expr: SglExpr, adapter: str | None) -> SglExpr:
    if adapter is not None and not isinstance(adapter, str):
        raise TypeError(f"adapter must be the name of a loaded adapter or None, found {adapter!r}")
    expr.scute_adapter = adapter
    return expr


def _adapters_of(expr) -> list[str]:
    if isinstance(expr, SglExprList):
        return [name for part in expr.expr_list for name in _adapters_of(part)]
    name = getattr(expr, "scute_adapter", None)
    return [] if name is None else [name]


def _extend_frontend() -> None:
    submit, add_images = StreamExecutor.submit, RuntimeEndpoint._add_images

    @functools.wraps(submit)
    def checked_submit(self, expr):
        if (names := _adapters_of(expr)) and not isinstance(self.backend, RuntimeEndpoint):
            kind = type(self.backend).__name__
            raise ValueError(f"adapter {names[0]!r}: backend {kind} cannot select adapters; use sgl.RuntimeEndpoint")
        return submit(self, expr)

    def remembering(execute):
        @functools.wraps(execute)
        def run(self, expr):
            self.scute_adapter = getattr(expr, "scute_adapter", None)
            try:
                return execute(self, expr)
            finally:
                self.scute_adapter = None

        return run

    @functools.wraps(add_images)
    def add_adapter_and_images(self, s, data):
        # Every request that RuntimeEndpoint builds for an executor passes through here just before it is sent.
        add_images(self, s, data)
        if (adapter := getattr(s, "scute_adapter", None)) is not None:
            data["lora_path"] = adapter

    StreamExecutor.submit = checked_submit
    StreamExecutor._execute_gen = remembering(StreamExecutor._execute_gen)
    StreamExecutor._execute_select = remembering(StreamExecutor._execute_select)
    RuntimeEndpoint._add_images = add_adapter_and_images


_extend_frontend()
