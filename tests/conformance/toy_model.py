"""A language model of one page: letters that depend on all letters before them, and every sampling field there is."""

from __future__ import annotations

import math
import random
import zlib
from dataclasses import dataclass, field
from typing import Any

LETTERS = [ord(letter) for letter in "abcdefghijklmnopqrstuvwxyz AB"]
"""Token ids are bytes."""
VOCAB_SIZE = 256
CONTEXT = 2000


@dataclass
class Generated:
    """`positions` has, for each token, its id, its log-probability and all alternatives, best first."""

    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    positions: list[tuple[int, float, list[tuple[int, float]]]] = field(default_factory=list)
    text: str = ""
    finish_reason: str = "length"


def log_probabilities(context: list[int]) -> dict[int, float]:
    """Of each letter after this context."""
    rng = random.Random(zlib.crc32(bytes(context)))
    scores = {letter: rng.gauss(0, 2) for letter in LETTERS}
    scores[ord(" ")] += 2  # so that there are words
    total = math.log(sum(map(math.exp, scores.values())))
    return {letter: score - total for letter, score in scores.items()}


def position(token: int, context: list[int]) -> tuple[int, float, list[tuple[int, float]]]:
    values = log_probabilities(context)
    best = sorted(values.items(), key=lambda item: -item[1])
    return token, values.get(token, -30.0), best


def generate(prompt_ids: list[int], body: dict[str, Any], index: int, faults: frozenset[str]) -> Generated:
    """One choice. `body` has a value or None for each field."""
    result = Generated(prompt_ids)
    seed = body.get("seed")
    rng = random.Random(None if seed is None else f"{seed} {index}")
    stops = body.get("stop") or []
    stops = [stops] if isinstance(stops, str) else stops
    if "first-stop-only" in faults:
        stops = stops[:1]
    least = body.get("min_tokens") or 0
    for _ in range(body["max_tokens"]):
        context = prompt_ids + result.token_ids
        token = choose(context, result.token_ids, body, rng, faults)
        result.positions.append(position(token, context))
        result.token_ids.append(token)
        before, result.text = result.text, result.text + chr(token)
        if len(result.token_ids) < least:
            continue
        if token in (body.get("stop_token_ids") or ()):
            result.finish_reason = "stop"
            break
        found = [(result.text.index(stop, max(0, len(before) - len(stop) + 1)), stop)
                 for stop in stops if result.text.endswith(stop)]  # fmt: skip
        if found:
            at, stop = min(found)
            result.finish_reason = "stop"
            if "stops-late" in faults:  # the rest is made and counted, if not shown
                result.token_ids += [97] * (body["max_tokens"] - len(result.token_ids))
            result.text = result.text[: at + (len(stop) if body.get("include_stop_str_in_output") else 0)]
            break
    if "loses-what-it-held-back" in faults:
        for stop in stops:
            while result.text and result.finish_reason == "length" and _may_begin(result.text, stop):
                result.text = result.text[:-1]
    return result


def _may_begin(text: str, stop: str) -> bool:
    return any(text.endswith(stop[:length]) for length in range(1, len(stop)))


def choose(
    context: list[int], so_far: list[int], body: dict[str, Any], rng: random.Random, faults: frozenset[str]
) -> int:
    """The next token."""
    scores = dict(log_probabilities(context))
    for token, value in (body.get("logit_bias") or {}).items():
        scores[int(token)] = scores.get(int(token), -10.0) + value
    allowed = body.get("allowed_token_ids")
    if allowed is not None:
        scores = {token: scores.get(token, -10.0) for token in allowed}
    for token in set(so_far) & set(scores):
        penalty = so_far.count(token) * (body.get("frequency_penalty") or 0) + (body.get("presence_penalty") or 0)
        scores[token] = scores[token] * (body.get("repetition_penalty") or 1) - penalty
    text = bytes(so_far).decode("latin-1")
    for word in body.get("bad_words") or ():
        scores = {token: score for token, score in scores.items() if not (text + chr(token)).endswith(word)}
    best = sorted(scores.items(), key=lambda item: (-item[1], item[0]))
    temperature = 1.0 if body.get("temperature") is None else body["temperature"]
    if "random" in faults:
        return random.choice(best)[0]
    if temperature == 0 or "always-greedy" in faults:
        return best[0][0]
    weights = [math.exp((score - best[0][1]) / temperature) for _, score in best]
    kept = body.get("top_k") or 0
    count = kept if kept > 0 else len(best)
    count = min(count, sum(weight >= (body.get("min_p") or 0) for weight in weights))
    nucleus, total = 0.0, sum(weights)
    for number, weight in enumerate(weights[:count]):
        nucleus += weight / total
        if nucleus >= (1.0 if body.get("top_p") is None else body["top_p"]):
            count = number + 1
            break
    return rng.choices(best[:count], weights[:count])[0][0]
