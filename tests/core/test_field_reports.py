"""Faults that users of other servers ran into, each as a kind: `docs/field_reports.md` says what they are and where the
rest of them is tested. Ids are those of that table."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import World, solo_output

import noria.kv.prefix as prefix
from noria.config import SchedulerConfig
from noria.core.events import FinishReason
from noria.errors import ContextLengthError, OptionError, UnavailableError
from noria.fakes.runner import PlanViolation
from noria.kv.prefix import PrefixKey

POLICIES = ["fcfs", "priority", "lpm", "fair"]
ROOT = Path(__file__).parents[2]

# --- A: admission, scheduling, fairness ---


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("num_blocks", "num_prompt"), [(32, 200), (32, 128), (32, 511), (1, 4)])
def test_a1_a_prompt_bigger_than_the_pool_is_refused_at_once_and_others_are_served(policy, num_blocks, num_prompt):
    world = World(num_blocks=num_blocks, block_size=4, scheduling_policy=policy)
    with pytest.raises(ContextLengthError, match=rf"{num_prompt} tokens.*{4 * num_blocks} tokens"):
        world.add("too big", num_prompt, max_tokens=None)
    world.add("small", min(10, 4 * num_blocks - 1), max_tokens=1)
    world.run()
    assert len(world.outputs["small"]) == 1


def test_a1_a_context_longer_than_the_pool_is_never_promised():
    with pytest.raises(OptionError, match=r"max_model_len 512 does not fit.*32 blocks x 4"):
        World(num_blocks=32, block_size=4, max_model_len=512)


@pytest.mark.parametrize("num_prompt", [1, 4, 27, 28, 31])
@pytest.mark.parametrize("is_alone", [True, False])
def test_a2_a_request_that_reaches_the_wall_of_the_pool_ends_there(num_prompt, is_alone):
    world = World(num_blocks=8, block_size=4)
    world.add("r", num_prompt, max_tokens=None, ignore_eos=True)
    if not is_alone:
        world.add("other", 8, max_tokens=None, ignore_eos=True)
    plans = world.run(max_steps=200)
    assert world.reasons["r"] is FinishReason.LENGTH
    assert len(world.outputs["r"]) == 32 - num_prompt
    assert all(p.request_id != p.in_favour_of or not is_alone for plan in plans for p in plan.preemptions)
    assert not (is_alone and any(plan.preempted for plan in plans))


def test_a2_prompt_and_max_tokens_beyond_the_pool_are_refused_at_the_door():
    world = World(num_blocks=8, block_size=4)
    with pytest.raises(
        ContextLengthError,
        match="28 tokens and max_tokens is 16, together 44, but this model's maximum context length is 32",
    ):
        world.add("r", 28, max_tokens=16, ignore_eos=True)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("num_prompt", [1000, 4096])
def test_a7_a_giant_prompt_holds_up_nobody_and_advances_in_every_step(policy, num_prompt):
    world = World(num_blocks=1100, block_size=4, max_num_batched_tokens=64, max_num_seqs=32, scheduling_policy=policy)
    world.add("giant", num_prompt, max_tokens=2, tenant="g")
    world.step()
    for number in range(20):
        world.add(f"short{number}", 8, max_tokens=4, tenant="s")
    for _ in range(8):
        before = world.requests["giant"].num_computed
        world.step()
        assert world.requests["giant"].num_computed > before
    assert all(output for request_id, output in world.outputs.items() if request_id != "giant")
    world.run()


@pytest.mark.parametrize("policy", ["fcfs", "priority", "lpm"])
@pytest.mark.parametrize("needs", [(10, 2, 2), (7, 6), (12, 1, 1, 1, 1)])
def test_a8_small_requests_pass_a_head_that_does_not_fit_and_it_is_not_starved(policy, needs):
    """6 blocks are free. (Policy fair lets nobody pass, for its bound.)"""
    world = World(num_blocks=13, block_size=4, scheduling_policy=policy, adaptive_watermark=False)
    world.add("running", 26, max_tokens=2)
    world.step()
    for number, num_blocks in enumerate(needs):
        world.add(f"r{number}", 4 * num_blocks - 1, max_tokens=1)
    plan = world.step()
    assert [a.request_id for a in plan.admitted] == [f"r{number}" for number in range(1, len(needs))]
    number = 100
    since_s = world.clock()
    while "r0" not in world.reasons:
        world.add(f"r{number}", 7, max_tokens=3)
        number += 1
        world.step()
        assert world.clock() < since_s + 10


@pytest.mark.parametrize("num_slots", [1, 2, 4])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_a10_an_urgent_request_takes_the_place_of_a_strictly_lower_class(num_slots, enable_prefix_caching):
    world = World(
        max_num_seqs=num_slots, scheduling_policy="priority", enable_prefix_caching=enable_prefix_caching
    )  # fmt: skip
    for number in range(num_slots):
        world.add(f"low{number}", 5, max_tokens=40, priority=10)
    world.step()
    world.add("equal", 5, priority=10)
    assert not world.step().preempted
    world.add("urgent", 5, max_tokens=1, priority=0)
    assert "urgent" in world.step().num_scheduled_tokens
    world.run()
    for number in range(num_slots):
        request = world.requests[f"low{number}"]
        assert world.outputs[f"low{number}"] == solo_output(request.token_ids[:5], max_tokens=40)


@pytest.mark.parametrize(("policy", "bound_s"), [("priority", 10 * 5.0), ("lpm", 8 * 2.0), ("fcfs", 4.0)])
def test_a11_nobody_waits_without_limit_behind_endless_arrivals(policy, bound_s):
    """One slot; every newcomer is more urgent and finds its prompt in the cache. A step takes a second."""
    world = World(max_num_seqs=1, scheduling_policy=policy, priority_aging_s=5.0, lpm_max_overtakes=8, block_size=4)
    hot = list(range(500, 512))
    world.add("hot", hot, max_tokens=1)
    world.run()
    world.add("hot0", [*hot, 0], max_tokens=2)
    world.add("cold", 9, max_tokens=1, priority=10)
    since_s, number = world.clock(), 0
    while "cold" not in world.reasons:
        number += 1
        world.add(f"hot{number}", [*hot, number], max_tokens=2)
        world.step()
        world.step()
        assert world.clock() - since_s <= bound_s + 6
    assert policy == "fcfs" or world.clock() - since_s >= bound_s - 6, "it is the bound that ended the wait"


@pytest.mark.parametrize("policy", ["fcfs", "priority", "lpm"])
def test_a12_begun_work_is_resumed_before_earlier_arrivals_of_its_class_that_never_ran(policy):
    world = World(num_blocks=8, block_size=4, max_num_seqs=2, scheduling_policy=policy, adaptive_watermark=False)
    world.add("a", 7, max_tokens=20)
    world.add("big", 31, max_tokens=1)  # earlier than b, and never started
    world.add("b", 7, max_tokens=20)
    while not world.requests["b"].num_preemptions:
        world.step()
    assert next(iter(world.scheduler.waiting.order())).request_id == "b"
    world.run()


@pytest.mark.parametrize("num_prompts", [10, 50])
def test_a14_a_small_tenant_is_served_next_whatever_the_others_backlog(num_prompts):
    world = World(num_blocks=1024, max_num_batched_tokens=64, max_num_seqs=2, scheduling_policy="fair")
    for number in range(num_prompts):
        world.add(f"a{number}", 500, max_tokens=2, tenant="a")
    for _ in range(4):
        world.step()
    waits = []
    for number in range(5):
        world.add(f"b{number}", 20, max_tokens=1, tenant="b")
        since_s = world.clock()
        while f"b{number}" not in world.reasons:
            world.step()
        waits.append(world.clock() - since_s)
    assert max(waits) <= 2 * 500 / 64 + 2, "until one of a's two prompts in progress is done"


def test_a15_a_flood_is_cut_at_the_cap_and_says_the_numbers():
    world = World(num_blocks=64, max_num_seqs=2, max_num_queued_reqs=100, max_num_queued_tokens=1000)
    refusals = []
    for number in range(5000):
        try:
            world.add(f"r{number}", 5 if number % 2 else 100, max_tokens=1)
        except UnavailableError as refusal:
            refusals.append(refusal)
    assert {refusal.code for refusal in refusals} == {"queue_full"}
    assert all(re.search(r"\d+.*\d+.*\d+", str(refusal)) for refusal in refusals)
    assert len(world.scheduler.waiting) <= 102
    assert world.scheduler.waiting.num_queued_tokens <= 1000 + 100
    assert len(refusals) >= 5000 - 102
    world.run()


# --- B: KV blocks and the prefix cache ---


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("num_blocks_of_prompt", [1, 2, 3])
def test_b1_a_prompt_of_whole_blocks_that_is_fully_cached_says_the_same_again(block_size, num_blocks_of_prompt):
    world = World(block_size=block_size)
    prompt = range(50, 50 + block_size * num_blocks_of_prompt)
    for request_id in ("cold", "warm", "warm too"):
        world.add(request_id, prompt, max_tokens=6)
        world.run()
    assert world.requests["warm"].num_cached_tokens == block_size * (num_blocks_of_prompt - 1)
    assert world.outputs["cold"] == world.outputs["warm"] == world.outputs["warm too"]


@pytest.mark.parametrize("num_own", range(1, 6))
@pytest.mark.parametrize("num_shared_blocks", [1, 2])
def test_b3_a_preempted_request_that_resumes_onto_shared_blocks_goes_on_where_it_was(num_own, num_shared_blocks):
    world = World(num_blocks=8, block_size=4, adaptive_watermark=False)
    shared = list(range(50, 50 + 4 * num_shared_blocks))
    prompts = {r: [*shared, *range(start, start + num_own)] for r, start in (("a", 500), ("b", 600))}
    for request_id, prompt in prompts.items():
        world.add(request_id, prompt, max_tokens=16)
        world.step()
    plans = world.run()
    resumed = [a for plan in plans for a in plan.admitted]
    assert resumed, "the pressure is real"
    assert all(a.num_computed_tokens >= len(shared) for a in resumed)
    for request_id, prompt in prompts.items():
        assert world.outputs[request_id] == solo_output(prompt, max_tokens=16)


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("num_outputs", range(1, 10))
def test_b4_a_preemption_at_any_output_length_loses_and_repeats_nothing(num_outputs, enable_prefix_caching):
    """Forced between two steps; with logprobs, which must come once for each token."""
    world = World(block_size=4, enable_prefix_caching=enable_prefix_caching)
    request = world.add("r", 6, max_tokens=14, logprobs=0)
    positions = []
    while world.scheduler.has_unfinished:
        if request.num_output_tokens == num_outputs and not request.num_preemptions:
            world.preempt("r")
        for event in world.update(world.schedule()):
            assert [logprob.token_id for logprob in event.logprobs] == list(event.token_ids)
            positions += event.token_ids
    assert request.num_preemptions == 1
    assert positions == solo_output(request.token_ids[:6], max_tokens=14)


@pytest.mark.parametrize("max_num_seqs", [2, 20])
def test_b5_fresh_prompts_never_go_on_with_somebody_elses_conversation(max_num_seqs):
    """The runner compares the KV under every position with the request's own tokens."""
    word = 77
    world = World(num_blocks=128, block_size=4, max_num_seqs=max_num_seqs, script={"chat": [word] * 12})
    world.add("chat", [*range(50, 60), word, *range(60, 70)], max_tokens=12)
    world.run()
    for number in range(20):
        world.add(f"fresh{number}", [*range(50, 50 + number % 11), 10**6 + number], max_tokens=8)
    world.run()
    for number in range(20):
        request = world.requests[f"fresh{number}"]
        assert word not in world.outputs[f"fresh{number}"]
        assert world.outputs[f"fresh{number}"] == solo_output(
            request.token_ids[: request.num_prompt_tokens], max_tokens=8
        )
        assert request.num_cached_tokens in range(0, number % 11 + 1, 4)


KEYS = st.builds(
    PrefixKey,
    weights_version=st.sampled_from(["", "a", "ab"]),
    adapter=st.sampled_from([None, "", "a", "b"]),
    tenant=st.sampled_from([None, "", "a", "b"]),
    salt=st.sampled_from([None, "", "a", "b"]),
)
TOKENS = st.lists(st.integers(0, 3), min_size=2, max_size=6)


@settings(max_examples=300, deadline=None)
@given(keys=st.tuples(KEYS, KEYS), tokens=st.tuples(TOKENS, TOKENS))
def test_b8_two_blocks_have_one_name_only_if_all_that_decides_their_content_is_equal(keys, tokens):
    """256 bits over key and all tokens so far, so nothing else is compared on a hit."""
    hashes: list[list[bytes]] = [[], []]
    for own, key, token_ids in zip(hashes, keys, tokens, strict=True):
        prefix.extend_block_hashes(own, key.root(), token_ids, 2)
    assert all(len(block_hash) == 32 for own in hashes for block_hash in own)
    for first, block_hash in enumerate(hashes[0]):
        for second, other in enumerate(hashes[1]):
            are_equal = keys[0] == keys[1] and tokens[0][: 2 * first + 2] == tokens[1][: 2 * second + 2]
            assert (block_hash == other) is are_equal


def test_b8_if_names_did_collide_the_first_wrong_block_would_be_seen(monkeypatch):
    class Constant:
        def __init__(self, data: bytes) -> None:
            pass

        def digest(self) -> bytes:
            return b"same"

    monkeypatch.setattr(prefix, "sha256", Constant)
    world = World(block_size=4)
    world.add("a", 5, max_tokens=1)
    world.run()
    world.add("b", 5, max_tokens=1)
    with pytest.raises(PlanViolation, match="is not its own"):
        world.run()


@pytest.mark.parametrize("part", ["tenant", "salt"])
def test_b9_nobody_finds_what_another_tenant_has_computed(part):
    world = World(block_size=4)
    for request_id, whose, num_cached in [("a", "a", 0), ("again", "a", 12), ("b", "b", 0), ("b again", "b", 12)]:
        request = world.add(request_id, range(50, 64), prefix_key=PrefixKey(**{part: whose}))
        world.run()
        assert request.num_cached_tokens == num_cached


def test_b10_blocks_of_other_weights_are_not_found():
    world = World(block_size=4)
    for request_id, version, num_cached in [("1", "W1", 0), ("2", "W1", 12), ("3", "W2", 0), ("4", "W2", 12)]:
        request = world.add(request_id, range(50, 64), prefix_key=PrefixKey(weights_version=version))
        world.run()
        assert request.num_cached_tokens == num_cached


@pytest.mark.parametrize("num_blocks", [2, 3, 5])
def test_b13_leaves_are_evicted_before_their_parents(num_blocks):
    """A cache full of one sequence, then one other block: all but the last block are still of use."""
    world = World(num_blocks=num_blocks, block_size=2)
    prompt = list(range(50, 50 + 2 * num_blocks - 1))
    world.add("a", prompt, max_tokens=1)
    world.run()
    world.add("other", [900], max_tokens=1)
    world.run()
    world.add("other too", [901, 902, 903] if num_blocks > 2 else [901], max_tokens=1)
    world.run()
    request = world.add("again", prompt, max_tokens=1)
    world.run()
    assert request.num_cached_tokens == 2 * max(0, num_blocks - 1 - (1 if num_blocks > 2 else 0))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_b15_nothing_grows_with_the_number_of_requests_served(policy, enable_prefix_caching):
    world = World(
        num_blocks=8, block_size=4, scheduling_policy=policy, enable_prefix_caching=enable_prefix_caching,
        num_records_kept=4, request_deadline_s=1e9, first_token_deadline_s=1e9,
    )  # fmt: skip
    sizes: list[list[int]] = [[], []]
    for number in range(1200):
        world.add(f"r{number}", 5, max_tokens=1, tenant=str(number % 50), priority=number % 7)
        world.run()
        if number % 9 == 0:
            sizes[number // 600].append(size_of_everything(world.scheduler))
    assert max(sizes[1]) <= 1.05 * max(sizes[0]), "some tables are tidied now and then only"


def size_of_everything(root: object) -> int:
    """The number of entries in all containers that can be reached from `root` within noria's own objects."""
    seen: set[int] = set()
    total, stack = 0, [root]
    while stack:
        thing = stack.pop()
        if id(thing) in seen or isinstance(thing, str | bytes | int | float | type | None):
            continue
        seen.add(id(thing))
        if isinstance(thing, dict):
            total += len(thing)
            stack += [*thing.keys(), *thing.values()]
        elif isinstance(thing, list | tuple | set | frozenset) or type(thing).__name__ in ("deque", "OrderedDict"):
            total += len(thing)
            stack += list(thing)
        elif type(thing).__module__.startswith("noria") and not isinstance(thing, SchedulerConfig):
            names = [n for c in type(thing).__mro__ for n in getattr(c, "__slots__", ())]
            stack += [getattr(thing, n) for n in names if hasattr(thing, n)]
            stack += vars(thing).values() if hasattr(thing, "__dict__") else []
    return total


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("reserve_full_sequence", [True, False])
@pytest.mark.parametrize("num_prompt", [5, 20, 27])
def test_b16_bursts_beyond_the_pool_are_waited_out(policy, reserve_full_sequence, num_prompt):
    world = World(
        num_blocks=10, block_size=4, max_num_batched_tokens=8, scheduling_policy=policy,
        reserve_full_sequence=reserve_full_sequence,
    )  # fmt: skip
    for burst in range(3):
        for number in range(6):
            world.add(f"r{burst}-{number}", num_prompt, max_tokens=12, tenant=str(number % 2), priority=number % 3)
        for _ in range(10):
            world.step()
    world.run()
    assert set(world.reasons.values()) == {FinishReason.LENGTH}
    assert all(len(output) == 12 for output in world.outputs.values())


# --- C: aborts and leaks ---


def mid_chunk(world: World) -> None:
    world.step()


def nothing(world: World) -> None:
    pass


def decoding(world: World) -> None:
    for _ in range(6):
        world.step()


def preempted(world: World) -> None:
    decoding(world)
    for request_id in [r for r in world.requests if r in world.scheduler.running]:
        world.preempt(request_id)


@pytest.mark.parametrize("num_sequences", [1, 4])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("reach", [nothing, mid_chunk, decoding, preempted])
def test_c3_aborting_in_any_state_gives_everything_back(reach, policy, num_sequences):
    world = World(num_blocks=40, block_size=4, max_num_batched_tokens=12, scheduling_policy=policy)
    for index in range(num_sequences):
        world.add(f"r-{index}", range(50, 68), max_tokens=20)
    reach(world)
    for request_id in list(world.requests):
        assert world.finish(request_id) is not None
    world.step()
    assert world.scheduler.kv.pool.num_free_blocks == world.config.num_blocks
    assert not world.scheduler.has_unfinished
    assert world.scheduler.waiting.num_queued_tokens == 0
    assert not world.scheduler.kv._holdings
    assert not world.scheduler.kv._claims


def test_c3_a_request_that_ends_in_its_first_step_gives_everything_back():
    world = World(block_size=4)
    world.add("r", 9, max_tokens=1)
    plan = world.schedule()
    assert world.finish("r") is not None
    world.update(plan)
    assert world.scheduler.kv.pool.num_free_blocks == world.config.num_blocks


def test_c4_hundreds_of_cut_requests_leave_the_next_one_its_place():
    world = World(num_blocks=16, block_size=4, max_num_seqs=2)
    for number in range(500):
        world.add(f"cut{number}", 5, max_tokens=50)
        world.step()
        world.step()
        world.finish(f"cut{number}")
    world.add("r", 5, max_tokens=3)
    assert len(world.run()) == 3


# --- the table ---


EXPECTED = """
A1 A2 A4 A7 A8 A10 A11 A12 A14 A15 B1 B3 B4 B5 B8 B9 B10 B11 B13 B15 B16 B17 C1 C3 C4 C6 D1 D2 D4 D5 D7 D8 E1 E4
F1 F3 F4 F6 F8 F9 G1 G2 G4 G7 G8 H1 H2 H3 H4 H6 H7 H8 H10 H12 H14 H15 I1 I3 I4 J1 J3 J5
K1 K2
"""


def named_tests() -> dict[str, list[tuple[str, str]]]:
    """The (file, test) pairs of each report. A test may be named by its beginning, or be empty for a whole file."""
    text = (ROOT / "docs" / "field_reports.md").read_text()
    rows = re.findall(r"^\| ([A-Z]\d+) \| (.+?) \| (.+?) \|$", text, flags=re.MULTILINE)
    assert [row[0] for row in rows] == EXPECTED.split()
    found = {report: re.findall(r"`([\w/]+\.py)(?:::(test_\w+))?`", where) for report, _, where in rows}
    assert all(found[report] or where.startswith("Does not apply: ") for report, _, where in rows)
    return found


def functions_of(file: str) -> list[str]:
    return re.findall(r"^(?:async )?def (test_\w+)\(", (ROOT / file).read_text(), flags=re.MULTILINE)


def test_every_report_of_the_table_names_a_test_that_exists_or_a_reason():
    for report, named in named_tests().items():
        for file, test in named:
            assert (ROOT / file).is_file(), f"{report}: {file}"
            assert not test or any(name.startswith(test) for name in functions_of(file)), f"{report}: {file}::{test}"


@pytest.mark.parametrize("directory", ["core", "engine", "models", "server"])
def test_every_test_of_a_report_is_in_the_table(directory):
    file = f"tests/{directory}/test_field_reports.py"
    named = {test for tests in named_tests().values() for path, test in tests if path == file}
    own = [test for test in functions_of(file) if re.match(r"test_[a-z]\d*_", test)]
    assert len(own) > 2
    assert [test for test in own if not any(test.startswith(each) for each in named)] == []
