"""`/v1/completions` alone: prompts of every kind, echo, scoring, best_of."""

from __future__ import annotations

from noria.conformance.client import Server
from noria.conformance.contract import Source, Theme, expect
from noria.conformance.endpoints import COMPLETIONS

THEME = Theme("completions")
IDS = [72, 101, 108, 108, 111, 44]
"""Token ids that every vocabulary has."""
PROMPT = "The wheel turns and"


@THEME.check("a list of prompts has a choice for each", Source.OPENAI)
def prompt_list(server: Server) -> None:
    choices = server.answer(COMPLETIONS, prompt=["One, two,", "Red, green,", "Once upon"])["choices"]
    expect([choice["index"] for choice in choices] == [0, 1, 2], f"indices {[choice['index'] for choice in choices]}")


@THEME.check("the choices of a list are what each prompt alone is answered with", Source.OURS)
def prompt_list_order(server: Server) -> None:
    prompts = ["One, two,", "The capital of France is", "def main():"]
    alone = [server.text(COMPLETIONS, prompt=prompt) for prompt in prompts]
    choices = server.answer(COMPLETIONS, prompt=prompts)["choices"]
    texts = [choice["text"] for choice in sorted(choices, key=lambda choice: choice["index"])]
    expect(texts == alone, f"{texts} of the list, {alone} alone")


@THEME.check("with n, choices are numbered prompt by prompt", Source.OPENAI, needs=("n",))
def prompt_list_n(server: Server) -> None:
    prompts = ["One, two,", "def main():"]
    alone = [server.text(COMPLETIONS, prompt=prompt) for prompt in prompts]
    choices = server.answer(COMPLETIONS, prompt=prompts, n=2)["choices"]
    expect(sorted(choice["index"] for choice in choices) == [0, 1, 2, 3], "not the indices 0 to 3")
    texts = [choice["text"] for choice in sorted(choices, key=lambda choice: choice["index"])]
    expect(texts[0] == alone[0] and texts[2] == alone[1], f"{texts}; alone {alone}")


@THEME.check("the usage of a list is that of its prompts together", Source.OPENAI)
def prompt_list_usage(server: Server) -> None:
    prompts = ["One, two,", "Red, green, blue, and so on"]
    alone = sum(server.answer(COMPLETIONS, prompt=prompt)["usage"]["prompt_tokens"] for prompt in prompts)
    together = server.answer(COMPLETIONS, prompt=prompts)["usage"]["prompt_tokens"]
    expect(together == alone, f"{together} prompt tokens together, {alone} alone")


@THEME.check("a list of prompts is streamed choice by choice", Source.OPENAI)
def prompt_list_stream(server: Server) -> None:
    stream = server.stream(COMPLETIONS, prompt=["One, two,", "Red, green,"], max_tokens=6)
    for index in (0, 1):
        expect(stream.choices(index), f"nothing of choice {index} is streamed")
        stream.finish_reason(index)


@THEME.check("a prompt may be token ids, and counts as many", Source.OPENAI)
def prompt_ids(server: Server) -> None:
    count = server.answer(COMPLETIONS, prompt=IDS)["usage"]["prompt_tokens"]
    expect(count == len(IDS), f"{count} prompt tokens for {len(IDS)} ids")


@THEME.check("a prompt may be a list of lists of token ids", Source.OPENAI)
def prompt_ids_list(server: Server) -> None:
    answer = server.answer(COMPLETIONS, prompt=[IDS, IDS[:4]])
    count = answer["usage"]["prompt_tokens"]
    expect(len(answer["choices"]) == 2 and count == len(IDS) + 4, f"{len(answer['choices'])} choices, {count} tokens")


@THEME.check("an empty list of prompts is refused", Source.OPENAI)
def prompt_list_empty(server: Server) -> None:
    server.refusal(COMPLETIONS, prompt=[])


@THEME.check("a list of texts and token ids is refused", Source.OPENAI)
def prompt_list_mixed(server: Server) -> None:
    server.refusal(COMPLETIONS, prompt=["a text", 5])


@THEME.check("a negative token id is refused", Source.OPENAI)
def prompt_ids_negative(server: Server) -> None:
    server.refusal(COMPLETIONS, prompt=[5, -1])


@THEME.check("a token id that the vocabulary does not have is refused", Source.OPENAI)
def prompt_ids_unknown(server: Server) -> None:
    server.refusal(COMPLETIONS, prompt=[5, 2_000_000_000])


@THEME.check("a token id beyond 64 bits is refused", Source.OPENAI)
def prompt_ids_huge(server: Server) -> None:
    server.refusal(COMPLETIONS, prompt=[5, 2**70])


@THEME.check("a missing prompt is refused", Source.OURS)
def prompt_missing(server: Server) -> None:
    server.send("POST", COMPLETIONS.path, {"model": server.model, "max_tokens": 2}).error(400, 422)


@THEME.check("an empty prompt is answered or refused, not an error of the server", Source.OPENAI)
def prompt_empty(server: Server) -> None:
    response = server.post(COMPLETIONS, prompt="")
    if response.status != 200:
        response.error(400, 422)


@THEME.check("echo gives the prompt back before the answer", Source.OPENAI, needs=("echo",))
def echo(server: Server) -> None:
    plain, echoed = server.text(COMPLETIONS, prompt=PROMPT), server.text(COMPLETIONS, prompt=PROMPT, echo=True)
    expect(echoed == PROMPT + plain, f"{echoed!r} is not {PROMPT!r} and {plain!r}")


@THEME.check("echo counts in no token of the answer", Source.OPENAI, needs=("echo",))
def echo_usage(server: Server) -> None:
    usages = [server.answer(COMPLETIONS, prompt=PROMPT, echo=echo)["usage"] for echo in (True, False)]
    expect(usages[0]["completion_tokens"] == usages[1]["completion_tokens"], f"{usages}")


@THEME.check("a stream with echo makes the same text", Source.OPENAI, needs=("echo",))
def echo_stream(server: Server) -> None:
    whole = server.text(COMPLETIONS, prompt=PROMPT, echo=True)
    text = server.stream(COMPLETIONS, prompt=PROMPT, echo=True).text(COMPLETIONS)
    expect(text == whole and text.startswith(PROMPT), f"{text!r} is streamed, {whole!r} answered")


@THEME.check("echo of a list gives each its own prompt", Source.OPENAI, needs=("echo",))
def echo_list(server: Server) -> None:
    prompts = ["One, two,", "Red, green,"]
    choices = server.answer(COMPLETIONS, prompt=prompts, echo=True)["choices"]
    expect(len(choices) == 2, f"{len(choices)} choices for 2 prompts")
    for choice in choices:
        begin = prompts[choice["index"]]
        expect(choice["text"].startswith(begin), f"{choice['text']!r} does not begin with {begin!r}")


@THEME.check(
    "echo with logprobs: null for the first token, then the prompt's", Source.OPENAI, needs=("echo", "logprobs")
)
def echo_logprobs(server: Server) -> None:
    answer = server.answer(COMPLETIONS, prompt=PROMPT, echo=True, logprobs=1)
    logprobs, usage = answer["choices"][0]["logprobs"], answer["usage"]
    given = logprobs["token_logprobs"]
    expect(given[0] is None, f"the first token's is {given[0]}")
    expect(all(value is not None and value <= 1e-4 for value in given[1:]), f"the others' are {given[1:]}")
    expect(len(given) == usage["total_tokens"], f"{len(given)} of them for {usage['total_tokens']} tokens")


@THEME.check("echo with max_tokens 0 scores the prompt and makes nothing", Source.OPENAI, needs=("echo", "max_tokens"))
def scoring(server: Server) -> None:
    answer = server.answer(COMPLETIONS, prompt=PROMPT, echo=True, logprobs=1, max_tokens=0)
    [choice] = answer["choices"]
    expect(choice["text"] == PROMPT, f"the text is {choice['text']!r}")
    expect(answer["usage"]["completion_tokens"] == 0, f"usage is {answer['usage']}")
    count = len(choice["logprobs"]["token_logprobs"])
    expect(count == answer["usage"]["prompt_tokens"], f"{count} log-probabilities; usage is {answer['usage']}")


@THEME.check("a prompt's score does not depend on what is made after it", Source.OPENAI, needs=("echo", "max_tokens"))
def scoring_equals_echo(server: Server) -> None:
    scores = []
    for count in (0, 4):
        answer = server.answer(COMPLETIONS, prompt=PROMPT, echo=True, logprobs=0, max_tokens=count)
        given, usage = answer["choices"][0]["logprobs"]["token_logprobs"], answer["usage"]
        expect(len(given) == usage["total_tokens"], f"{len(given)} log-probabilities; usage is {usage}")
        scores.append(given[1 : usage["prompt_tokens"]])
    for value, other in zip(*scores, strict=True):
        expect(abs(value - other) < 0.05, f"{scores[0]} with nothing after it, {scores[1]} with 4 tokens")


@THEME.check("lm-eval's request: lists of ids, echo, one token", Source.OPENAI, needs=("echo", "logprobs"))
def scoring_ids(server: Server) -> None:
    answer = server.answer(COMPLETIONS, prompt=[IDS, IDS[:4]], echo=True, logprobs=1, max_tokens=1)
    for choice, ids in zip(answer["choices"], (IDS, IDS[:4]), strict=True):
        logprobs = choice["logprobs"]
        expect(len(logprobs["token_logprobs"]) == len(ids) + 1, f"{len(logprobs['token_logprobs'])} for {len(ids)} + 1")
        expect(len(logprobs["top_logprobs"]) == len(ids) + 1, "top_logprobs is not as long")


@THEME.check("best_of 3 with n 1 gives one choice", Source.OPENAI, needs=("best_of",))
def best_of(server: Server) -> None:
    answer = server.answer(COMPLETIONS, best_of=3, n=1, temperature=1)
    expect(len(answer["choices"]) == 1, f"{len(answer['choices'])} choices")
    one = server.answer(COMPLETIONS, max_tokens=12)["usage"]["prompt_tokens"]
    expect(answer["usage"]["prompt_tokens"] == one, f"usage is {answer['usage']}")
    server.must_look_at(COMPLETIONS, "best_of", "three")


@THEME.check("best_of below n is refused", Source.OPENAI)
def best_of_below_n(server: Server) -> None:
    server.refusal(COMPLETIONS, best_of=1, n=2)


@THEME.check("best_of cannot be streamed", Source.OPENAI)
def best_of_stream(server: Server) -> None:
    server.refusal(COMPLETIONS, best_of=2, n=1, temperature=1, stream=True)


@THEME.check("suffix is honoured or refused by name", Source.OPENAI, needs=("suffix",))
def suffix(server: Server) -> None:
    server.answer(COMPLETIONS, prompt="def add(a, b):\n", suffix="\n    return c\n")
    server.must_look_at(COMPLETIONS, "suffix", 5)
