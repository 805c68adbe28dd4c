"""From generated tokens to the bodies of answers and chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from toy_model import Generated, position

if TYPE_CHECKING:
    from faulty import Exchange

Position = tuple[int, float, list[tuple[int, float]]]


def usage_of(exchange: Exchange, body: dict[str, Any], results: list[Generated]) -> dict[str, Any]:
    per_prompt = 1 if "prompt-counts-n-times" in exchange.faults else body.get("n", 1)
    prompt = sum(len(result.prompt_ids) for result in results[::per_prompt])
    completion = sum(len(result.token_ids) for result in results)
    if body.get("echo") and "echo-is-counted" in exchange.faults:
        completion += prompt
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def answer_body(exchange: Exchange, body: dict[str, Any], results: list[Generated], is_chat: bool) -> dict[str, Any]:
    from faulty import envelope

    choices = []
    for index, result in enumerate(results):
        text = forced_text(exchange, body, result) if is_chat else result.text
        if "logprobs-disturb" in exchange.faults and body.get("logprobs"):
            text = text[::-1]
        choice: dict[str, Any] = {
            "index": index,
            "logprobs": logprobs_of(exchange, body, result, is_chat),
            "finish_reason": "stop" if text != result.text else result.finish_reason,
        }
        if is_chat:
            choice["message"] = {"role": "assistant", "content": text} | tool_calls(body)
        else:
            choice["text"] = echoed(result, body) + text
            if body.get("prompt_logprobs") is not None:
                first, *others = prompt_positions(result.prompt_ids)
                choice["prompt_logprobs"] = [None] + [{str(first[0]): other[1]} for other in others]
        if body.get("return_token_ids"):
            choice["token_ids"] = result.token_ids
        choices.append(choice)
    name = "chat.completion" if is_chat else "text_completion"
    return envelope(exchange, name, is_chat) | {"choices": choices, "usage": usage_of(exchange, body, results)}


def forced_text(exchange: Exchange, body: dict[str, Any], result: Generated) -> str:
    form = body.get("response_format")
    if "response-format-disturbs" in exchange.faults and form is not None:
        return result.text[::-1]
    return result.text if form is None or form["type"] == "text" else '{"answer": "yes"}'


def tool_calls(body: dict[str, Any]) -> dict[str, Any]:
    """A call if one is required; by default, too, as a model that likes tools would."""
    if not body.get("tools") or body.get("tool_choice") == "none":
        return {}
    if body.get("tool_choice") != "required":
        return {}
    call = {"name": body["tools"][0]["function"]["name"], "arguments": '{"city": "Oslo"}'}
    return {"content": None, "tool_calls": [{"id": "call_1", "type": "function", "function": call}]}


def echoed(result: Generated, body: dict[str, Any]) -> str:
    return bytes(result.prompt_ids).decode("latin-1") if body.get("echo") else ""


def prompt_positions(prompt_ids: list[int]) -> list[Position]:
    return [position(token, prompt_ids[:number]) for number, token in enumerate(prompt_ids)]


def logprobs_of(exchange: Exchange, body: dict[str, Any], result: Generated, is_chat: bool) -> dict[str, Any] | None:
    """In the endpoint's shape; None if none were asked for."""
    faults = exchange.faults
    wanted = body.get("logprobs")
    if "always-logprobs" in faults:
        wanted = 1
    if wanted is None or wanted is False or (wanted == 0 and not is_chat and "no-logprobs-0" in faults):
        return None
    count = body.get("top_logprobs", 0) if is_chat else int(wanted)
    positions = [] if is_chat or not body.get("echo") else prompt_positions(result.prompt_ids)
    num_prompt = len(positions)
    positions = [*positions, *result.positions]
    if "logprobs-too-few" in faults:
        positions = positions[:-1]
    if "logprobs-past-the-stop" in faults:
        positions = positions + positions * 2
    shown = [altered_position(faults, each, count) for each in positions]
    if is_chat:
        return {"content": [token_of(t, v) | {"top_logprobs": [token_of(*o) for o in top]} for t, v, top in shown]}
    return completion_logprobs(faults, shown, num_prompt, body)


def altered_position(faults: frozenset[str], each: Position, count: int) -> Position:
    token, value, best = each
    top = best[: count + (3 if "too-many-top" in faults else 0)]
    if "positive-logprobs" in faults:
        value = 0.5
    if "chosen-is-off" in faults:
        value -= 0.5
    if "top-is-certain" in faults:
        top = [(other, 0.0) for other, _ in top]
    return 33 if "wrong-tokens" in faults else token, value, top


def token_of(token: int, value: float) -> dict[str, Any]:
    return {"token": chr(token), "logprob": value, "bytes": list(chr(token).encode())}


def completion_logprobs(
    faults: frozenset[str], shown: list[Position], num_prompt: int, body: dict[str, Any]
) -> dict[str, Any]:
    values: list[float | None] = [value for _, value, _ in shown]
    tops: list[dict[str, float] | None] = [{chr(other): v for other, v in top} for _, _, top in shown]
    if num_prompt and "first-is-scored" not in faults:
        values[0], tops[0] = None, None
    if "scores-depend-on-what-follows" in faults:
        values = [value if value is None else value - body["max_tokens"] for value in values]
    return {
        "tokens": [chr(token) for token, _, _ in shown],
        "token_logprobs": values[:-1] if "uneven-lists" in faults else values,
        "top_logprobs": tops,
        "text_offset": [0 if "offsets-are-0" in faults else number for number in range(len(shown))],
    }


def chunk_bodies(
    exchange: Exchange, body: dict[str, Any], results: list[Generated], is_chat: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each chunk, and whether it is a `chunk` or the `usage-chunk`."""
    from faulty import envelope

    faults = exchange.faults
    name = "chat.completion.chunk" if is_chat else "text_completion"
    head = envelope(exchange, name, is_chat)
    for index, result in enumerate(results):
        for piece, logprobs, reason in pieces_of(exchange, body, result, is_chat):
            choice: dict[str, Any] = {"index": index, "logprobs": logprobs, "finish_reason": reason}
            if is_chat:
                choice["delta"] = {"role": "assistant", "content": piece}
            else:
                choice["text"] = piece
            if "new-ids-in-a-stream" in faults:
                head = envelope(exchange, name, is_chat)
            yield "chunk", head | {"choices": [choice]}
    if (body.get("stream_options") or {}).get("include_usage") or "usage-unasked" in faults:
        yield "usage-chunk", head | {"choices": [], "usage": usage_of(exchange, body, results)}


def pieces_of(
    exchange: Exchange, body: dict[str, Any], result: Generated, is_chat: bool
) -> list[tuple[str, dict[str, Any] | None, str | None]]:
    """Text, log-probabilities and finish reason of each chunk: a token each, and one for the end."""
    faults = exchange.faults
    text = result.text
    if "stop-only-in-whole-answers" in faults:
        text = bytes(result.token_ids).decode("latin-1")
    pieces = [(letter, None, None) for letter in text]
    if "one-chunk" in faults:
        pieces = [(text, None, None)]
    if "drops-a-chunk" in faults:
        pieces = pieces[1:]
    begin = "" if "no-echo-in-streams" in faults else echoed(result, body)
    logprobs = None if "no-logprobs-in-streams" in faults else logprobs_of(exchange, body, result, is_chat)
    return [(begin, None, None), *pieces, ("", logprobs, result.finish_reason)]
