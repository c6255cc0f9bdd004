"""Which rows of a request an activated LoRA changes: those from its invocation in the prompt on (methods/alora.py).

A request's id of its tenant and its key in the prefix cache carry the position of that first row, so that they tell
it wherever SGLang takes them. It depends on the prompt alone and is found once, when the request is queued.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping, Sequence

import numpy

NEVER = sys.maxsize  # the first row where a prompt lacks the tokens


class Activated(str):
    """An id or a cache key, equal to the plain text; ``first`` is the first position that the adapter changes."""

    first: int

    @classmethod
    def at(cls, first: int, text: str) -> Activated:
        result = cls(text)
        result.first = first
        return result


def find(prompt: Sequence[int], tokens: Sequence[int]) -> int:
    """Where the last occurrence of ``tokens`` in ``prompt`` begins; NEVER without one."""
    ids = numpy.asarray(prompt, dtype=numpy.int64)
    begins = numpy.arange(len(ids) - len(tokens) + 1)
    for offset, token in enumerate(tokens):
        begins = begins[ids[begins + offset] == token]
    return int(begins[-1]) if len(begins) else NEVER


def mark(req, tenants: Mapping[str, object]) -> bool:
    """Let a request that enters the queue tell its first changed row, if its tenant has invocation tokens.

    True if the prompt lacks them. Once is enough, however often a request is queued. A prompt of embeddings has no
    tokens to find, as in PEFT.
    """
    tenant = tenants.get(req.lora_id)
    if tenant is None or not tenant.invocation or isinstance(req.lora_id, Activated):
        return False
    first = find(req.origin_input_ids, tenant.invocation) if req.input_embeds is None else NEVER
    req.lora_id, req.extra_key = Activated.at(first, req.lora_id), Activated.at(first, req.extra_key)
    return first == NEVER


def split(
    uids: Sequence[str | None], lengths: Sequence[int], prefixes: Sequence[int] | None, heads: Sequence[int] | None
) -> tuple[Sequence[str | None], Sequence[int], Sequence[int] | None]:
    """(uids, lengths, heads) of a batch with every request cut where its adapter begins; rows before are the base's.

    For each request its id, its rows in this pass, how many of its tokens come before them (None: in decoding all of
    the prompt does), and how many of its last rows the output head sees (None: all).
    """
    if not any(isinstance(uid, Activated) for uid in uids):
        return uids, lengths, heads
    parts = []
    for i, (uid, rows) in enumerate(zip(uids, lengths, strict=True)):
        before = 0
        if isinstance(uid, Activated):
            reach = NEVER - 1 if prefixes is None else prefixes[i]
            before = min(max(uid.first - reach, 0), rows)
        seen = rows if heads is None else heads[i]
        after = rows - before
        parts += [(None, before, max(seen - after, 0))] if before else []
        parts += [(uid, after, min(seen, after))] if after or not before else []  # a request may have no rows at all
    uids, lengths, seen = zip(*parts)
    return uids, lengths, None if heads is None else seen


def cache_tokens(tokens: array, key: str | None) -> array:
    """``tokens`` of a request as its prefix cache shall know them: complements, which no token is, where the adapter
    holds. So keys and values are reused only for a token that stands on the same side of the invocation again."""
    if not isinstance(key, Activated) or key.first >= len(tokens):
        return tokens
    known = array("q", tokens)
    changed = numpy.frombuffer(known, dtype=numpy.int64)[key.first :]
    numpy.invert(changed, out=changed)
    return known
