"""What the scheduler tells the worker, and what the worker answers: `StepPlan` and `StepResult`.

Both are frozen and ordered; a plan prints on one line. They are the whole contract between scheduling and
execution: the worker never sees a `Request`, the scheduler never sees a tensor.

What a worker does with a plan, in this order:

1. forget the rows of `finished` and of `preempted`;
2. add a row for every entry of `admitted` (new, or resumed after a preemption: then its block ids replace
   whatever it had before);
3. append `new_block_ids` to the tables of rows it already has;
4. run, for every request in `num_scheduled_tokens` (in that order), the next n tokens after those it has
   computed; the token at position p lives in block `table[p // block_size]`, slot `p % block_size`. In a model of
   several groups of layers (`noria.kv_layout`) block ids come column after column, one of each group, and this holds
   for each group's own table. Of a sliding group, a row's columns that no query from its first token of this step on
   reads are no longer its own: they are the null block, in `admitted` already, and else from the step on in which the
   worker's own count of computed tokens says so (`columns_behind`);
5. sample one token for each request whose computed tokens have thereby reached all its known tokens, append
   it to the row's known tokens and report it. Rows that have not reached their end yield nothing: nothing is
   sampled, drawn or reported for them, and neither is it for a request that may have no tokens (`max_tokens` 0).
   Where no token can be had for one request alone, say so (`failed`).
6. report the log-probability of the prompt token behind each position from `Admitted.num_scored` on that was run,
   for those that want them.

A request with `drafts` runs them too, behind its known tokens: n counts both. The worker accepts drafts while each
is the token that it would have sampled there, reports those and the one token that it samples behind them (so one
more than it accepted), and steps its cursor back over the rest.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from noria.sampling import SamplingParams


class Limit(StrEnum):
    """The limit that kept a request from advancing as far as it could in one step."""

    TOKEN_BUDGET = "token_budget"  # max_num_batched_tokens is spent
    LONG_PREFILL = "long_prefill_token_threshold"  # a chunk of a prompt is never longer while others are there
    PREFILL_SHARE = "max_prefill_share"  # one prompt takes no more of a step while others could use it
    MAX_NUM_SEQS = "max_num_seqs"  # all sequence slots are taken
    KV_BLOCKS = "kv_blocks"  # what it still needs does not fit beside what others were promised
    PREFIX_BEING_COMPUTED = "prefix_being_computed"  # a running request is computing its next block
    GRAMMAR = "grammar"  # its grammar is being compiled
    ADAPTERS = "adapters"  # as many different adapters as one step may have are running
    PAUSED = "paused"  # the engine admits nobody, or stands still, until it is resumed
    ADMISSION_SCAN = "admission_scan"  # as many as one step may look at were held in this one; the next looks again
    PREEMPTING_STEP = "preempting_step"  # somebody was preempted in this step, so nobody is admitted


class Held(msgspec.Struct, frozen=True):
    """One request that was looked at and did not advance as far as it could, and why."""

    request_id: str
    limit: Limit
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.request_id} held: {self.limit}" + (f" ({self.detail})" if self.detail else "")


class AdmissionEnd(msgspec.Struct, frozen=True):
    """Where admission ended: the `num_behind` requests of the queue that nobody looked at share one reason.

    `position` is the place of the first of them in the queue, 0 being the head; before it stand those that were
    looked at and held. `noria.core.explain` expands it for one request when somebody asks.
    """

    limit: Limit
    num_behind: int
    queue: str = ""
    position: int = 0

    def __str__(self) -> str:
        return f"{self.num_behind} waiting: {self.limit}"


class Preemption(msgspec.Struct, frozen=True):
    """A running request gave its blocks back, and what that cost."""

    request_id: str
    in_favour_of: str
    """The request that needed the memory or the place; itself if it was its own choice of victim."""
    limit: Limit
    """What that one lacked: `kv_blocks` or `max_num_seqs`."""
    num_tokens_lost: int
    """Computed tokens whose KV was given up; what the cache still holds of them at resumption is not lost after all."""
    num_blocks_freed: int
    num_preemptions: int
    """How often this request has been preempted now."""

    def __str__(self) -> str:
        return f"{self.request_id} (-{self.num_tokens_lost} tokens, for {self.in_favour_of})"


class Admitted(msgspec.Struct, frozen=True):
    """A request that gets a row in this step: new, or resumed after a preemption.

    `token_ids` are all tokens known so far (prompt, then outputs kept through a preemption), the first
    `num_computed_tokens` of which have their KV in the first blocks of `block_ids` already.
    """

    request_id: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    index: int
    """Sequence index within its request (0 .. n - 1); part of the random counter."""
    num_scored: int | None = None
    """From which position on the log-probabilities of prompt tokens are wanted; None for nowhere."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that may not come before `sampling.min_tokens` others have; empty if that is 0."""


class StepPlan(msgspec.Struct, frozen=True):
    """One engine step: which requests advance and by how many tokens, and the memory they need for it."""

    step: int
    num_scheduled_tokens: dict[str, int]
    admitted: tuple[Admitted, ...] = ()
    new_block_ids: dict[str, tuple[int, ...]] = {}
    preemptions: tuple[Preemption, ...] = ()
    drafts: dict[str, tuple[int, ...]] = {}
    finished: tuple[str, ...] = ()
    """Requests that ended since the previous plan; the worker may have known them or not. After a step that failed,
    also what that one would have told it to forget."""
    held: tuple[Held, ...] = ()
    admission_end: AdmissionEnd | None = None

    @property
    def preempted(self) -> tuple[str, ...]:
        """Ids of those that lost their rows in this step."""
        return tuple(preemption.request_id for preemption in self.preemptions)

    @property
    def num_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())

    def without_token_ids(self) -> StepPlan:
        """The same plan for keeping, without the token ids of those it admits."""
        if not self.admitted:
            return self
        admitted = tuple(msgspec.structs.replace(a, token_ids=()) for a in self.admitted)
        return msgspec.structs.replace(self, admitted=admitted)

    @property
    def is_empty(self) -> bool:
        """True when there is nothing to run (there may still be rows to forget)."""
        return not self.num_scheduled_tokens

    def __str__(self) -> str:
        parts = [" ".join(f"{rid}+{n}" for rid, n in self.num_scheduled_tokens.items()) or "idle"]
        parts.append(f"{self.num_tokens} tokens")
        if self.admitted:
            parts.append("admitted " + " ".join(a.request_id for a in self.admitted))
        if self.preemptions:
            parts.append("preempted " + " ".join(map(str, self.preemptions)))
        if self.finished:
            parts.append("finished " + " ".join(self.finished))
        parts += [str(h) for h in self.held]
        if self.admission_end:
            parts.append(str(self.admission_end))
        return f"step {self.step}: " + " | ".join(parts)


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities (natural, before penalties and temperature) at one output position.

    `rank` is 1 for the most probable token; `top` holds the most probable ids in falling order.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class StepResult(msgspec.Struct, frozen=True):
    """Tokens sampled in one step, by request; requests that sampled nothing are absent."""

    token_ids: dict[str, tuple[int, ...]]
    logprobs: dict[str, tuple[TokenLogprobs, ...]] = {}
    prompt_logprobs: dict[str, tuple[TokenLogprobs, ...]] = {}
    """Of consecutive prompt tokens, by request; the first is that of the token behind position `num_scored`."""
    failed: dict[str, str] = {}
    """Requests that ran and cannot go on, and why; they have no tokens here. The others are none the worse."""
    refused: frozenset[str] = frozenset()
    """Those of `failed` that failed by what they ask for, which shows only now."""

    def without_prompt_logprobs(self) -> StepResult:
        """The same result for keeping: those of one step may be of hundreds of tokens."""
        return msgspec.structs.replace(self, prompt_logprobs={}) if self.prompt_logprobs else self
