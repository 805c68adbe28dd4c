"""Bounds of sampling parameters: refused by name, or fit to travel to an engine process."""

import math
from typing import Any

import msgspec
import pytest

from noria.errors import RequestError
from noria.sampling import SamplingParams


@pytest.mark.parametrize(
    "field",
    [
        "n", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed",
        "logprobs", "prompt_logprobs",
    ],
)  # fmt: skip
@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, 10**400, math.nan, math.inf])
def test_a_value_out_of_bounds_is_refused_by_name(field, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field


@pytest.mark.parametrize("token_id", [-1, 2**31, 2**64])
def test_a_stop_token_that_cannot_be_one_is_refused(token_id):
    with pytest.raises(RequestError, match="stop_token_ids"):
        SamplingParams(stop_token_ids=(5, token_id))


@pytest.mark.parametrize("field", ["n", "max_tokens", "top_k", "seed", "logprobs", "prompt_logprobs", "min_tokens"])
@pytest.mark.parametrize("value", ["1", 1.0, True, [1], b"1"])
def test_only_a_whole_number_is_one(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{field} must be a whole number") as caught:
        SamplingParams(**{field: value})
    assert (caught.value.param, caught.value.code) == (field, "invalid_type")


WRONG: list[tuple[str, Any]] = [
    ("temperature", "x"), ("temperature", True), ("temperature", None), ("top_p", 1j), ("min_p", [0.5]), ("n", None),
    ("presence_penalty", "0"), ("ignore_eos", 1), ("skip_special_tokens", "yes"), ("skip_special_tokens", None),
    ("include_stop_str_in_output", 0.0), ("stop", "END"), ("stop", [b"END"]), ("stop", None), ("stop", {"a": 1}),
    ("stop_token_ids", 3), ("stop_token_ids", ["3"]), ("stop_token_ids", [True]), ("stop_token_ids", [3.0]),
    ("allowed_token_ids", "12"), ("allowed_token_ids", [None]), ("bad_words", ["bad"]), ("bad_words", [3]),
    ("bad_words", [[3, "4"]]), ("logit_bias", [1]), ("logit_bias", {"1": 1.0}), ("logit_bias", {1: "1"}),
    ("logit_bias", {1: True}), ("logit_bias", {True: 1.0}), ("logit_bias", None),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_a_value_of_another_type_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{field} must be .*, not ") as caught:
        SamplingParams(**{field: value})
    assert (caught.value.param, caught.value.code) == (field, "invalid_type")


def test_what_is_shown_of_a_value_is_short() -> None:
    for value in (["9" * 10**6], [10**10_000], {10**10_000: "a"}):
        with pytest.raises(RequestError) as caught:
            SamplingParams(stop=value)
        assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        ({"logit_bias": {3: 100.5}}, "logit_bias"),
        ({"logit_bias": {3: -100.5}}, "logit_bias"),
        ({"logit_bias": {3: math.nan}}, "logit_bias"),
        ({"logit_bias": {3: 10**400}}, "logit_bias"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"logit_bias": {2**31: 1.0}}, "logit_bias"),
        ({"logit_bias": dict.fromkeys(range(1025), 1)}, "logit_bias"),
        ({"allowed_token_ids": ()}, "allowed_token_ids"),
        ({"allowed_token_ids": (-1,)}, "allowed_token_ids"),
        ({"allowed_token_ids": tuple(range(4097))}, "allowed_token_ids"),
        ({"bad_words": ((1,), ())}, "bad_words"),
        ({"bad_words": ((1, 2**31),)}, "bad_words"),
        ({"bad_words": ((1,) * 4000, (2,) * 97)}, "bad_words"),
        ({"stop_token_ids": tuple(range(4097))}, "stop_token_ids"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"min_tokens": 1, "max_tokens": 0}, "min_tokens"),
        ({"stop": ("a\ud800",)}, "stop"),
    ],
)
def test_limits_on_single_tokens(sampling: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**sampling)
    assert caught.value.param == param
    assert param in str(caught.value)


def test_lists_are_kept_as_tuples() -> None:
    given = SamplingParams(stop=["a"], stop_token_ids=[1], allowed_token_ids=[2, 3], bad_words=[[4], (5, 6)])
    kept = SamplingParams(stop=("a",), stop_token_ids=(1,), allowed_token_ids=(2, 3), bad_words=((4,), (5, 6)))
    assert given == kept
    assert all(type(word) is tuple for word in given.bad_words)


@pytest.mark.parametrize("seed", [-(2**63), 2**64 - 1])
def test_the_greatest_accepted_values_survive_the_wire(seed):
    sampling = SamplingParams(
        seed=seed,
        top_k=2**63 - 1,
        max_tokens=2**31 - 1,
        stop_token_ids=(0, 2**31 - 1),
        logit_bias={0: -100, 2**31 - 1: 0.5},
        allowed_token_ids=tuple(range(4096)),
        bad_words=((1,), (2, 3)),
        prompt_logprobs=20,
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sampling), type=SamplingParams) == sampling
