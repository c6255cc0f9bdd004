"""The one error that an adapter, a flag or a request can cause."""

from __future__ import annotations

HTTP_STATUS = {
    "unsupported_method": 400,
    "bad_config": 400,
    "bad_shape": 400,
    "unknown_key": 400,
    "missing_tensor": 400,
    "wrong_base": 400,
    "too_large": 400,
    "unsafe_file": 400,
    "no_slot": 409,
    "in_use": 409,
    "not_found": 404,
}


LONGEST, LONGEST_PLACE = 2000, 200  # characters of a hint, and of a module or key: files may name things at any length


def printable(text: str) -> str:
    """``text`` on one line, without control characters: files and requests may hold any, logs and terminals not."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


class AdapterError(ValueError):
    """A refusal: which adapter, why (one of the codes in HTTP_STATUS), where, and what is allowed.

    ``str(error)`` is the text that users see and that travels through SGLang's result messages:
    ``adapter 'sql' refused [bad_shape]: model.layers.0.self_attn.q_proj lora_A.weight: found ..., want ...``
    """

    # Each argument may be positional: what is unpickled is made from args, the tuple that BaseException gets below.
    def __init__(self, code: str, hint: str, adapter: str = "", module: str = "", key: str = ""):
        assert code in HTTP_STATUS, code
        hint, module, key = _cut(hint, LONGEST), _cut(module, LONGEST_PLACE), _cut(key, LONGEST_PLACE)
        self.code, self.hint, self.adapter, self.module, self.key = code, hint, adapter, module, key
        super().__init__(code, hint, adapter, module, key)

    @classmethod
    def of(cls, error: Exception) -> AdapterError:
        """The refusal that an exception means: itself, or what an unforeseen one says."""
        return error if isinstance(error, cls) else cls("bad_config", f"{type(error).__name__}: {error}")

    def named(self, adapter: str) -> AdapterError:
        """The same refusal, naming its adapter; readers below the loader do not know the name."""
        return AdapterError(self.code, self.hint, adapter=adapter, module=self.module, key=self.key)

    @property
    def http_status(self) -> int:
        return HTTP_STATUS[self.code]

    @property
    def reason(self) -> str:
        """Place and hint: the text without the adapter's name and the code."""
        where = " ".join(part for part in (self.module, self.key) if part)
        return printable(f"{where + ': ' if where else ''}{self.hint}")

    def __str__(self) -> str:
        name = repr(self.adapter).encode(errors="backslashreplace").decode()
        return f"adapter {name} refused [{self.code}]: {self.reason}"


class NeedsBase(AdapterError):
    """Refused for want of the base model's shapes alone, which a server always has."""
