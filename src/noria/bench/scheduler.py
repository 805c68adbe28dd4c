"""`noria bench scheduler`: what planning a step costs, without any model.

Measures `Scheduler.schedule` plus `Scheduler.update` in steady decode: alone, with a long queue behind that waits for
slots, and with a short one that waits for memory and is looked at in every step. And `Scheduler.add`, with the making
of the request and its hashing. The worker's answer is made up between the two and not counted. Block boundaries,
hashes and records are in it, over whole cycles of a block; ends of requests are not.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable

from noria.config import SchedulerConfig
from noria.core.margin import Margin
from noria.core.plan import StepPlan, StepResult
from noria.core.request import Request
from noria.core.scheduler import Scheduler
from noria.sampling import SamplingParams

BATCHES = (256, 1024)
NUM_QUEUED = 10_000
NUM_BLOCKED = 20
NUM_PROMPT_TOKENS = 128
_FOREVER = SamplingParams(max_tokens=100_000)


class _Decoding:
    """`num_running` requests that decode for ever, at all places within a block."""

    def __init__(self, num_running: int, policy: str, *, blocked: bool = False) -> None:
        num_blocks = num_running * 400
        self.config = SchedulerConfig(
            max_model_len=num_blocks * 16,
            num_blocks=num_blocks,
            max_num_seqs=num_running + (NUM_BLOCKED if blocked else 0),
            max_num_batched_tokens=max(8192, 2 * num_running),
            scheduling_policy=policy,
            max_num_queued_reqs=10 * NUM_QUEUED,
            num_records_kept=64,
        )
        self.num_running = num_running
        self.scheduler = Scheduler(self.config)
        for i in range(num_running):
            prompt = _prompt(i, NUM_PROMPT_TOKENS + i % self.config.block_size)
            self.scheduler.add(Request(f"running-{i}", prompt, _FOREVER), 0.0)
        while len(self.scheduler.running) < num_running or self.scheduler.running.catching_up:
            self.step_s()

        if blocked:
            self.scheduler.margin = Margin(num_blocks, watermark=1.0, adaptive=False)  # nobody comes in any more
            self.queue(NUM_BLOCKED)

    def queue(self, num_requests: int) -> None:
        for i in range(num_requests):
            self.scheduler.add(Request(f"waiting-{i}", _prompt(i, NUM_PROMPT_TOKENS), _FOREVER), 0.0)

    def step_s(self) -> float:
        """One step's time in schedule and update."""
        began_s = time.perf_counter()
        plan = self.scheduler.schedule(0.0)
        planned_s = time.perf_counter()
        result = self._answer(plan)
        answered_s = time.perf_counter()
        self.scheduler.update(plan, result, 0.0)
        return time.perf_counter() - answered_s + planned_s - began_s

    def _answer(self, plan: StepPlan) -> StepResult:
        running = self.scheduler.running
        return StepResult(
            {
                r: (7,)
                for r, num_tokens in plan.num_scheduled_tokens.items()
                if num_tokens == running.by_id[r].num_remaining
            }
        )

    def us_per_request_step(self, num_steps: int) -> float:
        """The mean of consecutive steps."""
        return sum(self.step_s() for _ in range(num_steps)) / num_steps / self.num_running * 1e6


def measure_scheduler(*, policy: str = "fcfs", num_rounds: int = 9, num_steps: int = 96) -> dict[str, object]:
    """Medians over rounds, in microseconds per running request and step. `num_steps`: of one round."""
    result: dict[str, object] = {"policy": policy}
    for num_running in BATCHES:
        quiet, queued = _Decoding(num_running, policy), _Decoding(num_running, policy)
        queued.queue(NUM_QUEUED)
        blocked = _Decoding(num_running, policy, blocked=True)
        # In turn, so that a change of the machine's mode meets all alike.
        rounds = [[each.us_per_request_step(num_steps) for each in (quiet, queued, blocked)] for _ in range(num_rounds)]
        result |= {
            f"us_per_request_step_{num_running}": _median(times[0] for times in rounds),
            f"us_per_request_step_{num_running}_queued": _median(times[1] for times in rounds),
            f"queued_ratio_{num_running}": _median(times[1] / times[0] for times in rounds),
            f"us_per_request_step_{num_running}_blocked": _median(times[2] for times in rounds),
        }
    return result | {
        "num_queued": NUM_QUEUED,
        "num_blocked": NUM_BLOCKED,
        "us_per_add": _us_per_add(num_rounds),
        "add_tokens": NUM_PROMPT_TOKENS,
    }


def _us_per_add(num_rounds: int, num_requests: int = 500) -> float:
    config = SchedulerConfig(max_model_len=4096, num_blocks=4096, max_num_queued_reqs=num_requests)
    rounds = []
    for number in range(num_rounds):
        scheduler = Scheduler(config)
        prompts = [_prompt(number * num_requests + i, NUM_PROMPT_TOKENS) for i in range(num_requests)]
        sampling = SamplingParams(max_tokens=16)
        began_s = time.perf_counter()
        for i, prompt in enumerate(prompts):
            scheduler.add(Request(f"r{i}", prompt, sampling), 0.0)
        rounds.append((time.perf_counter() - began_s) / num_requests * 1e6)
    return _median(rounds)


def _prompt(number: int, num_tokens: int) -> list[int]:
    return [(number * 7919 + i * 31) % 32_000 for i in range(num_tokens)]


def _median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 3)
