"""A request as the scheduler sees it: cursors over one growing list of tokens, and a small state machine.

    0 <= num_computed <= num_tokens <= num_target

There is no prefill or decode phase: a request is simply behind its target, by a whole prompt or by one token.
`num_target` is `num_tokens` plus the drafts that somebody guessed. Owned by `noria.core.scheduler`; holds no KV and
no text.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from noria.core.gates import Grammar
from noria.kv.prefix import PrefixKey, extend_block_hashes
from noria.sampling import SamplingParams


class RequestState(Enum):
    WAITING = "waiting"  # accepted, owns nothing
    RUNNING = "running"  # admitted, owns blocks; advances in every step
    PREEMPTED = "preempted"  # gave its blocks back and waits again; keeps its output
    FINISHED = "finished"


_TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: frozenset({RequestState.RUNNING, RequestState.FINISHED}),
    RequestState.RUNNING: frozenset({RequestState.PREEMPTED, RequestState.FINISHED}),
    RequestState.PREEMPTED: frozenset({RequestState.RUNNING, RequestState.FINISHED}),
    RequestState.FINISHED: frozenset(),
}


class Request:
    """One sequence to generate. Lengths are in tokens; `arrival_s` is on the scheduler's clock."""

    __slots__ = (
        "adapter",
        "arrival_number",
        "arrival_s",
        "block_hashes",
        "draft_token_ids",
        "grammar",
        "held_for_adapter_s",
        "held_for_memory_s",
        "index",
        "max_num_tokens",
        "max_tokens",
        "num_cached_tokens",
        "num_charged",
        "num_computed",
        "num_preemptions",
        "num_prompt_tokens",
        "num_queued_tokens",
        "num_scored",
        "num_tokens_lost",
        "parent_id",
        "phase",
        "prefix_key",
        "prefix_root",
        "priority",
        "request_id",
        "sampling",
        "seed",
        "state",
        "stop_ids",
        "tenant",
        "token_ids",
        "waits_for",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int] | tuple[int, ...],
        sampling: SamplingParams,
        *,
        arrival_s: float = 0.0,
        seed: int = 0,
        index: int = 0,
        parent_id: str | None = None,
        priority: int = 0,
        prefix_key: PrefixKey | None = None,
        grammar: Grammar | None = None,
    ) -> None:
        self.request_id = request_id
        self.sampling = sampling
        self.arrival_s = arrival_s
        self.arrival_number = 0
        """Counts accepted requests; decides wherever times are equal."""
        self.seed = seed
        self.index = index
        self.parent_id = parent_id
        """The sequence whose prompt this one shares, if it is not the first of its request."""
        self.priority = priority
        """Smaller is more urgent. Only the policy `priority` looks at it."""
        self.prefix_key = prefix_key or PrefixKey()
        self.adapter = self.prefix_key.adapter
        self.tenant = self.prefix_key.tenant
        self.prefix_root = self.prefix_key.root()
        self.grammar = grammar
        self.token_ids = list(prompt_token_ids)
        self.draft_token_ids: tuple[int, ...] = ()
        """Guesses at what comes after `token_ids`, for the worker to verify in the coming step."""
        self.num_prompt_tokens = len(self.token_ids)
        self.num_queued_tokens = self.num_prompt_tokens
        """What it adds to the prompt tokens of the queue until it has run: nothing if it waits with its parent."""
        self.max_tokens = sampling.max_tokens or 0
        """Resolved at the door (`noria.core.admission`) when the request did not say."""
        self.max_num_tokens = self.num_prompt_tokens + self.max_tokens
        self.num_scored: int | None = 0 if sampling.prompt_logprobs is not None and index == 0 else None
        """The log-probabilities of prompt tokens behind so many positions have been told; None if nobody wants them.
        The sequences of a request share a prompt, so the first one's are enough."""
        self.stop_ids: frozenset[int] = frozenset(sampling.stop_token_ids)
        """Tokens that end it: its own and, unless it ignores them, the model's. Completed at the door."""
        self.num_computed = 0
        self.num_cached_tokens: int | None = None
        """Prompt tokens found in the cache at first admission; None before that."""
        self.num_charged = 0
        """Up to which prompt position a fair policy has charged for it; computing those again is free."""
        self.num_preemptions = 0
        self.num_tokens_lost = 0
        """Computed tokens whose KV was given up by preemptions."""
        self.held_for_memory_s: float | None = None
        """When it was first held for KV blocks; None once it is admitted."""
        self.held_for_adapter_s: float | None = None
        """The same for a place among the adapters."""
        self.waits_for: tuple[bytes, str] | None = None
        """The hash of the block that it waits for, and the id of the request that computes it."""
        self.phase: int | None = None
        """Set while it advances by one token in every step; see `noria.core.running`."""
        self.state = RequestState.WAITING
        self.block_hashes: list[bytes] = []

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_target(self) -> int:
        """Tokens that should be computed when the request is fully caught up."""
        return len(self.token_ids) + len(self.draft_token_ids)

    @property
    def num_remaining(self) -> int:
        """How many tokens behind its target it is: what it would like to run next."""
        return self.num_target - self.num_computed

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_shareable(self) -> int:
        """How many leading tokens may be taken from the cache: those whose logits nobody wants any more."""
        if self.num_scored is None or self.num_scored >= self.num_prompt_tokens - 1:
            return self.num_tokens
        return self.num_scored

    @property
    def is_caught_up(self) -> bool:
        """Whether only its newest token is left to compute (and drafts, if it has any)."""
        return len(self.token_ids) - self.num_computed == 1

    def move_to(self, state: RequestState) -> None:
        """The only way to change `state`."""
        if state not in _TRANSITIONS[self.state]:
            raise AssertionError(f"{self.request_id}: {self.state.name} cannot become {state.name}")
        self.state = state

    def follow_weights(self, version: str | None) -> None:
        """What it computes from now on is computed with these weights (None: with those it was made for), and its KV
        goes by their name."""
        if version is not None and version != self.prefix_key.weights_version:
            self.prefix_key = msgspec.structs.replace(self.prefix_key, weights_version=version)
            self.prefix_root = self.prefix_key.root()
            self.block_hashes = []

    def hash_blocks(self, block_size: int) -> list[bytes]:
        """The hashes of all full blocks of known tokens, brought up to date."""
        extend_block_hashes(self.block_hashes, self.prefix_root, self.token_ids, block_size)
        return self.block_hashes

    def check(self) -> None:
        assert 0 <= self.num_computed <= self.num_tokens <= self.num_target
        assert self.num_computed == 0 or self.state in (RequestState.RUNNING, RequestState.FINISHED)
        assert self.num_tokens <= self.max_num_tokens
        assert self.phase is None or (self.state is RequestState.RUNNING and self.is_caught_up)

    def __repr__(self) -> str:
        return f"<{self.request_id} {self.state.value} {self.num_computed}/{self.num_tokens}>"
