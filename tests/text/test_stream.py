"""The text pipeline: the same text, stop and count of tokens in any bunching, against a naive model."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from hypothesis import example, given
from hypothesis import strategies as st

from noria.fakes.tokenizer import ByteTokenizer
from noria.sampling import SamplingParams
from noria.text.stream import TextDelta, TextStream

TOKENIZER = ByteTokenizer()


@dataclass
class Expected:
    text: str
    num_tokens: int
    stop: str | None


def naive(ids: list[int], sampling: SamplingParams) -> Expected:
    """Looks at the whole text after each token; what the pipeline must amount to."""
    unheard = set() if sampling.include_stop_str_in_output else {*sampling.stop_token_ids, TOKENIZER.EOS}
    if sampling.skip_special_tokens:
        unheard |= {*TOKENIZER.special_token_ids}
    datas = [
        b"".join(TOKENIZER.token_bytes(i) for i in ids[:num_tokens] if i not in unheard)
        for num_tokens in range(len(ids) + 1)
    ]
    text = datas[-1].decode("utf-8", "replace")
    num_settled = [num_settled_characters(data) for data in datas]

    def num_tokens_at(end: int) -> int:
        return next((n for n, settled in enumerate(num_settled) if settled >= end), len(ids))

    ends = [
        (begin + len(stop), -len(stop), stop)
        for stop in sampling.stop
        for begin in range(len(text))
        if text.startswith(stop, begin)
        and (sampling.min_tokens == 0 or num_tokens_at(begin + len(stop)) > sampling.min_tokens)
    ]
    if not ends:
        return Expected(text, len(ids), None)
    end, _, stop = min(ends)
    num_tokens = num_tokens_at(end)
    return Expected(text[: end if sampling.include_stop_str_in_output else end - len(stop)], num_tokens, stop)


def num_settled_characters(data: bytes) -> int:
    """How many characters `data` certainly begins, whatever follows: not counting one that may still be completed."""
    for num_tail in (1, 2, 3):
        for num_more in (1, 2, 3):
            for more in product(b"\x80\x90\xa0\xbf", repeat=num_more):
                if is_one_character(data[-num_tail:] + bytes(more)):
                    return len(data[:-num_tail].decode("utf-8", "replace"))
    return len(data.decode("utf-8", "replace"))


def is_one_character(data: bytes) -> bool:
    try:
        return len(data) > 1 and len(data.decode()) == 1
    except UnicodeDecodeError:
        return False


def run(ids: list[int], cuts: list[int], sampling: SamplingParams) -> tuple[Expected, list[TextDelta]]:
    stream = TextStream(TOKENIZER, sampling, ())
    bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    deltas: list[TextDelta] = []
    for index in range(len(bounds) - 1):
        bunch = ids[bounds[index] : bounds[index + 1]]
        deltas.append(stream.push(bunch, final=index == len(bounds) - 2))
        if deltas[-1].stop is not None:
            break
    text = "".join(delta.text for delta in deltas)
    return Expected(text, sum(delta.num_tokens for delta in deltas), deltas[-1].stop), deltas


few_letters = st.text("ab<é😀", max_size=24)
stops = st.lists(st.text("ab<é😀", min_size=1, max_size=5) | st.just("\ufffd"), max_size=4)
output_ids = st.one_of(
    few_letters.map(lambda text: list(text.encode())),
    st.lists(st.sampled_from([*b"ab<", 0xC3, 0xA9, 0xF0, 0x9F, 0x98, 0x80, 256, 257]), max_size=24),
)


@given(
    output_ids,
    st.lists(st.integers(0, 24), max_size=8),
    stops,
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from((0, 0, 1, 2, 5)),
)
@example(list(b"abab"), [1, 2, 3], ["abb", "ba"], False, True, False, 0)
@example(list(b"ababa"), [1, 2, 3], ["aba"], False, True, False, 3)
def test_any_bunching_gives_what_the_naive_model_gives(
    ids: list[int], cuts: list[int], stop: list[str], include: bool, skip: bool, stop_on_a: bool, min_tokens: int
) -> None:
    sampling = SamplingParams(
        stop=tuple(stop),
        include_stop_str_in_output=include,
        skip_special_tokens=skip,
        stop_token_ids=(ord("a"),) if stop_on_a else (),
        min_tokens=min_tokens,
    )
    expected = naive(ids, sampling)
    assert run(ids, [], sampling)[0] == expected
    assert run(ids, cuts, sampling)[0] == expected
    assert run(ids, list(range(len(ids))), sampling)[0] == expected


@given(few_letters, stops.filter(bool))
def test_only_what_may_become_a_stop_string_is_held_back(text: str, stop: list[str]) -> None:
    stream = TextStream(TOKENIZER, SamplingParams(stop=tuple(stop)), ())
    given_out = ""
    for position, character in enumerate(text, start=1):
        delta = stream.push(list(character.encode()), final=False)
        given_out += delta.text
        if delta.stop is not None:
            return
        seen = text[:position]
        held = max((k for s in stop for k in range(len(s)) if seen.endswith(s[:k])), default=0)
        assert given_out == seen[: position - held]


def test_the_first_to_complete_wins_and_of_equals_the_longest() -> None:
    def outcome(text: str, *stop: str, include: bool = False) -> tuple[str, str | None]:
        sampling = SamplingParams(stop=stop, include_stop_str_in_output=include)
        delta = TextStream(TOKENIZER, sampling, ()).push(list(text.encode()), final=True)
        return delta.text, delta.stop

    assert outcome("one END two", "two", "END") == ("one ", "END")
    assert outcome("abcdef", "bcde", "cd") == ("ab", "cd")
    assert outcome("abcdef", "cd", "bcd", "d") == ("a", "bcd")
    assert outcome("abcdef", "cd", include=True) == ("abcd", "cd")
    assert outcome("abcdef", "x", "fg") == ("abcdef", None)


def test_a_stop_string_counts_once_enough_tokens_have_come() -> None:
    stream = TextStream(TOKENIZER, SamplingParams(stop=("END",), min_tokens=4), ())
    assert stream.push(list(b"END"), final=False) == TextDelta("END", 3, None)
    assert stream.push(list(b"xE"), final=False) == TextDelta("x", 2, None)
    assert stream.push(list(b"NDy"), final=False) == TextDelta("", 2, "END")
    begun = TextStream(TOKENIZER, SamplingParams(stop=("END",), min_tokens=2), ())
    assert begun.push(list(b"END"), final=False) == TextDelta("", 3, "END"), "it may begin earlier"
    exact = TextStream(TOKENIZER, SamplingParams(stop=("END",), min_tokens=3), ())
    assert exact.push(list(b"END"), final=True) == TextDelta("END", 3, None)


def test_with_the_stop_string_included_nothing_is_held_back() -> None:
    stream = TextStream(TOKENIZER, SamplingParams(stop=("END",), include_stop_str_in_output=True), ())
    assert stream.push(list(b"xEN"), final=False) == TextDelta("xEN", 3, None)
    assert stream.push(list(b"Dyz"), final=False) == TextDelta("D", 1, "END")


def test_surplus_tokens_are_not_counted_and_pushes_after_the_end_are_empty() -> None:
    stream = TextStream(TOKENIZER, SamplingParams(stop=("!",)), ())
    assert stream.push(list(b"ab!cd"), final=False) == TextDelta("ab", 3, "!")
    assert stream.push(list(b"more"), final=True) == TextDelta("", 0, "!")
    ended = TextStream(TOKENIZER, SamplingParams(), ())
    assert ended.push([0xF0], final=True) == TextDelta("\ufffd", 1, None)
    assert ended.push([], final=True) == TextDelta("", 0, None)


def test_held_text_and_an_unfinished_character_are_released_at_the_end() -> None:
    stream = TextStream(TOKENIZER, SamplingParams(stop=("abc",)), ())
    assert stream.push([*b"xab", 0xC3], final=False) == TextDelta("x", 4, None)
    assert stream.push([], final=True) == TextDelta("ab\ufffd", 0, None)


def test_tokens_that_end_a_sequence_have_no_text() -> None:
    def text(ids: list[int], eos_token_ids: tuple[int, ...] | None = None, **params: object) -> str:
        sampling = SamplingParams(skip_special_tokens=False, **params)  # type: ignore[arg-type]
        return TextStream(TOKENIZER, sampling, (), eos_token_ids).push(ids, final=True).text

    assert text([*b"ab", 257]) == "ab"
    assert text([*b"ab", 257], ignore_eos=True) == "ab<eos>"
    assert text([*b"ab", 257], include_stop_str_in_output=True) == "ab<eos>"
    assert text([*b"ab", 256], eos_token_ids=(256, 257)) == "ab"
    assert text([*b"ab"], stop_token_ids=(ord("b"),)) == "a"
    assert text([*b"ab"], stop_token_ids=(ord("b"),), include_stop_str_in_output=True) == "ab"


def test_output_continues_the_prompt() -> None:
    prompt = list("naïve"[:3].encode())[:-1]
    stream = TextStream(TOKENIZER, SamplingParams(), prompt)
    assert stream.push([0xAF, *b"ve"], final=True).text == "ïve"
