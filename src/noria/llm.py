"""`noria.LLM`: a model in the calling process. Prompts in, finished answers out, by continuous batching.

Called by people's own programs and by `noria generate` and `noria chat`. It does no scheduling and runs no model: it
submits requests to an engine client, polls it, and collects text. One LLM belongs to one thread at a time.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar

from noria.assembly import Assembled, build_engine
from noria.config import EngineOptions
from noria.core.admission import check_priority
from noria.core.events import FinishReason
from noria.engine.messages import EngineRequest
from noria.errors import EngineError, RequestError, UnavailableError
from noria.logs import loading_shown
from noria.outputs import RequestOutput, SequenceCollector
from noria.sampling import SamplingParams
from noria.terminal import ProgressBar, deferred_interrupt
from noria.text.chat import encode_chat
from noria.text.stream import TextDelta

Prompt: TypeAlias = str | Sequence[int]
Message: TypeAlias = Mapping[str, Any]

MAX_SUBMITTED = 1024
"""Sequences handed to the engine at once; of a longer list the rest waits here, not even tokenised yet."""


@dataclass(eq=False, slots=True)
class _Call:
    """One call of `generate`, `chat` or `stream`: whose sequences these are, and whom to tell about their news."""

    on_delta: Callable[[TextDelta, bool], None]
    """Told what each event added, and whether the sequence is finished with it."""
    num_unfinished: int = 0


class LLM:
    """A model that generates, in this process.

        with noria.LLM("model.gguf", dtype="float32") as llm:
            [answer] = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=24))
            print(answer.text)

    `model` is a GGUF file, a Hugging Face directory, a hub id, or None for the default model. Keyword arguments are
    the fields of `noria.config.EngineOptions`. Loading that takes more than a second is told on stderr, unless the
    program has set up logging, or set NORIA_LOG_LEVEL=warning: then the logger `noria.loading` has it, at level INFO.
    Raises `OptionError` and `ModelError`.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        with loading_shown():
            assembled = build_engine(model, EngineOptions.from_names(options))
        self._open(assembled)

    @classmethod
    def from_assembled(cls, assembled: Assembled) -> Self:
        """An LLM over parts that exist already."""
        llm = cls.__new__(cls)
        llm._open(assembled)
        return llm

    def _open(self, assembled: Assembled) -> None:
        self.assembled = assembled
        self.tokenizer = assembled.tokenizer
        self._client = assembled.client
        self._eos_token_ids = assembled.scheduler_config.eos_token_ids
        self._default_sampling = SamplingParams(**assembled.sampling_defaults)
        self._active: dict[str, tuple[_Call, SequenceCollector]] = {}  # by engine request id
        self._request_numbers = itertools.count()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Aborts what is running. Memory goes with the last reference to the LLM."""
        self._abort(list(self._active))

    def get_default_sampling_params(self) -> SamplingParams:
        """What is used where none are given: the model's recommendations, unless `generation_config` is "none".

        To change some of them: `msgspec.structs.replace(llm.get_default_sampling_params(), max_tokens=20)`.
        """
        return self._default_sampling

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Completes each prompt (text, or token ids) and returns the answers in the order of the prompts.

        Without `sampling_params` those of `get_default_sampling_params` are used; given ones are taken as they are. A
        prompt that is refused has its `error` set and does not disturb the others. `priority`, smaller being more
        urgent, needs the scheduling policy `priority`. `progress` None shows a bar on stderr when that is a terminal.
        Raises RequestError when the number of sampling parameters or priorities does not match.
        """
        return self._run(_list_of_prompts(prompts), self._encode_prompt, sampling_params, priority, progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: int | Sequence[int] = 0,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation, or several, each a list of {"role", "content"}. Otherwise as `generate`."""

        def encode(conversation: Sequence[Message]) -> list[int]:
            return encode_chat(
                self.tokenizer,
                conversation,
                add_generation_prompt=add_generation_prompt,
                template_kwargs=chat_template_kwargs,
            )

        is_single = len(messages) > 0 and isinstance(messages[0], Mapping)
        return self._run([messages] if is_single else list(messages), encode, sampling_params, priority, progress)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, priority: int = 0
    ) -> Generator[str, None, None]:
        """Completes one prompt and yields pieces of text as they come. Leaving the loop early ends the request."""
        sampling = sampling_params or self._default_sampling
        if sampling.n != 1:
            raise RequestError(f"a stream has one sequence, so n must be 1, not {sampling.n}", param="n")
        result = RequestOutput(prompt_token_ids=self._encode_prompt(prompt))
        pieces: deque[str] = deque()
        call = _Call(lambda delta, _: pieces.append(delta.text))
        try:
            self._start(call, result, sampling, priority=priority)
            while call.num_unfinished:
                self._advance()
                while pieces:
                    if piece := pieces.popleft():
                        yield piece
        finally:
            self._abort_call(call)
        if result.error is not None:
            raise result.error

    def _run(
        self,
        prompts: Sequence[Any],
        encode: Callable[[Any], list[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int],
        progress: bool | None,
    ) -> list[RequestOutput]:
        samplings = _one_for_each(
            prompts, self._default_sampling if sampling_params is None else sampling_params, "sampling_params"
        )
        priorities = _one_for_each(prompts, priority, "priority")
        results = [RequestOutput(prompt=prompt if isinstance(prompt, str) else None) for prompt in prompts]
        not_started = deque(zip(prompts, samplings, priorities, results, strict=True))
        with ProgressBar(sum(sampling.n for sampling in samplings), progress) as bar:
            call = _Call(lambda delta, ended: bar.add(num_tokens=delta.num_tokens, num_sequences=int(ended)))
            try:
                while not_started or call.num_unfinished:
                    while not_started and self._has_place(not_started[0][1].n):
                        prompt, sampling, own_priority, result = not_started[0]
                        try:
                            result.prompt_token_ids = result.prompt_token_ids or encode(prompt)
                            self._start(call, result, sampling, own_priority)
                        except (RequestError, UnavailableError) as error:
                            result.outputs = []
                            if isinstance(error, UnavailableError) and call.num_unfinished:
                                break  # there will be a place when one of the others has ended
                            result.error = error
                            bar.add(num_tokens=0, num_sequences=sampling.n)
                        not_started.popleft()
                    if call.num_unfinished:
                        self._advance()
            finally:
                self._abort_call(call)
        return results

    def _has_place(self, num_sequences: int) -> bool:
        """Whether to submit so many more now. What would never have a place is submitted too, to be refused."""
        config = self.assembled.scheduler_config
        most = min(MAX_SUBMITTED, config.num_slots + config.max_num_queued_reqs)
        return not self._active or len(self._active) + num_sequences <= most

    def _start(self, call: _Call, result: RequestOutput, sampling: SamplingParams, priority: int) -> None:
        """Submits the `n` sequences of one prompt, all or none; from then on their news flow into `result`."""
        check_priority(priority, self.assembled.scheduler_config)
        submitted: list[str] = []
        try:
            for index in range(sampling.n):
                request_id = f"llm-{next(self._request_numbers)}"
                collector = SequenceCollector(self.tokenizer, self._eos_token_ids, sampling, result, index)
                # Entered first, so that an interrupt right after the submission still finds it to abort.
                self._active[request_id] = call, collector
                call.num_unfinished += 1
                submitted.append(request_id)
                self._client.submit(
                    EngineRequest(
                        request_id=request_id,
                        prompt_token_ids=tuple(result.prompt_token_ids),
                        sampling=sampling,
                        index=index,
                        parent_id=submitted[0] if index else None,
                        priority=priority,
                    )
                )
        except (RequestError, UnavailableError):
            self._abort(submitted)
            raise

    def _advance(self) -> None:
        """One engine step, and its events to the sequences they belong to, whichever call those are of."""
        with deferred_interrupt():
            for event in self._client.poll():
                if event.request_id not in self._active:
                    continue  # what the engine says last about a request that was ended from here
                call, collector = self._active[event.request_id]
                delta = collector.add(event)
                if collector.is_finished:
                    self._forget(event.request_id)
                    if event.finish_reason is None:  # a stop string: the engine does not know yet
                        self._client.finish(event.request_id, FinishReason.STOP)
                call.on_delta(delta, collector.is_finished)
            if self._active and not self._client.has_work:
                raise EngineError(f"the engine went idle with {len(self._active)} requests unfinished")

    def _forget(self, request_id: str) -> None:
        call, _ = self._active.pop(request_id)
        call.num_unfinished -= 1

    def _abort(self, request_ids: Sequence[str]) -> None:
        with deferred_interrupt():
            for request_id in request_ids:
                self._forget(request_id)
                self._client.finish(request_id, FinishReason.ABORT)

    def _abort_call(self, call: _Call) -> None:
        """Ends what is left of a call that is over: nothing, unless it was interrupted."""
        if call.num_unfinished:
            self._abort([request_id for request_id, (owner, _) in self._active.items() if owner is call])

    def _encode_prompt(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if _is_token_ids(prompt):
            return [int(token_id) for token_id in prompt]
        raise RequestError(
            f"a prompt is a string or a list of token ids, not {type(prompt).__name__}: {prompt!r:.80}", param="prompt"
        )


def _is_token_ids(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and all(isinstance(i, int) and not isinstance(i, bool) for i in prompt)


def _list_of_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
    """One prompt or several: a string, and a non-empty list of nothing but ids, is one."""
    if isinstance(prompts, str) or (len(prompts) > 0 and _is_token_ids(prompts)):
        return [prompts]
    return list(prompts)


_Given = TypeVar("_Given")


def _one_for_each(prompts: Sequence[Any], given: _Given | Sequence[_Given], param: str) -> list[_Given]:
    if not isinstance(given, Sequence):
        return [given] * len(prompts)
    if len(given) != len(prompts):
        raise RequestError(
            f"{len(given)} {_PLURAL[param]} for {len(prompts)} prompts; give one for all, or one for each", param=param
        )
    return list(given)


_PLURAL = {"sampling_params": "sampling parameters", "priority": "priorities"}
