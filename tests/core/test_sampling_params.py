"""Bounds of sampling parameters: refused by name, or fit to travel to an engine process."""

import math

import msgspec
import pytest

from noria.errors import RequestError
from noria.sampling import SamplingParams


@pytest.mark.parametrize(
    "field", ["n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "logprobs"]
)
@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, 10**400, math.nan, math.inf])
def test_a_value_out_of_bounds_is_refused_by_name(field, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field


@pytest.mark.parametrize("token_id", [-1, 2**31, 2**64])
def test_a_stop_token_that_cannot_be_one_is_refused(token_id):
    with pytest.raises(RequestError, match="stop_token_ids"):
        SamplingParams(stop_token_ids=(5, token_id))


@pytest.mark.parametrize("seed", [-(2**63), 2**64 - 1])
def test_the_greatest_accepted_values_survive_the_wire(seed):
    sampling = SamplingParams(seed=seed, top_k=2**63 - 1, max_tokens=2**31 - 1, stop_token_ids=(0, 2**31 - 1))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sampling), type=SamplingParams) == sampling
