"""`/v1/completions`: its prompts in, its choices and chunks out. No engine, no HTTP."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

from noria.outputs import CompletionOutput, RequestOutput
from noria.sampling import SamplingParams
from noria.server.answers import CompletionAnswer, CompletionChoice, CompletionLogprobs
from noria.server.api import GenerationApi
from noria.server.bodies import CompletionBody
from noria.server.envelope import TEXT_MARK
from noria.server.errors import ApiError
from noria.server.generation import MAX_SEQUENCES, Generation, News
from noria.server.served import ServedModel
from noria.server.token_texts import TextOffsets
from noria.text.detokenizer import Detokenizer
from noria.text.tokenizer import check_size


class CompletionsApi(GenerationApi):
    """How one request to this endpoint is understood and answered."""

    ID_PREFIX, ANSWER, CHUNK = "cmpl", CompletionAnswer, CompletionAnswer

    def __init__(self, body: CompletionBody, model: ServedModel, call_id: str | None = None) -> None:
        super().__init__(body, model, call_id)
        self._completion = body
        self._num_choices = 1 if body.n is None else body.n
        """To each prompt, in the answer."""
        self._skip_special_tokens = body.skip_special_tokens is not False
        self._given_texts: list[str | None] = []  # of the prompts that were given as texts and are not truncated
        self._offsets: dict[int, TextOffsets] = {}
        self.shows_prompts = bool(body.echo or body.return_token_ids)
        self._opened: set[int] = set()  # choices whose prompt has been told
        if body.best_of is not None:
            _check_best_of(body.best_of, self._num_choices, is_stream=bool(body.stream))
            self.renamed["n"] = "best_of"

    def sampling(self) -> SamplingParams:
        body = self._completion
        best_of = self._num_choices if body.best_of is None else body.best_of
        prompt_logprobs = body.prompt_logprobs
        if body.echo and body.logprobs is not None:
            prompt_logprobs = max(body.logprobs, prompt_logprobs or 0)
        return self._make_sampling(
            n=best_of,
            max_tokens=body.max_tokens,
            # To choose the best, their log-probabilities must be known even if nobody wants to see them.
            logprobs=0 if body.logprobs is None and best_of > self._num_choices else body.logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def encode_prompts(self) -> list[list[int]]:
        """Token ids of each prompt. A text may hold special tokens, as with other servers."""
        self._given_texts = []
        encoded = []
        for prompt in self._prompts():
            if self.is_abandoned:
                break
            token_ids = self._encode(prompt) if isinstance(prompt, str) else prompt
            kept = self._truncated(token_ids, self._completion.max_tokens)
            self._given_texts.append(prompt if isinstance(prompt, str) and len(kept) == len(token_ids) else None)
            encoded.append(kept)
        return encoded

    def _encode(self, text: str) -> list[int]:
        with self._size_bound() as most:
            check_size(text, self._tokenizer, most, param="prompt")
        return self._tokenizer.encode(text)

    def _prompts(self) -> list[Any]:
        """A text or a list of token ids for each prompt."""
        prompt = self._completion.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise ApiError(400, "prompt is an empty list", param="prompt", code="invalid_value")
        kinds = {type(part) for part in prompt}
        if kinds == {int}:
            return [prompt]
        if len(prompt) > MAX_SEQUENCES:
            raise ApiError(
                400,
                f"prompt lists {len(prompt)} prompts, more than {MAX_SEQUENCES}",
                param="prompt",
                code="invalid_value",
            )
        if len(kinds) > 1:
            raise ApiError(400, "prompt mixes texts and token ids", param="prompt", code="invalid_type")
        return prompt

    def answer(self, generation: Generation) -> bytes:
        choices: list[CompletionChoice] = []
        for prompt_index, result in enumerate(generation.results):
            echo, echoed_logprobs = self._echoed(prompt_index, result)
            for output in best_outputs(result.outputs, self._num_choices):
                offsets = self._make_offsets(result, len(echo))
                choice = CompletionChoice(
                    len(choices),
                    echo + output.text,
                    _joined(echoed_logprobs, self._logprobs(output.logprobs, offsets)),
                    output.finish_reason,
                    output.stop_reason,
                )
                if self._completion.prompt_logprobs is not None:
                    num_top = self._completion.prompt_logprobs
                    choice.prompt_logprobs = self._texts.prompt(result.prompt_logprobs or (), num_top)
                if self._completion.return_token_ids:
                    choice.prompt_token_ids, choice.token_ids = result.prompt_token_ids, output.token_ids
                choices.append(choice)
        return self._envelope.encode(self.ANSWER, choices, generation.usage)

    def _chunks_of(self, news: News) -> Iterator[bytes]:
        if self.shows_prompts and news.choice not in self._opened:
            self._opened.add(news.choice)
            yield self._chunk(self._opening_choice(news.choice))
        yield from super()._chunks_of(news)

    def _entries_of(self, news: News) -> int:
        entries = super()._entries_of(news)
        if self.shows_prompts and news.choice not in self._opened:
            _, result = self._prompt_of(news.choice)
            width = 1 + (self._completion.logprobs or 0) if self._completion.echo else 1
            entries += result.num_prompt_tokens * width
        return entries

    def _opening_choice(self, choice: int) -> CompletionChoice:
        """Tells the prompt: its text and log-probabilities, or its ids, as they were asked for."""
        prompt_index, result = self._prompt_of(choice)
        echo, logprobs = self._echoed(prompt_index, result)
        opening = CompletionChoice(choice, echo, logprobs)
        if self._completion.return_token_ids:
            opening.prompt_token_ids, opening.token_ids = result.prompt_token_ids, ()
        return opening

    def _plain_choice(self, choice: int) -> Any:
        return CompletionChoice(choice, TEXT_MARK)

    def _news_choice(self, news: News) -> Any:
        logprobs = None
        if news.logprobs is not None:
            if news.choice not in self._offsets:
                prompt_index, result = self._prompt_of(news.choice)
                self._offsets[news.choice] = self._make_offsets(result, len(self._echo(prompt_index, result)))
            logprobs = self._logprobs(news.logprobs, self._offsets[news.choice])
        told = CompletionChoice(news.choice, news.text, logprobs, news.finish_reason, news.stop_reason)
        if self._completion.return_token_ids:
            told.token_ids = news.token_ids
        return told

    def _prompt_of(self, choice: int) -> tuple[int, RequestOutput]:
        assert self._generation is not None
        prompt_index = choice // self._num_choices
        return prompt_index, self._generation.results[prompt_index]

    def _logprobs(self, positions: Sequence[Any] | None, offsets: TextOffsets) -> CompletionLogprobs | None:
        num_top = self._completion.logprobs
        if positions is None or num_top is None:
            return None
        return self._texts.completion(positions, num_top, offsets.advance)

    def _make_offsets(self, result: RequestOutput, start: int) -> TextOffsets:
        """For the generated tokens of one choice, whose text goes on from `start`."""
        offsets = TextOffsets(self._tokenizer, skip_special_tokens=self._skip_special_tokens, start=start)
        offsets.continue_from(result.prompt_token_ids)
        return offsets

    def _echo(self, prompt_index: int, result: RequestOutput) -> str:
        """The prompt's text: as it was given, or of its tokens, up to a character that generated ones complete."""
        if not self._completion.echo:
            return ""
        given = self._given_texts[prompt_index]
        if given is not None:
            return given
        return Detokenizer(self._tokenizer, skip_special_tokens=self._skip_special_tokens).push(result.prompt_token_ids)

    def _echoed(self, prompt_index: int, result: RequestOutput) -> tuple[str, CompletionLogprobs | None]:
        """The text and, if they were asked for, the log-probabilities of a prompt that is to be echoed."""
        echo = self._echo(prompt_index, result)
        num_top = self._completion.logprobs
        if not self._completion.echo or num_top is None:
            return echo, None
        is_given = self._given_texts[prompt_index] is not None
        # A text that was given shows the special tokens that it spells, but not the BOS that was put before it.
        offsets = TextOffsets(self._tokenizer, skip_special_tokens=not is_given and self._skip_special_tokens)
        token_ids = result.prompt_token_ids
        bos = self._tokenizer.bos_token_id
        has_hidden_bos = is_given and token_ids[0] == bos and not echo.startswith(self._texts.spelling(bos))
        logprobs = CompletionLogprobs([], [], [], [])
        for position, (token_id, known) in enumerate(zip_longest(token_ids, result.prompt_logprobs or ())):
            offset = 0 if has_hidden_bos and position == 0 else min(offsets.advance(token_id), len(echo))
            self._texts.add_token(logprobs, token_id, known, num_top, offset)
        return echo, logprobs


def best_outputs(outputs: Sequence[CompletionOutput], number: int) -> list[CompletionOutput]:
    """Of a prompt's sequences the so many best: those with the highest log-probability per token, best first."""
    if len(outputs) <= number:
        return list(outputs)
    return sorted(outputs, key=_mean_logprob, reverse=True)[:number]


def _mean_logprob(output: CompletionOutput) -> float:
    logprobs = output.logprobs or ()
    return sum(position.logprob for position in logprobs) / max(1, len(logprobs))


def _check_best_of(best_of: int, num_choices: int, *, is_stream: bool) -> None:
    def refuse(message: str) -> ApiError:
        return ApiError(400, message, param="best_of", code="invalid_value")

    if best_of < num_choices:
        raise refuse(f"best_of must be at least n, which is {num_choices}, not {best_of}")
    if is_stream and best_of > num_choices:
        raise refuse("best_of cannot be streamed: the best is known when all have ended")


def _joined(first: CompletionLogprobs | None, second: CompletionLogprobs | None) -> CompletionLogprobs | None:
    """The entries of both, for an echoed prompt and what was generated after it."""
    if first is None or second is None:
        return first or second
    return CompletionLogprobs(
        first.text_offset + second.text_offset,
        first.token_logprobs + second.token_logprobs,
        first.tokens + second.tokens,
        first.top_logprobs + second.top_logprobs,
    )
