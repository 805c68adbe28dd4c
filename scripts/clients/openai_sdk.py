"""OpenAI's own SDK.

python -m venv /tmp/openai && /tmp/openai/bin/pip install openai
/tmp/openai/bin/python scripts/clients/openai_sdk.py http://127.0.0.1:8000
"""

import asyncio

import openai
from common import MESSAGES, PROMPT, arguments, raises, try_all


def models(client: openai.OpenAI, model: str) -> None:
    """Models: list, retrieve, one that is not there."""
    assert model in [card.id for card in client.models.list()]
    assert client.models.retrieve(model).id == model
    with raises(openai.NotFoundError) as refused:
        client.models.retrieve("no-such-model")
    assert refused.error.code == "model_not_found", refused.error


def completions(client: openai.OpenAI, model: str) -> None:
    """Completions: whole and streamed are one text; n, logprobs, echo, stop, a list of prompts."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": 16, "temperature": 0}
    whole = client.completions.create(**body)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 16
    chunks = list(client.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    stopped = client.completions.create(**body, stop=[whole.choices[0].text[8:12]]).choices[0]
    assert (stopped.text, stopped.finish_reason) == (whole.choices[0].text[:8], "stop")
    scored = client.completions.create(**body | {"max_tokens": 0}, echo=True, logprobs=2).choices[0]
    assert scored.text == PROMPT
    assert all(value < 0 for value in scored.logprobs.token_logprobs[1:])
    several = client.completions.create(**body | {"prompt": [PROMPT, "Two and two"], "temperature": 1}, n=2, seed=1)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]


def chat(client: openai.OpenAI, model: str) -> None:
    """Chat: whole and streamed are one text, through the SDK's stream helper too; usage, logprobs, n."""
    body = {"model": model, "messages": MESSAGES, "max_completion_tokens": 16, "temperature": 0}
    whole = client.chat.completions.create(**body, logprobs=True, top_logprobs=2)
    message = whole.choices[0].message
    assert message.role == "assistant"
    assert message.content
    entries = whole.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode().startswith(message.content)
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    chunks = list(client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == message.content
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    with client.chat.completions.stream(**body) as stream:
        assert stream.get_final_completion().choices[0].message.content == message.content
    assert len(client.chat.completions.create(**body | {"temperature": 1}, n=3).choices) == 3


def errors(client: openai.OpenAI, model: str) -> None:
    """Errors: 400 names the field, 404 the model; both know the request's id."""
    for body, kind, param in (
        ({"model": model, "max_tokens": -1}, openai.BadRequestError, "max_tokens"),
        ({"model": model, "temperature": 9}, openai.BadRequestError, "temperature"),
        ({"model": "no-such-model"}, openai.NotFoundError, "model"),
    ):
        with raises(kind) as refused:
            client.completions.create(prompt=PROMPT, extra_headers={"X-Request-Id": "mine"}, **body)
        assert (refused.error.param, refused.error.request_id) == (param, "mine"), refused.error


def concurrently(client: openai.OpenAI, model: str) -> None:
    """Eight streams at once from the asynchronous client, and one that is left in the middle."""

    async def tell(asynchronous: openai.AsyncOpenAI) -> str:
        stream = await asynchronous.completions.create(
            model=model, prompt=PROMPT, max_tokens=16, temperature=0, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key="none", max_retries=0) as asynchronous:
            left = await asynchronous.completions.create(model=model, prompt=PROMPT, max_tokens=2000, stream=True)
            async for _ in left:
                break
            await left.close()
            texts = await asyncio.gather(*(tell(asynchronous) for _ in range(8)))
            assert len(set(texts)) == 1, texts

    asyncio.run(run())


if __name__ == "__main__":
    url, model = arguments(__doc__)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        try_all("openai", [models, completions, chat, errors, concurrently], client, model)
