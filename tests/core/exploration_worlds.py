"""The worlds that `exploration` explores: a few small requests, a small pool, and what may happen to them.

A `SmallWorld` is data: a configuration, a list of requests that arrive in this order, and which events the
environment may cause. What a request says is fixed by its script, so the whole future of a world is decided by the
order of events alone. `ModelWorker` executes plans in such a world: it keeps what a worker keeps (rows and KV slots),
says what the scripts say, and raises `PlanViolation` when a plan asks for something impossible.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, cycle, product
from typing import Any

from noria.config import SchedulerConfig
from noria.core.gates import Refused
from noria.core.plan import StepPlan, StepResult
from noria.core.request import Request
from noria.core.scheduler import PauseMode
from noria.fakes.runner import PlanViolation
from noria.kv.prefix import PrefixKey
from noria.kv_layout import KVLayout, columns_behind
from noria.sampling import SamplingParams

EOS, STOP = 2, 9
JUNK = -1
"""Stands in a KV slot for the content of a wrong draft."""


class FakeGrammar:
    """Is ready, or will be, or turns out to be one that cannot be compiled."""

    def __init__(self, condition: str) -> None:
        self.condition = condition

    @property
    def is_ready(self) -> bool:
        if self.condition == "bad":
            raise Refused("the grammar cannot be compiled")
        return self.condition == "ready"


@dataclass(frozen=True)
class Spec:
    """One request: `script` is what it says until it ends, of `max_tokens` tokens."""

    prompt: tuple[int, ...]
    script: tuple[int, ...]
    priority: int = 0
    tenant: str | None = None
    adapter: str | None = None
    grammar: str | None = None
    """What there is to know of its grammar, if it has one: `late`, `ready` or `bad`."""

    @cached_property
    def token_ids(self) -> tuple[int, ...]:
        return self.prompt + self.script

    @cached_property
    def num_said(self) -> int:
        """How much of the script is said before it ends by itself."""
        ends = [i + 1 for i, token_id in enumerate(self.script) if token_id in (EOS, STOP)]
        return min(ends, default=len(self.script))

    @cached_property
    def sampling(self) -> SamplingParams:
        return SamplingParams(max_tokens=len(self.script), stop_token_ids=(STOP,))

    def request(self, request_id: str) -> Request:
        return Request(
            request_id,
            self.prompt,
            self.sampling,
            priority=self.priority,
            prefix_key=PrefixKey(tenant=self.tenant, adapter=self.adapter),
            grammar=FakeGrammar(self.grammar) if self.grammar else None,
        )


@dataclass(frozen=True)
class SmallWorld:
    """A configuration, requests named a, b, c, ..., and the events that the environment may cause."""

    name: str
    specs: tuple[Spec, ...]
    options: dict[str, Any] = field(default_factory=dict)
    aborts: bool = True
    """Any request may be aborted."""
    pauses: tuple[PauseMode, ...] = ()
    drafts: bool = False
    num_faults: int = 0
    """How often one allocation may fail although there is memory."""
    resets: bool = False
    """The prefix cache may be reset."""

    @cached_property
    def requests(self) -> dict[str, Spec]:
        return {chr(ord("a") + i): spec for i, spec in enumerate(self.specs)}

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(len(spec.token_ids) for spec in self.specs)

    def config(self) -> SchedulerConfig:
        options = dict(self.options)
        if not options.get("enable_chunked_prefill", True):
            options["max_num_batched_tokens"] = max(options["max_num_batched_tokens"], self.longest)
        layout = KVLayout(options["block_size"], options.get("kv_windows", (None,)), options["max_num_batched_tokens"])
        options["num_blocks"] += layout.most_blocks(self.longest) - layout.num_columns(self.longest)
        return SchedulerConfig(max_model_len=self.longest, eos_token_ids=(EOS,), num_records_kept=1, **options)

    def draft(self, request: Request) -> tuple[int, ...]:
        """Two guesses: both right after an even number of tokens, the second one wrong after an odd number."""
        script = self.requests[request.request_id].token_ids
        first, second = (*script[request.num_tokens : request.num_tokens + 2], JUNK, JUNK)[:2]
        return (first, second if request.num_tokens % 2 == 0 else JUNK)


class Contents:
    """What KV content stands for: a number for each prefix of each request, and for each block hash its slots'."""

    def __init__(self, world: SmallWorld, block_size: int) -> None:
        self.of: dict[str, tuple[int, ...]] = {}
        self.behind_hash: dict[bytes, tuple[int, ...]] = {}
        self.label: dict[bytes, int] = {}
        numbers: dict[tuple[Any, ...], int] = {}
        for request_id, spec in world.requests.items():
            tokens = spec.token_ids
            prefixes = ((spec.tenant, spec.adapter, tokens[: i + 1]) for i in range(len(tokens)))
            own = self.of[request_id] = tuple(numbers.setdefault(prefix, len(numbers) + 1) for prefix in prefixes)
            request = spec.request(request_id)
            request.token_ids += spec.script
            for i, block_hash in enumerate(request.hash_blocks(block_size)):
                self.behind_hash[block_hash] = own[i * block_size : (i + 1) * block_size]
                self.label.setdefault(block_hash, len(self.label) + 1)


class ModelWorker:
    """Rows and KV slots. A row is (known tokens, block ids, computed tokens)."""

    def __init__(self, num_blocks: int, block_size: int, windows: tuple[int | None, ...] = (None,)) -> None:
        self.rows: dict[str, tuple[int, tuple[int, ...], int]] = {}
        self.slots = [0] * ((num_blocks + 1) * block_size)
        self.block_size = block_size
        self.windows = windows

    def execute(self, plan: StepPlan, world: SmallWorld, contents: Contents) -> StepResult:
        for request_id in plan.finished + plan.preempted:
            self.rows.pop(request_id, None)
        for admitted in plan.admitted:
            request_id, num_known = admitted.request_id, len(admitted.token_ids)
            _require(request_id not in self.rows, f"{request_id} is admitted twice")
            own = world.requests[request_id].token_ids[:num_known]
            _require(admitted.token_ids == own, f"{request_id} is admitted with tokens that are not its own")
            self.rows[request_id] = (num_known, admitted.block_ids, admitted.num_computed_tokens)
            self.check_content(request_id, contents)
            _require(self.without_passed(*self.rows[request_id][1:]) == admitted.block_ids, "a window has moved past")
        for request_id, block_ids in plan.new_block_ids.items():
            num_known, held, num_computed = self.rows[request_id]
            self.rows[request_id] = (num_known, held + block_ids, num_computed)
        sampled = {}
        for request_id, num_tokens in plan.num_scheduled_tokens.items():
            drafts = plan.drafts.get(request_id, ())
            script = world.requests[request_id].token_ids
            if tokens := self._run(request_id, num_tokens, drafts, script, contents.of[request_id]):
                sampled[request_id] = tokens
        return StepResult(sampled)

    def _run(
        self, request_id: str, num_tokens: int, drafts: tuple[int, ...], script: tuple[int, ...], own: tuple[int, ...]
    ) -> tuple[int, ...]:
        _require(request_id in self.rows, f"{request_id} is scheduled, but has no row")
        num_known, block_ids, num_computed = self.rows[request_id]
        end = num_computed + num_tokens
        _require(num_tokens >= 1, f"{request_id} is scheduled for {num_tokens} tokens")
        _require(end <= num_known + len(drafts), f"{request_id} would compute beyond its known tokens")
        _require(not drafts or end == num_known + len(drafts), f"{request_id}'s drafts are not all planned")
        num_groups = len(self.windows)
        num_places = len(block_ids) // num_groups * self.block_size
        _require(end <= num_places, f"{request_id} lacks blocks for {end} tokens")
        num_right = 0
        while num_right < len(drafts) and drafts[num_right] == script[num_known + num_right]:
            num_right += 1
        for position in range(num_computed, end):
            column, offset = divmod(position, self.block_size)
            for group, block_id in enumerate(block_ids[column * num_groups : (column + 1) * num_groups]):
                for other, (_, held, _) in self.rows.items():
                    is_alone = other == request_id or block_id not in held
                    _require(is_alone, f"{request_id} writes into a block of {other}")
                content = in_group(own[position], group) if position < num_known + num_right else JUNK
                self.slots[block_id * self.block_size + offset] = content
        if end < num_known:
            self.rows[request_id] = (num_known, self.without_passed(block_ids, end), end)
            return ()
        num_said = num_known + num_right + 1
        self.rows[request_id] = (num_said, self.without_passed(block_ids, num_said - 1), num_said - 1)
        return script[num_known:num_said]

    def first_columns(self, num_computed: int) -> list[int]:
        """Of each group: the first column that the next token still reads."""
        size = self.block_size
        return [0 if w is None else max(0, columns_behind(w, num_computed, size)) for w in self.windows]

    def without_passed(self, block_ids: tuple[int, ...], num_computed: int) -> tuple[int, ...]:
        """What a window has moved past is read no more, and may be another's."""
        if self.windows == (None,):
            return block_ids
        first, num_groups = self.first_columns(num_computed), len(self.windows)
        return tuple(0 if i // num_groups < first[i % num_groups] else b for i, b in enumerate(block_ids))

    def check_content(self, request_id: str, contents: Contents) -> None:
        """Every computed position of the row holds the content of the request's own prefix."""
        num_known, block_ids, num_computed = self.rows[request_id]
        _require(num_computed < num_known, f"{request_id} has nothing to compute")
        held = [block_id for block_id in block_ids if block_id]
        _require(len(set(held)) == len(held), f"{request_id} has a block twice")
        size, num_groups = self.block_size, len(self.windows)
        for group, first in enumerate(self.first_columns(num_computed)):
            own_ids = block_ids[first * num_groups + group :: num_groups]
            kept = [slot for b in own_ids for slot in self.slots[b * size : (b + 1) * size]][
                : num_computed - first * size
            ]
            expected = [in_group(number, group) for number in contents.of[request_id][first * size : num_computed]]
            _require(kept == expected, f"{request_id}'s KV is not its own: {kept}")


def in_group(number: int, group: int) -> int:
    """The content of one group's slots: other than any other group's for the same tokens."""
    return number + 1000 * group


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise PlanViolation(message)


# --- which worlds there are -------------------------------------------------------------------------------------------


def _mixes() -> dict[str, tuple[Spec, ...]]:
    """Requests by what they have in common. `a` arrives first."""
    say = (21, 22, 23)
    return {
        "one prefix": (
            Spec((11, 12, 13, 14), say, priority=1, tenant="t"),
            Spec((11, 12, 13, 14, 15), (22, EOS), tenant="t"),
            Spec((11, 12, 21), (STOP,), priority=1, tenant="u"),
        ),
        "equal": (
            Spec((11, 12, 13), say, priority=1, tenant="t"),
            Spec((11, 12, 13), (21, EOS, 23), priority=1, tenant="t"),
            Spec((11, 12, 13), say[:1], tenant="t"),
        ),
        "unlike": (
            Spec((31, 32, 33, 34, 35), say[:2], priority=1, tenant="t"),
            Spec((41,), say, priority=0, tenant="u"),
            Spec((51, 52, 53), say[:2], priority=1, tenant="t"),
        ),
        "growing": (
            Spec((31,), say, tenant="t"),
            Spec((41, 42), say, priority=1, tenant="t"),
            Spec((51,), say, tenant="u"),
        ),
        "continued": (  # b's prompt is a's whole sequence, without the end
            Spec((11, 12), say, tenant="t"),
            Spec((11, 12, 21, 22), (31, STOP), priority=1, tenant="t"),
            Spec((11, 12, 21), say[1:], tenant="t"),
        ),
    }


WINDOWS: dict[str, tuple[int | None, ...]] = {
    "full and sliding": (None, 3),
    "sliding only": (2,),
    "two windows": (4, None, 1),
}
"""Groups of layers, in hybrid worlds."""

_FOURTH = Spec((11, 12), (21, 23), priority=1, tenant="u")

_POLICIES: tuple[dict[str, Any], ...] = (
    {"scheduling_policy": "fcfs"},
    {"scheduling_policy": "priority", "priority_aging_s": 2.0},
    {"scheduling_policy": "lpm", "lpm_max_overtakes": 1, "lpm_window": 2},
    {"scheduling_policy": "fair"},
)

_POOLS = (
    (2, 0, 3, 3),
    (2, 0, 6, 2),
    (2, 1, 4, 3),
    (2, 4, 6, 3),
    (1, 0, 3, 3),
    (1, 1, 5, 3),
    (2, 2, 2, 2),
    (2, 0, 1, 1),
)
"""Block size, blocks beyond those of the longest sequence, tokens and sequences in a step."""

_SWITCHES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "no cache": {"enable_prefix_caching": False},
    "no reservation": {"reserve_full_sequence": False},
    "no reservation, no cache": {"reserve_full_sequence": False, "enable_prefix_caching": False},
    "whole prompts": {"enable_chunked_prefill": False},
    "watermark": {"watermark": 0.25, "adaptive_watermark": False},
    "no look-ahead": {"admission_lookahead": 0, "adaptive_watermark": False},
    "look-ahead": {"admission_lookahead": 2, "lookahead_age_limit_s": 2.0},
    "one preemption": {"max_preemptions": 1, "adaptive_watermark": False},
    "chunks of 2": {"long_prefill_token_threshold": 2, "reserve_full_sequence": False},
    "all to one prompt": {"max_prefill_share": 1.0, "admission_lookahead": 1},
}


def plain_worlds(num_requests: int = 3, *, aborts: bool = True) -> Iterator[SmallWorld]:
    """Every mix of requests in every pool under every policy and with every switch."""
    for (mix, specs), pool, policy, switch in product(_mixes().items(), _POOLS, _POLICIES, _SWITCHES):
        block_size, num_spare, num_tokens, num_seqs = pool
        longest = max(len(spec.token_ids) for spec in specs)
        options = {
            "block_size": block_size,
            "num_blocks": -(-longest // block_size) + num_spare,
            "max_num_batched_tokens": num_tokens,
            "max_num_seqs": num_seqs,
        }
        yield SmallWorld(
            f"{mix}; blocks of {block_size}, {num_spare} spare, {num_tokens} tokens, {num_seqs} seqs; "
            f"{policy['scheduling_policy']}; {switch}",
            (*specs, _FOURTH)[:num_requests],
            options | policy | _SWITCHES[switch],
            aborts=aborts,
        )


def special_worlds(num_requests: int = 3) -> Iterator[SmallWorld]:
    """What the environment may do besides: pause, reset, be late with a grammar, guess, fail, run out of patience."""
    for i, world in enumerate(plain_worlds(num_requests, aborts=False)):
        a, b, *others = world.specs
        match i % 8:
            case 0:
                yield replace(world, name=f"pauses; {world.name}", pauses=(PauseMode.KEEP, PauseMode.WAIT))
            case 1:
                yield replace(world, name=f"resets, pause; {world.name}", resets=True, pauses=(PauseMode.ABORT,))
            case 2:
                waits = (replace(a, grammar="late"), replace(b, grammar="bad" if i % 16 == 2 else "late"), *others)
                # Without a margin that melts: no two of the steps that only wait for a grammar would be the same.
                steady = world.options | {"adaptive_watermark": False}
                yield replace(world, name=f"grammars; {world.name}", specs=waits, options=steady)
            case 3:
                yield replace(world, name=f"drafts; {world.name}", drafts=True, aborts=True)
            case 4:
                yield replace(world, name=f"faults; {world.name}", num_faults=1)
            case 5:
                late = world.options | {"request_deadline_s": 6.0, "first_token_deadline_s": 4.0}
                yield replace(world, name=f"deadlines; {world.name}", options=late)
            case 6:
                yield replace(world, name=f"drafts, faults; {world.name}", drafts=True, num_faults=1)
            case 7:
                tuned = (replace(a, adapter="x"), replace(b, adapter="y"), *others)
                one = world.options | {"max_adapters": 1}
                yield replace(world, name=f"adapters; {world.name}", specs=tuned, options=one, aborts=True)


def hybrid_worlds(num_requests: int = 3) -> Iterator[SmallWorld]:
    """The worlds above, plain ones and special ones in turn, over several groups of layers."""
    both = chain.from_iterable(zip(plain_worlds(num_requests), special_worlds(num_requests), strict=True))
    for world, (name, windows) in zip(both, cycle(WINDOWS.items())):
        yield replace(world, name=f"{name}; {world.name}", options=world.options | {"kv_windows": windows})
