"""Fair shares between tenants: the bound of policy fair, in exact integers, and the published experiments around it.

The service is counted from plans and results (`fairness.ServiceMeter`), not from the policy's own counters.
"""

import random

import pytest
from fairness import ServiceMeter, bound
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import Job, Simulation
from worlds import World

from noria.config import SchedulerConfig
from noria.core.policies.fair import FairPolicy

# --- the bound, over every interval in which both wait ---


def step(world: World, meter: ServiceMeter) -> None:
    plan = world.schedule()
    meter.planned(plan)
    for event in world.update(plan):
        meter.generated(world.requests[event.request_id].tenant, len(event.token_ids))
    meter.look()


class Grammar:
    def __init__(self) -> None:
        self.is_ready = False


@st.composite
def histories(draw):
    block_size = draw(st.sampled_from([1, 2, 4]))
    num_blocks = draw(st.integers(3, 14))
    config = {
        "num_blocks": num_blocks,
        "block_size": block_size,
        "max_num_batched_tokens": draw(st.sampled_from([1, 2, 4, 8, 24])),
        "max_num_seqs": draw(st.integers(1, 5)),
        "fair_prompt_weight": draw(st.integers(0, 3)),
        "fair_output_weight": draw(st.integers(0, 3)),
        "enable_prefix_caching": draw(st.booleans()),
        "adaptive_watermark": draw(st.booleans()),
        "max_prefill_share": draw(st.sampled_from([0.2, 0.5, 1.0])),
        "max_preemptions": draw(st.sampled_from([0, 1, 3])),
    }
    size = num_blocks * block_size
    arrive = st.tuples(
        st.just("arrive"), st.sampled_from("abc"), st.integers(1, size - 1), st.integers(1, size), st.integers(1, 5)
    )
    other = st.tuples(st.sampled_from(["step", "step", "abort", "grammar", "ready"]), st.integers(1, 8))
    return config, draw(st.booleans()), draw(st.lists(st.one_of(arrive, other), min_size=4, max_size=40))


def gap_and_bound(config, is_shared, history) -> tuple[int, int]:
    world = World(scheduling_policy="fair", **config)
    meter = ServiceMeter(world.scheduler)
    grammar: Grammar | None = None
    size = world.config.max_model_len
    for kind, *arguments in history:
        match kind:
            case "arrive":
                tenant, num_prompt, max_tokens, num_requests = arguments
                for _ in range(num_requests):
                    number = len(world.requests)
                    first = 50 if is_shared else 1000 * number
                    world.add(
                        f"r{number}",
                        range(first, first + num_prompt),
                        max_tokens=min(max_tokens, size - num_prompt),
                        tenant=tenant,
                    )
            case "step":
                for _ in range(arguments[0]):
                    step(world, meter)
            case "abort":
                alive = [request_id for request_id in world.requests if request_id not in world.reasons]
                if alive:
                    world.finish(alive[arguments[0] % len(alive)])
            case "grammar":
                if grammar is None:
                    grammar = Grammar()
                    world.add("grammar", 1, max_tokens=1, tenant="d", grammar=grammar)
            case "ready":
                if grammar is not None:
                    grammar.is_ready = True
        meter.look()
    if grammar is not None:
        grammar.is_ready = True
    while world.scheduler.has_unfinished:
        step(world, meter)
    return meter.gap, bound(world.config)


@settings(max_examples=150, deadline=None)
@given(history=histories())
def test_the_bound_holds_over_every_interval_in_which_both_wait(history):
    gap, most = gap_and_bound(*history)
    assert gap <= most


@pytest.mark.full
@settings(max_examples=5000, deadline=None)
@given(history=histories())
def test_the_bound_holds_in_many_more_worlds(history):
    gap, most = gap_and_bound(*history)
    assert gap <= most


def test_the_bound_is_not_far_above_what_happens():
    """Two slots of outputs alone, against prompts alone: within a quarter of the bound."""
    largest = 0.0
    for seed in range(40):
        numbers = random.Random(seed)
        size = 16
        config = {
            "num_blocks": size, "block_size": 1, "max_num_batched_tokens": 24, "max_num_seqs": 1,
            "fair_prompt_weight": numbers.randint(0, 1), "fair_output_weight": 1, "enable_prefix_caching": False,
        }  # fmt: skip
        history = [("arrive", "a", 1, size - 1, 9), ("arrive", "b", size - 1, 1, 9), ("step", 200)]
        numbers.shuffle(history[:2])
        gap, most = gap_and_bound(config, False, history)
        largest = max(largest, gap / most)
    assert largest > 0.4


# --- published experiments: tenants a and b, prompts and outputs of 64 tokens, a pool of 2,048, twice the load ---

NUM_PROMPT = NUM_OUTPUT = 64
DURATION_S = 300.0


def config_of(policy: str, **changes) -> SchedulerConfig:
    return SchedulerConfig(
        **{
            "num_blocks": 128, "block_size": 16, "max_num_batched_tokens": 256, "max_num_seqs": 64,
            "max_model_len": 2048, "scheduling_policy": policy, "max_num_queued_reqs": 100_000,
        } | changes
    )  # fmt: skip


def capacity_per_s() -> float:
    """Requests per second that this model and pool serve, measured."""
    jobs = [Job(0.0, number, NUM_PROMPT, NUM_OUTPUT, "a") for number in range(200)]
    simulation = Simulation(config_of("fcfs"), jobs).run()
    return 200 / simulation.now_s


def arrivals(rates: dict[str, float], until_s: float = DURATION_S, *, seed: int = 0, start_s: float = 0.0) -> list[Job]:
    numbers = random.Random(seed)
    jobs = []
    for tenant, rate in rates.items():
        now_s = start_s
        while (now_s := now_s + numbers.expovariate(rate)) < until_s:
            jobs.append(Job(now_s, 0, NUM_PROMPT, NUM_OUTPUT, tenant))
    jobs.sort(key=lambda job: job.arrival_s)
    for number, job in enumerate(jobs):
        job.number = number
    return jobs


class Served:
    """What a simulation gave to whom: the greatest gap, and the service within each tenth of the time."""

    def __init__(self, config: SchedulerConfig, jobs: list[Job], until_s: float = DURATION_S) -> None:
        self.until_s = until_s
        self.gaps: list[int] = []
        self.service_by_tenth: list[dict[str, int]] = []
        self._simulation = Simulation(config, jobs, watch=self._watch)
        self.meter = ServiceMeter(self._simulation.scheduler)
        self._planned = self._simulation.scheduler.schedule
        self._simulation.scheduler.schedule = self._schedule  # type: ignore[method-assign]
        self._simulation.run(until_s)
        self.num_tokens_per_s = self._simulation.num_output_tokens / self._simulation.now_s

    def _schedule(self, now_s):
        plan = self._planned(now_s)
        self.meter.planned(plan)
        return plan

    def _watch(self, simulation, plan, result) -> None:
        for request_id, token_ids in result.token_ids.items():
            self.meter.generated(simulation.requests[request_id].tenant, len(token_ids))
        self.meter.look()
        if simulation.now_s >= (len(self.gaps) + 1) * self.until_s / 10:
            self.gaps.append(self.meter.gap)
            self.service_by_tenth.append(dict(self.meter.service))

    def share(self, tenant: str, first: int, last: int) -> float:
        """Of all service from the end of tenth `first` to the end of tenth `last`."""
        begin, end = self.service_by_tenth[first], self.service_by_tenth[last]
        gains = {name: end[name] - begin.get(name, 0) for name in end}
        return gains[tenant] / sum(gains.values())


@pytest.fixture(scope="module")
def capacity() -> float:
    return capacity_per_s()


@pytest.fixture(scope="module")
def fair_and_fcfs(capacity) -> tuple[Served, Served]:
    jobs = arrivals({"a": 1.5 * capacity / 3, "b": 1.5 * capacity * 2 / 3})
    return Served(config_of("fair"), jobs), Served(config_of("fcfs"), jobs)


def test_under_overload_the_gap_stays_small_and_flat_with_fair(fair_and_fcfs):
    fair, _ = fair_and_fcfs
    published = 2 * max(1 * NUM_PROMPT, 2 * 2048)
    assert fair.meter.gap <= 0.3 * published
    assert fair.gaps[-1] <= 2 * fair.gaps[1], "as large after 60 s as after 300 s, about"


def test_under_overload_the_gap_grows_in_proportion_to_time_with_fcfs(fair_and_fcfs):
    fair, fcfs = fair_and_fcfs
    assert fcfs.gaps[-1] > 10 * fair.gaps[-1]
    middle, end = fcfs.gaps[4], fcfs.gaps[9]
    assert 1.6 <= end / middle <= 2.4, "twice the time, twice the gap"


def test_fairness_costs_no_throughput(fair_and_fcfs):
    fair, fcfs = fair_and_fcfs
    assert fair.num_tokens_per_s >= 0.98 * fcfs.num_tokens_per_s


class WithoutLift(FairPolicy):
    """The fault that the lift is there to prevent: idling saves up."""

    def note_admitted(self, request):
        pass


@pytest.mark.parametrize(
    ("policy", "least", "most"), [("fair", 0.4, 0.6), (f"{__name__}:WithoutLift", 0.7, 1.0)], ids=["lift", "no lift"]
)
def test_who_returns_gets_half_and_would_get_nearly_all_without_the_lift(capacity, policy, least, most):
    """b is away for the first half, in which a is served alone; then both ask for more than there is."""
    away = arrivals({"a": 1.5 * capacity})
    returned = arrivals({"b": 1.5 * capacity}, start_s=DURATION_S / 2, seed=1)
    jobs = [*away, *returned]
    for number, job in enumerate(jobs):
        job.number = number
    served = Served(config_of(policy), jobs)
    assert least <= served.share("b", 4, 9) <= most


def test_eight_tenants_with_unlike_demands_get_equal_shares_or_all_they_want(capacity):
    rates = {tenant: capacity * share for tenant, share in zip("abcdefgh", [0.03, 0.05, *[0.3] * 6], strict=True)}
    served = Served(config_of("fair"), arrivals(rates))
    shares = {tenant: served.share(tenant, 1, 9) for tenant in rates}
    modest = shares["a"] + shares["b"]
    assert modest == pytest.approx(0.08, abs=0.03), "they get what they ask for"
    for tenant in "cdefgh":
        assert shares[tenant] == pytest.approx((1 - modest) / 6, rel=0.1)


@pytest.mark.parametrize("lengths", [(16, 112), (112, 16)])
def test_shares_are_of_tokens_and_not_of_requests(capacity, lengths):
    num_prompt, num_output = lengths
    jobs = arrivals({"a": 1.5 * capacity, "b": 1.5 * capacity})
    for job in jobs:
        if job.tenant == "b":
            job.num_prompt, job.num_output = num_prompt, num_output
    served = Served(config_of("fair"), jobs)
    assert served.share("b", 1, 9) == pytest.approx(0.5, abs=0.05)


def test_a_small_tenants_delay_does_not_depend_on_the_others_backlog():
    """Tenant a: so many prompts of 500 tokens at once; b: one of 20 tokens each second."""
    worst_s = []
    for num_prompts in (20, 100):
        jobs = [Job(0.0, number, 500, 8, "a") for number in range(num_prompts)]
        jobs += [Job(1.0 + second, num_prompts + second, 20, 4, "b") for second in range(10)]
        first_token_s: dict[str, float] = {}

        def note(simulation, plan, result, first_token_s=first_token_s):
            for request_id in result.token_ids:
                first_token_s.setdefault(request_id, simulation.now_s)

        simulation = Simulation(config_of("fair"), jobs, watch=note).run()
        waits = [
            first_token_s[r] - simulation.requests[r].arrival_s for r in first_token_s if int(r[1:]) >= num_prompts
        ]
        worst_s.append(max(waits))
    assert worst_s[1] <= 1.1 * worst_s[0]
