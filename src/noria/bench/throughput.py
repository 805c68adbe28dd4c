"""`noria bench throughput`: runs a workload through an engine in this process and reports what came out, and when.

Greedy, end of sequence ignored, so that every request yields exactly the tokens it asks for. No HTTP and no text: the
figures are those of the engine alone. The result has the names that load tests of servers report.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from noria.assembly import Assembled
from noria.bench.timeline import Timeline, summarise_timelines
from noria.bench.workload import WorkloadRequest
from noria.core.events import FinishReason, RequestEvent
from noria.engine.messages import EngineRequest
from noria.errors import RequestError
from noria.sampling import SamplingParams

WARM_UP_REQUESTS, WARM_UP_PROMPT_TOKENS, WARM_UP_TOKENS = 4, 64, 8

Clock = Callable[[], float]
Progress = Callable[[int, int], None]
"""Called with the number of new tokens and the number of requests that ended."""


@dataclass(slots=True, kw_only=True)
class Run:
    """One pass over a workload."""

    timelines: list[Timeline]
    wall_s: float
    num_steps: int
    num_preemptions: int


def run_workload(
    assembled: Assembled,
    requests: Sequence[WorkloadRequest],
    *,
    honour_arrivals: bool = False,
    clock: Clock = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
    on_progress: Progress = lambda num_tokens, num_ended: None,
) -> Run:
    """Submits all requests (each at its `arrival_s`, if those are honoured) and steps until the last one has ended."""
    client = assembled.client
    waiting = deque(sorted(enumerate(requests), key=lambda numbered: numbered[1].arrival_s if honour_arrivals else 0.0))
    timelines = [Timeline(request) for request in requests]
    by_id: dict[str, Timeline] = {}
    num_steps = num_preemptions = 0
    began_s = clock()
    while waiting or client.has_work:
        while waiting and (not honour_arrivals or clock() - began_s >= waiting[0][1].arrival_s):
            number, _ = waiting.popleft()
            by_id[f"bench-{number}"] = timelines[number]
            _submit(assembled, f"bench-{number}", timelines[number], clock)
        if not client.has_work:
            if waiting:
                sleep(max(0.0, waiting[0][1].arrival_s - (clock() - began_s)))
            continue
        events = client.poll()
        now_s = clock()
        plan = assembled.core.records[-1].plan
        num_steps += not plan.is_empty  # an empty one only tells the worker who has ended
        num_preemptions += len(plan.preempted)
        for event in events:
            _note(by_id[event.request_id], event, now_s)
        on_progress(sum(len(e.token_ids) for e in events), sum(e.finish_reason is not None for e in events))
    return Run(timelines=timelines, wall_s=clock() - began_s, num_steps=num_steps, num_preemptions=num_preemptions)


def warm_up(assembled: Assembled) -> None:
    """Runs a few random prompts, so that the first measured step pays for nothing but itself."""
    numbers = random.Random(0)
    vocab_size = assembled.files.config.vocab_size
    length = min(WARM_UP_PROMPT_TOKENS, assembled.scheduler_config.max_model_len - WARM_UP_TOKENS)
    run_workload(
        assembled,
        [
            WorkloadRequest(tuple(numbers.randrange(vocab_size) for _ in range(max(1, length))), WARM_UP_TOKENS)
            for _ in range(WARM_UP_REQUESTS)
        ],
    )


def _submit(assembled: Assembled, request_id: str, timeline: Timeline, clock: Clock) -> None:
    request = timeline.request
    timeline.start_s = clock()
    try:
        prompt = assembled.tokenizer.encode(request.prompt) if isinstance(request.prompt, str) else request.prompt
        timeline.num_prompt_tokens = len(prompt)
        sampling = SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True)
        assembled.client.submit(EngineRequest(request_id=request_id, prompt_token_ids=tuple(prompt), sampling=sampling))
    except RequestError as error:
        timeline.error = str(error)


def _note(timeline: Timeline, event: RequestEvent, now_s: float) -> None:
    timeline.token_times_s += [now_s] * len(event.token_ids)
    timeline.num_generated += len(event.token_ids)
    timeline.num_cached_tokens = max(timeline.num_cached_tokens, event.num_cached_tokens)
    if event.finish_reason is FinishReason.ERROR:
        timeline.error = event.error or "the engine failed"


def summarise(run: Run, label: str) -> dict[str, Any]:
    """The figures of a run; see `summarise_timelines`."""
    return summarise_timelines(run.timelines, run.wall_s, label) | {
        "cached_tokens": sum(timeline.num_cached_tokens for timeline in run.timelines if timeline.is_ok),
        "steps": run.num_steps,
        "preemptions": run.num_preemptions,
    }
