"""Where answers are written: on the event loop when that is quick, else in a thread, because others need the loop.

What takes long is log-probabilities: an entry of some microseconds for each alternative to each token. A prompt that
is told again has all of its at once, in a stream too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from noria.sampling import SamplingParams
from noria.server.api import GenerationApi
from noria.server.gate import scored_entries
from noria.server.generation import Generation, News

LARGE_ANSWER = 8192
"""Tokens and log-probabilities to write: from here on it takes longer than the event loop may be held."""


async def whole_answer(
    api: GenerationApi, generation: Generation, prompts: list[list[int]], sampling: SamplingParams
) -> bytes:
    lengths = [len(prompt) for prompt in prompts]
    shown = sum(len(output.token_ids) for output in generation.outputs) * (1 + (sampling.logprobs or 0))
    if api.shows_prompts:
        shown += sum(lengths) * sampling.n
    if shown + scored_entries(lengths, sampling) < LARGE_ANSWER:
        return api.answer(generation)
    return await asyncio.to_thread(api.answer, generation)


async def stream_chunks(api: GenerationApi, bunch: Sequence[News]) -> list[bytes]:
    """The chunks of a stream for a bunch of news. Nobody else may use `api` meanwhile."""
    if api.num_entries(bunch) < LARGE_ANSWER:
        return api.chunks(bunch)
    return await asyncio.to_thread(api.chunks, bunch)
