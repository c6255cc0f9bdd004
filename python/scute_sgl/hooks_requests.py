"""Requests, in the process that tokenizes: which adapter a request means.

The base's names, "" and "default" are the base; a loaded adapter's name, or base:name, is that adapter; anything
else is a 404. Never the base by mistake: every endpoint that takes ``model`` is resolved here, also those for
which SGLang itself has no notion of adapters.

A request holds its adapter while its state is in ``TokenizerManager.rid_to_state``. SGLang's own counters are
not used: some ways out of a request forget to decrement them and others do so twice.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from contextlib import asynccontextmanager
from contextvars import ContextVar

from fastapi import HTTPException
from sglang.srt.lora.lora_registry import LoRARegistry

from scute_sgl.errors import AdapterError
from scute_sgl.hooks import Hook
from scute_sgl.metrics import refusal_counter

# The adapter that the request's ``model`` chose, for endpoints that build requests without naming one.
_chosen: ContextVar[str | None] = ContextVar("scute_adapter", default=None)


class Refusal(HTTPException, ValueError):
    """An AdapterError on its way to a client: SGLang's handlers expect one or the other of these bases."""

    def __init__(self, error: AdapterError):
        super().__init__(error.http_status, str(error))

    def __str__(self) -> str:
        return self.detail


class Registry(LoRARegistry):
    """Names of loaded adapters. Requests are not counted here; refusals are, where metrics are on."""

    count_refusal = staticmethod(lambda code: None)

    async def release(self, lora_id) -> None:
        pass

    @property
    def names(self) -> Collection[str]:
        return self._registry.keys()

    def use(self, name: str) -> str:
        """The id of a loaded adapter, which is now the most recently used one."""
        self._registry.move_to_end(name)
        return self._registry[name].lora_id


def is_scute(manager) -> bool:
    return isinstance(manager.lora_registry, Registry)


def base_names(manager) -> set[str]:
    """SGLang renames its model after an update of weights; the names of before stay the base's."""
    sources = (manager, manager.server_args)
    names = {getattr(source, name, None) for source in sources for name in ("served_model_name", "model_path")}
    return {name for name in names if name} | {"default"}


def resolve(manager, name: object) -> str | None:
    """Name of the loaded adapter that ``name`` means; None for the base. Refusal if it means neither."""
    if name is not None and not isinstance(name, str):  # not every endpoint's schema checks it
        raise _refusal(manager, AdapterError("bad_config", "found no text, want a name", adapter=str(name)[:80]))
    if not name or name in base_names(manager):
        return None
    loaded = manager.lora_registry.names
    if name in loaded:
        return name
    for base in sorted(base_names(manager), key=len, reverse=True):
        if name.startswith(base + ":") and name.removeprefix(base + ":") in loaded:
            return name.removeprefix(base + ":")
    hint = f"not loaded; loaded: {', '.join([*loaded][:8]) or 'none'}{', ...' if len(loaded) > 8 else ''}"
    raise _refusal(manager, AdapterError("not_found", hint, adapter=name))


def _refusal(manager, error: AdapterError) -> Refusal:
    manager.lora_registry.count_refusal(error.code)
    return Refusal(error)


def init_lora(original, self):
    original(self)
    if self.enable_lora and self.server_args.lora_backend == "scute":
        self.lora_registry = Registry(list(self.lora_registry.get_all_adapters().values()))
        for name in self.lora_registry.names:
            check_name(self, name)
        if self.server_args.enable_metrics:
            self.lora_registry.count_refusal = refusal_counter()
        _extend_http_server(self)


def check_name(manager, name: object) -> None:
    """AdapterError unless an adapter may have this name: one that means something else would shadow it."""
    bases = base_names(manager)
    if not isinstance(name, str) or not name or name in bases or name.startswith(tuple(b + ":" for b in bases)):
        raise AdapterError("bad_config", "an adapter needs a name that is not the base model's", adapter=str(name))


def generate_request(original, self, obj, request=None):
    if is_scute(self):
        obj.lora_id = None  # the body may hold one; only names choose an adapter
        if obj.lora_path is None:
            obj.lora_path = _chosen.get()
        obj.extra_key = _tagged(getattr(obj, "extra_key", None))
        check_tokens(getattr(obj, "input_ids", None))
    return original(self, obj, request)


def check_tokens(prompts: object) -> None:
    """ValueError, a client's 400, for token ids that end SGLang's scheduler: it looks at ids that are too large, and
    at an empty prompt that is alone, but lets negative ids and empty prompts of a batch pass."""
    for ids in prompts if isinstance(prompts, list) and prompts and isinstance(prompts[0], list) else [prompts]:
        if isinstance(ids, list) and (not ids or any(isinstance(i, int) and i < 0 for i in ids)):
            raise ValueError(f"input_ids: found {ids!r:.80}, want one or more token ids, from 0 on")


def _tagged(key):
    """A client's cache key that cannot be mistaken for another one followed by an adapter's id.

    SGLang's prefix cache keeps tenants apart by ``extra_key + lora_id``, without a separator.
    """
    if isinstance(key, list):
        return [_tagged(item) for item in key]
    return f"k{len(key)}:{key}" if isinstance(key, str) else key


def init_req_state(original, self, obj, *args, **kwargs):
    """Resolve names where states are created: nothing can be unloaded between the two.

    The requests into which ``n`` > 1 splits come here again, with their ids.
    """
    if is_scute(self) and obj.lora_path is not None and obj.lora_id is None:
        if isinstance(obj.lora_path, list) and (obj.is_single or len(obj.lora_path) != _samples(obj)):
            raise ValueError(f"lora_path names {len(obj.lora_path)} adapters, want one name or one for every prompt")
        if isinstance(obj.lora_path, list):
            obj.lora_path = [resolve(self, name) for name in obj.lora_path]
            obj.lora_id = [_id(self, name) for name in obj.lora_path]
        else:
            obj.lora_path = resolve(self, obj.lora_path)
            obj.lora_id = _id(self, obj.lora_path)
    return original(self, obj, *args, **kwargs)


def _samples(obj) -> int:
    return obj.batch_size * (getattr(obj, "parallel_sample_num", None) or 1)


def _id(manager, name: str | None) -> str | None:
    return None if name is None else manager.lora_registry.use(name)


async def validate_and_resolve_lora(original, self, obj):
    if not is_scute(self):
        await original(self, obj)


def create_abort_task(original, self, obj):
    """Called before a streamed answer begins: the last moment at which a 404 can be one."""
    if is_scute(self) and obj.lora_id is None:
        for name in obj.lora_path if isinstance(obj.lora_path, list) else [obj.lora_path]:
            resolve(self, name)
    return original(self, obj)


def parse_model_parameter(original, self, model):
    """(base model, adapter or None) of a ``model``."""
    if not is_scute(self.tokenizer_manager):
        return original(self, model)
    return self.tokenizer_manager.served_model_name, resolve(self.tokenizer_manager, model)


def resolve_lora_path(original, self, request_model, explicit_lora_path):
    """OpenAI endpoints: the adapter that ``model`` names, else the body's ``lora_path``."""
    if not is_scute(self.tokenizer_manager):
        return original(self, request_model, explicit_lora_path)
    named = resolve(self.tokenizer_manager, request_model)
    paths = explicit_lora_path if isinstance(explicit_lora_path, list) else [explicit_lora_path]
    given = [resolve(self.tokenizer_manager, path) for path in paths if path is not None]
    if named is not None and any(path != named for path in given):
        raise ValueError(f"model names the adapter {named!r}, lora_path another one")
    return named if named is not None else explicit_lora_path


async def handle_model_request(original, self, request, raw_request=None):
    """Endpoints whose request has a ``model``, declared or not: it is resolved before anything is done."""
    model = getattr(request, "model", None)
    if not hasattr(request, "model") and raw_request is not None:
        model = (await raw_request.json()).get("model")  # rerank's schema drops it
    _choose(_manager(self), model)
    return await original(self, request, raw_request)


async def create_transcription(original, self, *args, **kwargs):
    _choose(_manager(self), kwargs.get("model"))
    return await original(self, *args, **kwargs)


def _manager(serving):
    return getattr(serving, "tokenizer_manager", None) or serving.openai_serving_chat.tokenizer_manager


def _choose(manager, model: str | None) -> None:
    if is_scute(manager):
        _chosen.set(resolve(manager, model))  # seen by this HTTP request's tasks only


def _extend_http_server(manager) -> None:
    """Without an HTTP server in this process there is nothing to do."""
    from scute_sgl import startup
    from scute_sgl.hooks_loads import LoadRefusal, answer_refusal

    http_server = sys.modules.get("sglang.srt.entrypoints.http_server")
    if http_server is None:
        return

    async def retrieve_model(model: str):
        """One card of GET /v1/models; SGLang's own route knows the base's only."""
        name = resolve(manager, model)
        base, *adapters = (await http_server.available_models()).data
        return base if name is None else next(card for card in adapters if card.id == name)

    app = http_server.app
    live = app.router.lifespan_context

    @asynccontextmanager
    async def after_start(app):
        """The schedulers are ready, and no socket is open yet: nobody is told of a missing adapter in between."""
        await startup.finish(manager)
        async with live(app) as state:
            yield state

    app.router.lifespan_context = after_start
    app.add_exception_handler(LoadRefusal, answer_refusal)  # the body that SGLang's own answers have
    app.add_api_route("/v1/models/{model:path}", retrieve_model)
    app.router.routes.insert(0, app.router.routes.pop())  # the first that matches a path answers


_TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager."
_OPENAI = "sglang.srt.entrypoints.openai."
_MODEL = ("request", "raw_request")
HOOKS = [
    Hook(_TOKENIZER + "init_lora", init_lora),
    Hook(_TOKENIZER + "generate_request", generate_request, ("obj", "request")),
    Hook(_TOKENIZER + "_init_req_state", init_req_state, ("obj",)),
    Hook(_TOKENIZER + "_validate_and_resolve_lora", validate_and_resolve_lora, ("obj",)),
    Hook(_TOKENIZER + "create_abort_task", create_abort_task, ("obj",)),
    Hook(_OPENAI + "serving_base.OpenAIServingBase._parse_model_parameter", parse_model_parameter, ("model",)),
    Hook(_OPENAI + "serving_base.OpenAIServingBase._resolve_lora_path", resolve_lora_path, ("request_model", "explicit_lora_path")),
    Hook(_OPENAI + "serving_base.OpenAIServingBase.handle_request", handle_model_request, _MODEL),
    Hook(_OPENAI + "serving_responses.OpenAIServingResponses.create_responses", handle_model_request, _MODEL),
    Hook(_OPENAI + "serving_transcription.OpenAIServingTranscription.create_transcription", create_transcription, ("model",)),
    Hook("sglang.srt.entrypoints.anthropic.serving.AnthropicServing.handle_messages", handle_model_request, _MODEL),
    Hook("sglang.srt.entrypoints.ollama.serving.OllamaServing.handle_chat", handle_model_request, _MODEL),
    Hook("sglang.srt.entrypoints.ollama.serving.OllamaServing.handle_generate", handle_model_request, _MODEL),
]  # fmt: skip
