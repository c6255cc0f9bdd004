"""What ``scute bench load`` asks of a server, and when: calls drawn from a seed, sent without waiting for answers."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp

TOKENS = range(3, 128)  # that every model has; which ones does not matter to the time
WARM_UP_AT_ONCE, WARM_UP_TOKENS = 8, 8
MOST_REPLY = 64 << 20
READ_BUFFER = 4 << 20  # a streamed line holds the whole answer so far


@dataclass(frozen=True)
class Call:
    """A request: when it is due (seconds after the start), for whom (None: the base), and its tokens in and out."""

    at: float
    tenant: str | None
    input: int
    output: int


def draw(
    rate: float, seconds: float, tenants: list[str | None], popularity: str, input: int, output: int, seed: int
) -> list[Call]:
    """The calls of ``seconds``. At another rate the same calls come at another pace."""
    numbers, calls, at = random.Random(seed), [], 0.0
    weights = [1 / k if popularity == "zipf" else 1.0 for k in range(1, len(tenants) + 1)]
    while (at := at + numbers.expovariate(1.0) / rate) < seconds:
        (tenant,) = numbers.choices(tenants, weights)
        lengths = (numbers.randint((mean + 1) // 2, mean + mean // 2) for mean in (input, output))
        calls.append(Call(at, tenant, *lengths))
    return calls


@dataclass(frozen=True)
class Outcome:
    """Of one call: seconds after the start at which it was sent, its first tokens came, and its last ones."""

    call: Call
    sent: float
    first: float = math.nan
    last: float = math.nan
    first_tokens: int = 0  # that came at once
    tokens: int = 0
    error: str = ""

    @property
    def ttft(self) -> float:
        return self.first - self.call.at

    @property
    def tpot(self) -> float:
        """Seconds a token after the first ones; 0 if there was none."""
        return (self.last - self.first) / max(self.tokens - self.first_tokens, 1)


@asynccontextmanager
async def session(timeout: float) -> AsyncIterator[aiohttp.ClientSession]:
    """As many connections as there are requests."""
    connector, limit = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=timeout)
    async with aiohttp.ClientSession(connector=connector, timeout=limit, read_bufsize=READ_BUFFER) as opened:
        yield opened


async def tenants_of(url: str) -> list[str]:
    """The adapters that a server has loaded. OSError or ValueError if it does not tell."""
    try:
        async with session(30) as opened, opened.get(f"{url}/v1/models") as reply:
            text = await reply.content.read(MOST_REPLY) if reply.status == 200 else b""
            while text and (more := await reply.content.read(MOST_REPLY)):
                if len(text := text + more) > MOST_REPLY:
                    raise ValueError(f"{url}/v1/models: a reply of over {MOST_REPLY} bytes")
    except aiohttp.ClientError as error:
        raise ValueError(f"{url}/v1/models: {error or type(error).__name__}") from None
    try:
        cards = json.loads(text)["data"]
        tenants = [card["id"] for card in cards if card.get("parent")]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        cards = tenants = []
    if not cards or not all(isinstance(name, str) for name in tenants):
        raise ValueError(f"{url}/v1/models: HTTP {reply.status}, no models")
    return tenants


async def warm_up(url: str, tenants: list[str | None], input: int, timeout: float) -> None:
    """One request for every tenant, a few at a time; RuntimeError with the first one's error."""
    turns, numbers = asyncio.Semaphore(WARM_UP_AT_ONCE), random.Random(-1)
    start = asyncio.get_running_loop().time()

    async def one(tenant: str | None) -> Outcome:
        call = Call(0.0, tenant, input, WARM_UP_TOKENS)
        async with turns:
            return await send(opened, url, call, body_of(call, numbers), start)

    async with session(timeout) as opened:
        outcomes = await asyncio.gather(*map(one, tenants))
    for outcome in outcomes:
        if outcome.error:
            raise RuntimeError(f"{url}: {outcome.call.tenant or 'the base'}: {outcome.error}")


async def drive(url: str, calls: list[Call], seed: object, timeout: float) -> list[Outcome]:
    """Send every call when it is due; prompts are drawn from ``seed``, another one for every run on a warm cache."""
    numbers = random.Random(repr(seed))
    bodies = [body_of(call, numbers) for call in calls]  # before the clock starts
    async with session(timeout) as opened:
        start = asyncio.get_running_loop().time()
        return await asyncio.gather(*(send(opened, url, *pair, start) for pair in zip(calls, bodies, strict=True)))


def body_of(call: Call, numbers: random.Random) -> bytes:
    sampling = {"temperature": 0, "max_new_tokens": call.output, "ignore_eos": True}
    body = {"input_ids": numbers.choices(TOKENS, k=call.input), "sampling_params": sampling, "stream": True}
    return json.dumps(body | ({"lora_path": call.tenant} if call.tenant else {})).encode()


async def send(opened: aiohttp.ClientSession, url: str, call: Call, body: bytes, start: float) -> Outcome:
    """Stream one answer. Whatever goes wrong is the outcome's error."""
    clock = asyncio.get_running_loop().time
    await asyncio.sleep(start + call.at - clock())
    sent, first, last, beginning, end = clock() - start, math.nan, math.nan, None, None
    try:
        async with opened.post(f"{url}/generate", data=body, headers={"Content-Type": "application/json"}) as reply:
            if reply.status != 200:
                return Outcome(call, sent, error=f"HTTP {reply.status}: {(await reply.text())[:300]}")
            async for line in reply.content:
                if line.startswith(b"data: {"):  # read when time no longer matters
                    last, end = clock() - start, line
                    if beginning is None:
                        first, beginning = last, line
        if end is None:
            return Outcome(call, sent, error="an empty answer")
        opening, whole = (json.loads(line.removeprefix(b"data: ")) for line in (beginning, end))
        if "error" in whole:
            return Outcome(call, sent, error=str(whole["error"])[:300])
        first_tokens, tokens = counts = [answer["meta_info"]["completion_tokens"] for answer in (opening, whole)]
        if not all(type(count) is int and 0 <= count <= MOST_REPLY for count in counts):
            raise ValueError(f"completion_tokens of {str(counts)[:80]}, want whole numbers")
        reason = whole["meta_info"].get("finish_reason")
    except Exception as error:
        return Outcome(call, sent, error=f"{type(error).__name__}: {error}")
    short = "" if tokens == call.output else f"{tokens} tokens, want {call.output}: {reason}"
    return Outcome(call, sent, first, last, first_tokens, tokens, short)
