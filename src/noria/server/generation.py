"""From prompts to news of sequences: what the two generating endpoints have in common.

`Generation` is one call: some prompts, `n` sequences of each. It owns their event stream, collects text through the
one text pipeline, ends a sequence whose stop string it found, and aborts everything when it is closed early.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Self

import msgspec

from noria.core.events import FinishReason, RequestEvent
from noria.core.plan import TokenLogprobs
from noria.engine.messages import EngineRequest
from noria.engine.streams import AsyncEngine
from noria.errors import RequestError
from noria.kv.prefix import PrefixKey
from noria.outputs import CompletionOutput, RequestOutput, SequenceCollector
from noria.sampling import SamplingParams
from noria.server.answers import PromptTokensDetails, Usage
from noria.text.tokenizer import Tokenizer

MAX_SEQUENCES = 1024
"""Of one call: its prompts times `n`. All of them are made and submitted in one turn of the event loop."""


class News(msgspec.Struct, frozen=True):
    """What one event added to one choice; with a `finish_reason`, the last of it."""

    choice: int
    text: str
    token_ids: tuple[int, ...]
    """Those that count; their text may still be held back, for a stop string or a character to be completed."""
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None

    @property
    def is_plain(self) -> bool:
        """Whether it is text and nothing else, as nearly all is."""
        return self.logprobs is None and self.finish_reason is None


class Generation:
    """One call's sequences. Choices are numbered prompt by prompt, `n` to each. Use as a context manager."""

    def __init__(
        self,
        engine: AsyncEngine,
        tokenizer: Tokenizer,
        eos_token_ids: Sequence[int],
        prompts: Sequence[list[int]],
        sampling: SamplingParams,
        *,
        call_id: str,
        priority: int = 0,
        prefix_key: PrefixKey,
        max_pending: int | None = None,
        on_overflow: Callable[[], None] | None = None,
    ) -> None:
        """Submits everything, or raises `RequestError` and submits nothing. See `AsyncEngine.open` for the rest.

        `call_id` is unique and ours; the sequences are `<call_id>-<choice>`.
        """
        if len(prompts) * sampling.n > MAX_SEQUENCES:
            raise RequestError(
                f"{len(prompts)} prompts with n = {sampling.n} are {len(prompts) * sampling.n} sequences; "
                f"one request may have {MAX_SEQUENCES}",
                param="n" if sampling.n > 1 else "prompt",
            )
        # Before anything is made per sequence: what is refused must cost little, however long it is.
        for prompt in prompts:
            engine.judge(prompt, sampling.max_tokens)
        self._engine = engine
        self.results = [RequestOutput(prompt_token_ids=prompt) for prompt in prompts]
        self.first_token_s: float | None = None
        """When the first token came, on the monotonic clock."""
        self._sampling = sampling
        self._withheld: list[list[News]] = [[] for _ in prompts]
        self._choices: dict[str, tuple[int, SequenceCollector]] = {}
        requests = []
        for number, result in enumerate(self.results):
            prompt_token_ids = tuple(result.prompt_token_ids)
            for index in range(sampling.n):
                choice = number * sampling.n + index
                request = EngineRequest(
                    request_id=f"{call_id}-{choice}",
                    prompt_token_ids=prompt_token_ids,
                    sampling=sampling,
                    index=index,
                    parent_id=f"{call_id}-{number * sampling.n}" if index else None,
                    priority=priority,
                    prefix_key=prefix_key,
                )
                collector = SequenceCollector(tokenizer, eos_token_ids, sampling, result, index)
                self._choices[request.request_id] = choice, collector
                requests.append(request)
        self._stream = engine.open(requests, max_pending=max_pending, on_overflow=on_overflow)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.close(self._stream)

    @property
    def outputs(self) -> list[CompletionOutput]:
        """All choices in order."""
        return [output for result in self.results for output in result.outputs]

    @property
    def usage(self) -> Usage:
        num_prompt = sum(result.num_prompt_tokens for result in self.results)
        num_completion = sum(result.num_completion_tokens for result in self.results)
        num_cached = sum(result.num_cached_tokens for result in self.results)
        return Usage(num_prompt, num_completion, num_prompt + num_completion, PromptTokensDetails(num_cached))

    async def accepted(self) -> None:
        """Returns once the engine has taken all sequences. Raises `UnavailableError` if it has no place for them."""
        await self._stream.accepted()

    async def news(self) -> AsyncIterator[list[News]]:
        """Everything that is new, bunch by bunch, until all sequences have ended.

        If the log-probabilities of prompts are wanted, those of a prompt are known before there is news of its choices.
        Raises `EngineError`, or `UnavailableError` if there was no place for a sequence or its time was over.
        """
        async for events in self._stream:
            bunch = [self._take(event) for event in events if not self._is_over(event)]
            yield bunch if self._sampling.prompt_logprobs is None else self._behind_prompts(bunch)

    async def wait(self) -> None:
        """Runs to the end without looking at the news."""
        async for _ in self.news():
            pass

    def _behind_prompts(self, bunch: Sequence[News]) -> list[News]:
        """Keeps news back while a prompt is incomplete: the first of its sequences is computing it for the others."""
        numbers: dict[int, None] = {}
        for news in bunch:
            number = news.choice // self._sampling.n
            self._withheld[number].append(news)
            numbers[number] = None
        told: list[News] = []
        for number in numbers:
            result = self.results[number]
            # A sequence may end early; then what is not known will not be.
            if (
                len(result.prompt_logprobs or ()) == result.num_prompt_tokens
                or result.outputs[0].finish_reason is not None
            ):
                told += self._withheld[number]
                self._withheld[number] = []
        return told

    def _is_over(self, event: RequestEvent) -> bool:
        """Whether the event belongs to a sequence that a stop string has ended already."""
        return self._choices[event.request_id][1].is_finished

    def _take(self, event: RequestEvent) -> News:
        choice, collector = self._choices[event.request_id]
        if self.first_token_s is None and event.token_ids:
            self.first_token_s = time.monotonic()
        delta = collector.add(event)
        if error := event.as_exception():
            raise error
        output = collector.output
        if output.finish_reason is not None and event.finish_reason is None:
            self._engine.finish(self._stream, event.request_id, FinishReason.STOP)  # a stop string: it is news there
        token_ids = event.token_ids[: delta.num_tokens]
        logprobs = None if output.logprobs is None else event.logprobs[: delta.num_tokens]
        return News(choice, delta.text, token_ids, logprobs, output.finish_reason, output.stop_reason)
