"""What a caller of `noria.LLM` gets back, and how one sequence's engine events become it.

`SequenceCollector` is fed the events of one sequence and keeps tokens, log-probabilities and text in step, cutting
what came after a stop string. It does not talk to the engine: its owner ends a request whose stop string it found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from noria.core.events import FinishReason, RequestEvent
from noria.core.plan import TokenLogprobs
from noria.errors import NoriaError
from noria.sampling import SamplingParams
from noria.text.stream import TextDelta, TextStream
from noria.text.tokenizer import Tokenizer


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One generated sequence. `token_ids` and `logprobs` are of equal length and end where `text` ends.

    `finish_reason` is None while the sequence is being generated. `stop_reason` is the stop string, or the id of the
    stop token, that ended it; None when the model ended by itself or ran out of room.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """The answer to one prompt: `n` sequences, or the error that kept it from having them.

    `error` is a RequestError when the prompt was refused, and an UnavailableError when there was no place for it (in
    both cases `outputs` is empty) or when its time was over; it is an EngineError when the engine failed on the way.
    `num_cached_tokens` counts the prompt tokens that the first sequence found in the prefix cache.
    `prompt_logprobs` has an entry for each prompt token that has been judged so far; the first is None, as there is
    nothing before it.
    """

    prompt: str | None = None
    prompt_token_ids: list[int] = field(default_factory=list)
    outputs: list[CompletionOutput] = field(default_factory=list)
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: NoriaError | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_completion_tokens(self) -> int:
        return sum(len(output.token_ids) for output in self.outputs)

    @property
    def text(self) -> str:
        """The first sequence's text; raises `error` when there is one."""
        if self.error is not None:
            raise self.error
        return self.outputs[0].text


class SequenceCollector:
    """Turns the events of one sequence into a `CompletionOutput`, which it adds to the request's `outputs`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        eos_token_ids: Sequence[int],
        sampling: SamplingParams,
        request: RequestOutput,
        index: int,
    ) -> None:
        self.output = CompletionOutput(index=index, logprobs=None if sampling.logprobs is None else [])
        request.outputs.append(self.output)
        if sampling.prompt_logprobs is not None and index == 0:
            request.prompt_logprobs = [None]
        self._request = request
        self._stream = TextStream(tokenizer, sampling, request.prompt_token_ids, eos_token_ids)

    @property
    def is_finished(self) -> bool:
        return self.output.finish_reason is not None

    def add(self, event: RequestEvent) -> TextDelta:
        """Takes an event and returns what it adds.

        When the event completes a stop string the sequence is finished although the engine may not know yet.
        """
        output = self.output
        delta = self._stream.push(event.token_ids, final=event.finish_reason is not None)
        output.text += delta.text
        output.token_ids += event.token_ids[: delta.num_tokens]
        if output.logprobs is not None:
            output.logprobs += event.logprobs[: delta.num_tokens]
        if delta.stop is not None:
            output.finish_reason, output.stop_reason = FinishReason.STOP, delta.stop
        else:
            output.finish_reason, output.stop_reason = event.finish_reason, event.stop_reason
        if event.prompt_logprobs and self._request.prompt_logprobs is not None:
            self._request.prompt_logprobs += event.prompt_logprobs
        if output.index == 0:
            self._request.num_cached_tokens = max(self._request.num_cached_tokens, event.num_cached_tokens)
        if error := event.as_exception():
            self._request.error = error
        return delta
