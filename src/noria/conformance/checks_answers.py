"""What a whole answer looks like, and what the fields that every client uses do to it."""

from __future__ import annotations

import time

from noria.conformance.client import Server
from noria.conformance.contract import Source, Theme, expect
from noria.conformance.endpoints import CHAT, COMPLETIONS, Endpoint

THEME = Theme("answers")
BOTH = (COMPLETIONS, CHAT)


@THEME.check_each("answers with id, object, created, model, choices and usage", Source.OPENAI, *BOTH)
def shape(server: Server, endpoint: Endpoint) -> None:
    answer = server.answer(endpoint)
    missing = {"id", "object", "created", "model", "choices", "usage"} - set(answer)
    expect(not missing, f"missing: {sorted(missing)}")
    expect(answer["object"] == endpoint.object_name, f"object is {answer['object']!r}, not {endpoint.object_name!r}")
    [choice] = answer["choices"]
    expect(choice["index"] == 0, f"the only choice has index {choice['index']}")


@THEME.check_each("a choice has a text that is a string", Source.OPENAI, *BOTH)
def text_is_a_string(server: Server, endpoint: Endpoint) -> None:
    [choice] = server.answer(endpoint)["choices"]
    text = choice["text"] if endpoint is COMPLETIONS else choice["message"]["content"]
    expect(isinstance(text, str), f"the text is {text!r}")


@THEME.check_each("ids begin with cmpl- or chatcmpl-", Source.OPENAI, *BOTH)
def id_prefix(server: Server, endpoint: Endpoint) -> None:
    given = server.answer(endpoint)["id"]
    expect(str(given).startswith(endpoint.id_prefix), f"the id is {given!r}")


@THEME.check_each("two answers have two ids", Source.OPENAI, *BOTH)
def ids_differ(server: Server, endpoint: Endpoint) -> None:
    ids = [server.answer(endpoint, max_tokens=1)["id"] for _ in range(2)]
    expect(ids[0] != ids[1], f"both answers have the id {ids[0]!r}")


@THEME.check_each("created is a time in whole Unix seconds", Source.OPENAI, *BOTH)
def created(server: Server, endpoint: Endpoint) -> None:
    given = server.answer(endpoint)["created"]
    expect(type(given) is int and abs(given - time.time()) < 86_400, f"created is {given!r}")


@THEME.check_each("the answer names the model that was asked", Source.OPENAI, *BOTH)
def names_the_model(server: Server, endpoint: Endpoint) -> None:
    given = server.answer(endpoint)["model"]
    expect(given == server.model, f"model is {given!r}, not {server.model!r}")


@THEME.check_each("an answer has content type application/json", Source.SDK, *BOTH)
def content_type(server: Server, endpoint: Endpoint) -> None:
    response = server.supported(server.post(endpoint), endpoint.path)
    expect(response.is_json, f"content type is {response.headers.get('content-type')!r}")


@THEME.check_each("an answer's length is told by Content-Length or chunks, and is right", Source.HTTP, *BOTH)
def length_is_told(server: Server, endpoint: Endpoint) -> None:
    response = server.supported(server.post(endpoint), endpoint.path)
    told = response.headers.get("content-length")
    if told is not None:
        expect(int(told) == len(response.body), f"Content-Length is {told} of {len(response.body)} bytes")
    else:
        expect("chunked" in response.headers.get("transfer-encoding", ""), "only the end of the connection tells it")


@THEME.check_each("usage adds up: total = prompt + completion, all of them whole numbers", Source.OPENAI, *BOTH)
def usage_adds_up(server: Server, endpoint: Endpoint) -> None:
    usage = server.answer(endpoint)["usage"]
    counts = [usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]]
    expect(all(type(count) is int for count in counts), f"usage is {usage}")
    expect(counts[0] > 0 and counts[1] > 0 and counts[0] + counts[1] == counts[2], f"usage is {usage}")


@THEME.check_each("cached tokens, where they are told, are part of the prompt's", Source.OPENAI, *BOTH)
def cached_tokens(server: Server, endpoint: Endpoint) -> None:
    for _ in range(2):
        usage = server.answer(endpoint, **endpoint.prompt("word " * 64), max_tokens=1)["usage"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        expect(type(cached) is int and 0 <= cached <= usage["prompt_tokens"], f"usage is {usage}")


@THEME.check_each("max_tokens bounds the tokens of an answer", Source.OPENAI, *BOTH)
def max_tokens(server: Server, endpoint: Endpoint) -> None:
    for bound in (2, 7):
        count = server.answer(endpoint, max_tokens=bound)["usage"]["completion_tokens"]
        expect(count <= bound, f"{count} tokens with max_tokens {bound}")


@THEME.check_each("max_tokens 1 makes one token", Source.OPENAI, *BOTH)
def one_token(server: Server, endpoint: Endpoint) -> None:
    count = server.answer(endpoint, max_tokens=1)["usage"]["completion_tokens"]
    expect(count == 1, f"{count} tokens")


@THEME.check_each("finish_reason is length exactly when max_tokens ended it, else stop", Source.OPENAI, *BOTH)
def finish_reason(server: Server, endpoint: Endpoint) -> None:
    answer = server.long_answer(endpoint)[1]
    count = answer["usage"]["completion_tokens"]
    expect(count == 16, f"finish_reason is length after {count} of 16 tokens")
    short = server.answer(endpoint, max_tokens=3)
    reason, count = short["choices"][0]["finish_reason"], short["usage"]["completion_tokens"]
    expect(reason == "length" if count == 3 else reason == "stop", f"{reason!r} after {count} of 3 tokens")


@THEME.check_each("temperature 0 gives the same text again", Source.OURS, *BOTH)
def greedy_repeats(server: Server, endpoint: Endpoint) -> None:
    texts = {server.text(endpoint, max_tokens=20) for _ in range(3)}
    expect(len(texts) == 1, f"three times the same request: {sorted(texts)}")


@THEME.check_each("the same seed gives the same text again", Source.OPENAI, *BOTH, needs=("seed",))
def seed_repeats(server: Server, endpoint: Endpoint) -> None:
    texts = {server.text(endpoint, temperature=1, seed=17, max_tokens=20) for _ in range(3)}
    expect(len(texts) == 1, f"three times the same seed: {sorted(texts)}")


@THEME.check_each("different seeds at a high temperature give different texts", Source.OPENAI, *BOTH, needs=("seed",))
def seeds_differ(server: Server, endpoint: Endpoint) -> None:
    texts = {server.text(endpoint, temperature=2, seed=seed, max_tokens=24) for seed in range(4)}
    expect(len(texts) > 1, f"four seeds, one text: {texts}")


@THEME.check_each("a tiny top_p leaves nothing to chance", Source.OPENAI, *BOTH, needs=("top_p",))
def tiny_top_p(server: Server, endpoint: Endpoint) -> None:
    """Not compared with the greedy text: of two tokens that are equally probable, each may take another."""
    texts = [server.text(endpoint, temperature=2, top_p=1e-6, seed=seed) for seed in (1, 2, 3)]
    expect(len(set(texts)) == 1, f"three seeds give {texts}")


@THEME.check_each("penalties may be anything from -2 to 2", Source.OPENAI, *BOTH)
def penalties(server: Server, endpoint: Endpoint) -> None:
    for value in (-2, -0.5, 0, 2):
        server.answer(endpoint, presence_penalty=value, frequency_penalty=-value, max_tokens=3)


@THEME.check_each(
    "frequency_penalty 2 keeps a token from coming again and again", Source.OPENAI, *BOTH, needs=("logit_bias",)
)
def frequency_penalty(server: Server, endpoint: Endpoint) -> None:
    """Two tokens are preferred by the same 50: only a penalty can make the second be chosen in the end."""
    bias = {"65": 50, "66": 48}
    without = server.text(endpoint, logit_bias=bias, max_tokens=24)
    with_it = server.text(endpoint, logit_bias=bias, max_tokens=24, frequency_penalty=2)
    expect(without != with_it, f"the penalty changes nothing of {without!r}")


@THEME.check_each("n = 3 gives choices 0, 1 and 2", Source.OPENAI, *BOTH, needs=("n",))
def n_choices(server: Server, endpoint: Endpoint) -> None:
    choices = server.answer(endpoint, n=3, temperature=1, max_tokens=4)["choices"]
    indices = sorted(choice["index"] for choice in choices)
    expect(indices == [0, 1, 2], f"indices {indices}")
    expect(all(choice["finish_reason"] for choice in choices), "a choice has no finish_reason")


@THEME.check_each("with n, a prompt counts once and every choice's tokens count", Source.OPENAI, *BOTH, needs=("n",))
def n_usage(server: Server, endpoint: Endpoint) -> None:
    fields, one = server.long_answer(endpoint)
    three = server.answer(endpoint, **fields, n=3)["usage"]
    expect(three["prompt_tokens"] == one["usage"]["prompt_tokens"], f"prompt: {three} against {one['usage']}")
    expect(one["usage"]["completion_tokens"] < three["completion_tokens"] <= 48, f"{three} for n = 3 with 16 tokens")


@THEME.check_each("at temperature 0 all n choices are the same", Source.OURS, *BOTH, needs=("n",))
def n_greedy(server: Server, endpoint: Endpoint) -> None:
    choices = server.answer(endpoint, n=3)["choices"]
    texts = {endpoint.text(choice) for choice in choices}
    expect(len(choices) == 3 and len(texts) == 1, f"{len(choices)} choices: {sorted(texts)}")


@THEME.check_each("null for an optional field means its default", Source.SDK, *BOTH)
def null_is_the_default(server: Server, endpoint: Endpoint) -> None:
    names = ["top_p", "n", "stop", "seed", "stream", "stream_options", "presence_penalty", "frequency_penalty",
             "logit_bias", "user", "logprobs"]  # fmt: skip
    plain, nulls = server.text(endpoint), server.text(endpoint, **dict.fromkeys(names))
    expect(plain == nulls, f"{nulls!r} with nulls, {plain!r} without")


@THEME.check_each("stream: false is a whole answer", Source.OPENAI, *BOTH)
def stream_false(server: Server, endpoint: Endpoint) -> None:
    response = server.supported(server.post(endpoint, stream=False), endpoint.path)
    expect(response.is_json and "choices" in response.json, f"not a whole answer: {response.shown}")


@THEME.check_each("user is accepted", Source.OPENAI, *BOTH)
def user(server: Server, endpoint: Endpoint) -> None:
    server.answer(endpoint, user="somebody-1234")


@THEME.check_each("an unknown field is accepted and changes nothing", Source.OURS, *BOTH)
def unknown_field(server: Server, endpoint: Endpoint) -> None:
    plain, other = server.text(endpoint), server.text(endpoint, x_no_such_field={"a": [1]})
    expect(plain == other, f"{other!r} with the field, {plain!r} without")
