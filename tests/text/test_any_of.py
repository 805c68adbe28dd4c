"""One regular expression for many texts finds what a search for each of them finds."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from noria.text.any_of import any_of

few_letters = st.text(alphabet="<a|]^-\\", max_size=5)


@given(st.lists(few_letters, max_size=8), st.text(alphabet="<a|]^-\\", max_size=30))
def test_it_matches_the_longest_at_each_place(texts: list[str], text: str) -> None:
    pattern = re.compile(f"(?=({any_of(texts)}))")
    found = {match.start(): match[1] for match in pattern.finditer(text)}
    expected: dict[int, str] = {}
    for sought in sorted(filter(None, texts), key=len):
        for start in range(len(text)):
            if text.startswith(sought, start):
                expected[start] = sought
    assert found == expected


def test_thousands_that_begin_alike_are_compiled_into_a_few_choices() -> None:
    texts = [f"<unused{i}>" for i in range(6000)]
    pattern = any_of(texts)
    assert len(pattern) < len("|".join(texts))
    assert re.fullmatch(pattern, "<unused5999>")
    assert not re.match(pattern, "<unused6000>")
    assert not re.match(any_of([]), "anything")


def test_long_texts_are_no_deep_expression() -> None:
    texts = ["<" + "a" * 5000 + ending for ending in (">", "|>", "b" * 3000)] + ["<", "<a"]
    pattern = re.compile(any_of(texts))
    assert all(pattern.fullmatch(text) for text in texts)
    assert not pattern.fullmatch(texts[0][:-1])


def test_texts_that_each_begin_with_the_one_before_are_no_deep_expression():
    texts = ["<" + "ab" * number for number in range(1_500)]
    pattern = re.compile(any_of(texts))
    for text in (texts[0], texts[3], texts[700], texts[-1]):
        found = pattern.match(text + "a|")
        assert found is not None
        assert found.group() == text
