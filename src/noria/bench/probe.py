"""`noria bench determinism --url`: does a server give the same answers alone, among others, and a second time?

A probe from outside, of any OpenAI-compatible server: greedy completions with log-probabilities, each prompt alone,
then alone again (a cache may be warm now), then all at once, twice. Texts and log-probabilities are compared as they
arrive, without any tolerance. Needs aiohttp (the `bench` extra).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from noria.bench.serve import first_model, import_aiohttp
from noria.errors import NoriaError, OptionError

if TYPE_CHECKING:
    import aiohttp

WORDS = (
    *("a", "river", "the", "wheel", "water", "turns", "slowly", "under", "stone", "bridge", "while", "children"),
    *("watch", "from", "grass", "and", "count", "its", "buckets", "one", "by", "until", "evening", "comes"),
)


@dataclass(frozen=True, slots=True)
class Answer:
    """A completion. `logprobs` None where the server gave none."""

    text: str
    logprobs: tuple[float, ...] | None


def probe_server(url: str, *, model: str | None, num_prompts: int, max_tokens: int) -> dict[str, Any]:
    """How many answers differ from those that each prompt had first, alone. Raises NoriaError if a request fails."""
    if num_prompts < 2 or max_tokens < 1:
        raise OptionError(
            f"--sequences must be at least 2 and --new-tokens at least 1, not {num_prompts}, {max_tokens}"
        )
    return asyncio.run(_probe(url, model, make_prompts(num_prompts), max_tokens))


def make_prompts(num_prompts: int) -> list[str]:
    """Texts of growing length, from a few words to a few hundred, that differ from their first word on."""
    numbers = random.Random(1)
    return [f"{i} " + " ".join(numbers.choice(WORDS) for _ in range(4 + 8 * i)) for i in range(num_prompts)]


async def _probe(url: str, model: str | None, prompts: Sequence[str], max_tokens: int) -> dict[str, Any]:
    aiohttp = import_aiohttp()
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=3600)
    ) as session:
        name = model or await first_model(session, url)

        async def ask(prompt: str) -> Answer:
            return await _ask(session, url, name, prompt, max_tokens)

        alone = [await ask(prompt) for prompt in prompts]
        rounds = {
            "alone, again": [await ask(prompt) for prompt in prompts],
            "together": await asyncio.gather(*map(ask, prompts)),
            "together, again": await asyncio.gather(*map(ask, prompts[::-1])),
        }
    rounds["together, again"].reverse()
    return {"model": name, "prompts": len(prompts)} | compare_answers(alone, rounds)


async def _ask(session: aiohttp.ClientSession, url: str, model: str, prompt: str, max_tokens: int) -> Answer:
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "seed": 0, "logprobs": 1}
    try:
        async with session.post(
            f"{url}/v1/completions", data=msgspec.json.encode(body), headers={"Content-Type": "application/json"}
        ) as response:
            if response.status != 200:
                raise NoriaError(f"{url} answered {response.status}: {(await response.text())[:200]}")
            choice = (await response.json())["choices"][0]
            logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
            return Answer(choice["text"], None if logprobs is None else tuple(logprobs))
    except (OSError, TimeoutError, ValueError, LookupError, import_aiohttp().ClientError) as error:
        raise NoriaError(f"{url} did not answer as expected: {error!r}") from error


def compare_answers(alone: Sequence[Answer], rounds: Mapping[str, Sequence[Answer]]) -> dict[str, Any]:
    """Counts over all rounds: an answer differs by its text, its log-probabilities or both."""
    by_round = {
        name: {
            "texts": sum(a.text != b.text for a, b in zip(alone, answers, strict=True)),
            "logprobs": sum(a.logprobs != b.logprobs for a, b in zip(alone, answers, strict=True)),
        }
        for name, answers in rounds.items()
    }
    return {
        "has_logprobs": all(answer.logprobs is not None for answer in alone),
        "compared": len(alone) * len(rounds),
        "different": sum(a != b for answers in rounds.values() for a, b in zip(alone, answers, strict=True)),
        "different_texts": sum(counts["texts"] for counts in by_round.values()),
        "different_by_round": by_round,
        "greatest_logprob_difference": max(
            (_distance(a, b) for answers in rounds.values() for a, b in zip(alone, answers, strict=True)), default=0.0
        ),
    }


def _distance(a: Answer, b: Answer) -> float:
    """The greatest between their log-probabilities; 0 for different texts, whose tokens are not to be compared."""
    if a.text != b.text or a.logprobs is None or b.logprobs is None:
        return 0.0
    return max((abs(x - y) for x, y in zip(a.logprobs, b.logprobs, strict=False)), default=0.0)
