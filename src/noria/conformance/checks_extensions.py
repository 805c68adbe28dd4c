"""Fields and routes that OpenAI's API does not have, but several servers do. Each may be refused by its name.

A server that passes over such a field without a word fails the check: its user would believe in something that did
not happen.
"""

from __future__ import annotations

import re

from noria.conformance.checks_stop import pick
from noria.conformance.client import Server
from noria.conformance.contract import NotSupported, Source, Theme, expect
from noria.conformance.endpoints import CHAT, COMPLETIONS, Endpoint

THEME = Theme("sampling fields and extensions")
BOTH = (COMPLETIONS, CHAT)
TOKEN = 65
"""A token id that every vocabulary has, and which is the text of something."""


def is_one_thing_again(text: str, times: int) -> bool:
    """Whether the text is `times` times the same."""
    length, rest = divmod(len(text), times)
    return rest == 0 and length > 0 and text == text[:length] * times


@THEME.check_each("logit_bias 100 makes a token the only one", Source.OPENAI, *BOTH, needs=("logit_bias",))
def logit_bias(server: Server, endpoint: Endpoint) -> None:
    text = server.text(endpoint, logit_bias={str(TOKEN): 100}, max_tokens=4)
    expect(is_one_thing_again(text, 4), f"not four times the same token: {text!r}")


@THEME.check_each("logit_bias -100 keeps a token out", Source.OPENAI, *BOTH, needs=("logit_bias",))
def logit_bias_ban(server: Server, endpoint: Endpoint) -> None:
    only = server.text(endpoint, logit_bias={str(TOKEN): 100}, max_tokens=4)
    both = server.text(endpoint, logit_bias={str(TOKEN): -100, str(TOKEN + 1): 100}, max_tokens=4)
    expect(is_one_thing_again(both, 4) and both != only, f"{both!r} with the token banned, {only!r} with it forced")


@THEME.check_each("ignore_eos makes exactly max_tokens tokens", Source.EXTENSION, *BOTH, needs=("ignore_eos",))
def ignore_eos(server: Server, endpoint: Endpoint) -> None:
    answer = server.answer(endpoint, ignore_eos=True, max_tokens=40)
    count, reason = answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]
    expect((count, reason) == (40, "length"), f"{count} of 40 tokens, finish_reason {reason!r}")
    server.must_look_at(endpoint, "ignore_eos", "perhaps")


@THEME.check_each(
    "min_tokens keeps a stop string from ending it sooner", Source.EXTENSION, *BOTH, needs=("min_tokens",)
)
def min_tokens(server: Server, endpoint: Endpoint) -> None:
    fields, answer = server.long_answer(endpoint)
    text = endpoint.text(answer["choices"][0])
    stop = pick(text, 1, 1)
    soon = server.answer(endpoint, **fields, stop=stop)["usage"]["completion_tokens"]
    later = server.answer(endpoint, **fields, stop=stop, min_tokens=10)["usage"]["completion_tokens"]
    expect(soon < 10 <= later, f"{soon} tokens with stop {stop!r}, {later} with min_tokens 10 as well")


@THEME.check_each("top_k 1 leaves the most probable token only", Source.EXTENSION, *BOTH, needs=("top_k",))
def top_k(server: Server, endpoint: Endpoint) -> None:
    greedy, sampled = server.text(endpoint), server.text(endpoint, temperature=2, top_k=1)
    expect(sampled == greedy, f"{sampled!r} is not the greedy {greedy!r}")


@THEME.check_each("min_p 1 leaves the most probable token only", Source.EXTENSION, *BOTH, needs=("min_p",))
def min_p(server: Server, endpoint: Endpoint) -> None:
    greedy, sampled = server.text(endpoint), server.text(endpoint, temperature=2, min_p=1)
    expect(sampled == greedy, f"{sampled!r} is not the greedy {greedy!r}")


@THEME.check_each("include_stop_str_in_output keeps the stop string", Source.EXTENSION, *BOTH,
                  needs=("include_stop_str_in_output",))  # fmt: skip
def include_stop(server: Server, endpoint: Endpoint) -> None:
    fields, answer = server.long_answer(endpoint)
    text = endpoint.text(answer["choices"][0])
    stop = pick(text, 3, len(text) // 2)
    kept = server.text(endpoint, **fields, stop=stop, include_stop_str_in_output=True)
    expect(kept == text[: text.index(stop)] + stop, f"{kept!r} is kept of {text!r} with stop {stop!r}")


@THEME.check_each(
    "stop_token_ids end the text at a token", Source.EXTENSION, *BOTH, needs=("stop_token_ids", "logit_bias")
)
def stop_token_ids(server: Server, endpoint: Endpoint) -> None:
    answer = server.answer(endpoint, stop_token_ids=[TOKEN], logit_bias={str(TOKEN): 100}, max_tokens=4)
    count, reason = answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]
    expect(count == 1 and reason == "stop", f"{count} tokens, finish_reason {reason!r}")


@THEME.check_each("allowed_token_ids are the only ones", Source.EXTENSION, *BOTH, needs=("allowed_token_ids",))
def allowed_token_ids(server: Server, endpoint: Endpoint) -> None:
    text = server.text(endpoint, allowed_token_ids=[TOKEN], max_tokens=4)
    expect(is_one_thing_again(text, 4), f"not four times the same token: {text!r}")


@THEME.check_each("bad_words are not said", Source.EXTENSION, *BOTH, needs=("bad_words",))
def bad_words(server: Server, endpoint: Endpoint) -> None:
    fields, answer = server.long_answer(endpoint)
    text = endpoint.text(answer["choices"][0])
    words = re.findall(r"(?<=\s)[^\W\d_]+(?=\s)", text) or re.findall(r"[^\W\d_]", text)
    expect(words, f"there is no word in {text!r}")
    word = max(words, key=len)
    cleaned = server.text(endpoint, **fields, bad_words=[word])
    said = re.search(rf"(?<!\w){re.escape(word)}(?!\w)", cleaned)
    expect(cleaned != text and not said, f"{word!r} is a bad word, and the text is {cleaned!r}")


@THEME.check_each("repetition_penalty is looked at", Source.EXTENSION, *BOTH, needs=("repetition_penalty",))
def repetition_penalty(server: Server, endpoint: Endpoint) -> None:
    plain, one = server.text(endpoint), server.text(endpoint, repetition_penalty=1.0)
    expect(plain == one, f"{one!r} with a penalty of 1, {plain!r} without")
    server.must_look_at(endpoint, "repetition_penalty", "much")


@THEME.check("truncate_prompt_tokens keeps a prompt's last tokens", Source.EXTENSION, needs=("truncate_prompt_tokens",))
def truncate_prompt_tokens(server: Server) -> None:
    answer = server.answer(COMPLETIONS, prompt="one two three four five six seven eight nine", truncate_prompt_tokens=4)
    count = answer["usage"]["prompt_tokens"]
    expect(count == 4, f"{count} prompt tokens")


@THEME.check(
    "prompt_logprobs has an entry for each prompt token, the first null", Source.EXTENSION, needs=("prompt_logprobs",)
)
def prompt_logprobs(server: Server) -> None:
    answer = server.answer(COMPLETIONS, prompt_logprobs=1)
    choice = answer["choices"][0]
    given = choice.get("prompt_logprobs") or answer.get("prompt_logprobs") or []
    expect(given, "there are no prompt_logprobs")
    expect(len(given) == answer["usage"]["prompt_tokens"], f"{len(given)} entries; usage is {answer['usage']}")
    expect(given[0] is None and all(given[1:]), f"the entries begin with {str(given[:2])[:120]}")


@THEME.check_each("return_token_ids gives the answer's token ids", Source.EXTENSION, *BOTH, needs=("return_token_ids",))
def return_token_ids(server: Server, endpoint: Endpoint) -> None:
    answer = server.answer(endpoint, return_token_ids=True)
    ids = answer["choices"][0].get("token_ids")
    expect(ids is not None, "the choice has no token_ids")
    expect(len(ids) == answer["usage"]["completion_tokens"], f"{len(ids)} ids; usage is {answer['usage']}")


@THEME.check("tokenize and detokenize are each other's inverse", Source.EXTENSION, needs=("tokenize",))
def tokenize(server: Server) -> None:
    text = "The wheel turns: ünïcödé, 漢字 and 😀."
    asked = {"model": server.model, "add_special_tokens": False}
    given = server.send("POST", "/tokenize", asked | {"prompt": text})
    if given.status == 404:
        raise NotSupported(f"there is no /tokenize: {given.shown}")
    if given.status != 200 or not given.json["tokens"]:  # llama.cpp calls it by another name
        given = server.send("POST", "/tokenize", asked | {"content": text})
    tokens = server.supported(given, "/tokenize").json["tokens"]
    back = server.supported(
        server.send("POST", "/detokenize", {"model": server.model, "tokens": tokens}), "/detokenize"
    )
    found = back.json.get("prompt", back.json.get("content"))
    expect(str(found).strip() == text, f"{found!r} came back of {text!r}")


@THEME.check("/health answers 200 while it serves", Source.EXTENSION)
def health(server: Server) -> None:
    server.get("/health")


@THEME.check("/metrics is Prometheus text", Source.EXTENSION, needs=("metrics",))
def metrics(server: Server) -> None:
    response = server.get("/metrics")
    kind = response.headers.get("content-type", "")
    expect(kind.startswith(("text/plain", "application/openmetrics-text")), f"content type is {kind!r}")
    lines = [line for line in response.body.decode().splitlines() if line and not line.startswith("#")]
    expect(lines, "there is no sample")
    for line in lines:
        sample = re.fullmatch(r"[a-zA-Z_:][\w:]*(\{.*\})? \S+( \S+)?( # .*)?", line)
        expect(sample, f"not a line of Prometheus text: {line[:80]!r}")


@THEME.check("/version names the server's version", Source.EXTENSION)
def version(server: Server) -> None:
    given = server.get("/version").json
    expect(isinstance(given, dict) and isinstance(given.get("version"), str), f"the answer is {given}")
