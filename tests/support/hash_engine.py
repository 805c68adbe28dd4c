"""An engine over an executor that needs no model: logits that depend on every token before, real scheduling, batches
and sampling. Everything is checked after every step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from noria.config import SchedulerConfig
from noria.core.events import FinishReason, RequestEvent
from noria.core.plan import TokenLogprobs
from noria.core.scheduler import Scheduler
from noria.engine.client import InProcessClient
from noria.engine.core import EngineCore
from noria.engine.messages import EngineRequest
from noria.fakes.executor import HashExecutor
from noria.runner.executor import Float32Array, ForwardBatch
from noria.runner.runner import ModelRunner
from noria.sampling import SamplingParams

VOCAB, BLOCK, MAX_LEN, EOS = 64, 4, 64, 5


class Recorder(HashExecutor):
    """Keeps how many rows of logits each pass was asked for."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.num_logits: list[int] = []

    def forward(self, batch: ForwardBatch) -> Float32Array:
        self.num_logits.append(len(batch.logit_tokens))
        return super().forward(batch)


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    error_code: str | None = None

    def add(self, event: RequestEvent) -> None:
        assert self.finish_reason is None, "nothing follows the end"
        self.token_ids += event.token_ids
        self.logprobs += event.logprobs
        self.prompt_logprobs += event.prompt_logprobs
        self.finish_reason, self.error, self.error_code = event.finish_reason, event.error, event.error_code


class Engine:
    def __init__(self, executor: HashExecutor | None = None, *, num_blocks: int = 200, **config: Any) -> None:
        self.executor = executor or Recorder(VOCAB)
        limits = SchedulerConfig(
            max_model_len=MAX_LEN,
            num_blocks=num_blocks,
            block_size=BLOCK,
            vocab_size=VOCAB,
            **{"eos_token_ids": (EOS,)} | config,
        )
        self.runner = ModelRunner(
            self.executor,
            max_num_seqs=limits.max_num_seqs,
            max_model_len=MAX_LEN,
            num_blocks=num_blocks,
            block_size=BLOCK,
            vocab_size=VOCAB,
        )
        self.core = EngineCore(Scheduler(limits), self.runner)
        self.num_preemptions = 0

    def run(self, *requests: tuple[list[int], SamplingParams]) -> list[Answer]:
        client = InProcessClient(self.core)
        answers = {f"r{i}": Answer() for i in range(len(requests))}
        for i, (prompt, sampling) in enumerate(requests):
            client.submit(EngineRequest(request_id=f"r{i}", prompt_token_ids=tuple(prompt), sampling=sampling))
        while client.has_work:
            for event in client.poll():
                answers[event.request_id].add(event)
            self.core.scheduler.check()
            self.runner.batch.check()
            self.num_preemptions += len(self.core.records[-1].plan.preempted)
        assert self.runner.batch.num_rows == 0
        return list(answers.values())


def prompt(i: int, length: int) -> list[int]:
    return [(7 * i + 3 * j) % VOCAB for j in range(length)]
