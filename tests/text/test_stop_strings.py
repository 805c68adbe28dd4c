"""Stop strings that overlap themselves and each other, against searching the whole text."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from noria.text.stop_strings import StopStrings


@given(st.text("ab", max_size=40), st.lists(st.text("ab", min_size=1, max_size=9), min_size=1, max_size=3))
@example("aabaaabaaaa", ["aabaaaa"])
def test_characters_one_by_one_find_what_a_search_finds(text: str, stops: list[str]) -> None:
    matcher = StopStrings(stops)
    given_out = ""
    found = None
    for character in text:
        released, found = matcher.push(character)
        given_out += released
        if found is not None:
            break
    given_out += matcher.flush()
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if ends:
        end, _, stop = min(ends)
        assert (given_out, found) == (text[: end - len(stop)], stop)
    else:
        assert (given_out, found) == (text, None)


def test_without_stop_strings_text_passes() -> None:
    matcher = StopStrings([])
    assert matcher.push("abc") == ("abc", None)
    assert matcher.flush() == ""
