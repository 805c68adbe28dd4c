"""The official SDK, as people use it."""

import openai
import pytest


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models(client):
    assert [model.id for model in client.models.list()] == ["scripted"]
    assert client.models.retrieve("scripted").owned_by == "noria"


def test_completions_with_n_and_logprobs(client):
    whole = client.completions.create(model="scripted", prompt="Hello", max_tokens=12, n=3, logprobs=0)
    assert [choice.finish_reason for choice in whole.choices] == ["length"] * 3
    assert all("".join(choice.logprobs.tokens) == choice.text for choice in whole.choices)
    texts = ["", "", ""]
    for chunk in client.completions.create(model="scripted", prompt="Hello", max_tokens=12, n=3, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]


def test_chat_with_n_and_logprobs(client):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    whole = client.chat.completions.create(model="scripted", messages=messages, max_tokens=12, n=3, logprobs=True)
    assert all(
        "".join(entry.token for entry in choice.logprobs.content) == choice.message.content for choice in whole.choices
    )
    texts = ["", "", ""]
    usage = None
    for chunk in client.chat.completions.create(
        model="scripted", messages=messages, max_tokens=12, n=3, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert usage == whole.usage.model_copy(update={"prompt_tokens_details": usage.prompt_tokens_details})


def test_echo_and_scoring(client):
    body = {"model": "scripted", "prompt": ["Hello", "you"], "echo": True, "logprobs": 1}
    whole = client.completions.create(**body, max_tokens=0)
    assert [choice.text for choice in whole.choices] == ["Hello", "you"]
    assert [choice.logprobs.token_logprobs for choice in whole.choices] == [[None, -1, -2, -3, -4], [None, -1, -2]]
    assert whole.usage.completion_tokens == 0
    texts = ["", ""]
    for chunk in client.completions.create(**body, max_tokens=3, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            assert len(choice.logprobs.tokens) == len(choice.logprobs.text_offset)
    whole = client.completions.create(**body, max_tokens=3)
    assert texts == [choice.text for choice in whole.choices]


def test_openais_own_fields(client):
    whole = client.completions.create(
        model="scripted", prompt="x", max_tokens=3, best_of=3, n=2, logit_bias={"65": -5}, user="me", presence_penalty=0
    )
    assert len(whole.choices) == 2
    chat = client.chat.completions.create(
        model="scripted",
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {"role": "assistant", "content": "Yes?", "name": "a"},
            {"role": "user", "content": "Go on", "name": "u"},
        ],
        max_completion_tokens=4,
        reasoning_effort="low",
        logprobs=True,
        top_logprobs=2,
        metadata={"a": "b"},
        store=False,
    )
    assert chat.usage.completion_tokens == 4
    assert [entry.top_logprobs for entry in chat.choices[0].logprobs.content] == [[]] * 4
    assert chat.usage.prompt_tokens_details.cached_tokens % 16 == 0


def test_answers_and_chunks_are_what_the_sdk_declares_them_to_be(client):
    """The SDK takes what comes; its own models, asked strictly, do not. None in, all declared fields well-typed."""
    messages = [{"role": "user", "content": "Hi"}]
    options = {"include_usage": True, "continuous_usage_stats": True}
    for create, prompt in (
        (client.completions.create, {"prompt": "x", "logprobs": 1, "echo": True}),
        (client.chat.completions.create, {"messages": messages, "logprobs": True}),
    ):
        body = {"model": "scripted", "max_tokens": 3, **prompt}
        answers = [create(**body), *create(**body, stream=True, stream_options=options)]
        for answer in answers:
            assert_well_typed(answer)


def assert_well_typed(answer):
    told = answer.model_dump()
    if told["object"] == "text_completion":
        # Declared as numbers, and documented as null for the first token of an echo.
        for choice in told["choices"]:
            if choice["logprobs"]:
                for name in ("token_logprobs", "top_logprobs"):
                    choice["logprobs"][name] = [value for value in choice["logprobs"][name] if value is not None]
            choice["finish_reason"] = choice["finish_reason"] or "stop"  # declared as never null, and null in streams
    type(answer).model_validate(told, strict=True)


def test_extra_fields_and_errors(client):
    answer = client.completions.create(model="scripted", prompt="x", max_tokens=2, extra_body={"top_k": 5})
    assert len(answer.choices[0].text) == 2
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="scripted", prompt="x", max_tokens=-1)
    assert refused.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt="x")
    assert missing.value.code == "model_not_found"


def test_the_sdk_knows_the_name_of_a_request(client):
    body = {"model": "scripted", "prompt": "x", "max_tokens": 2}
    answer = client.completions.create(**body)
    assert answer.id == f"cmpl-{answer._request_id}"
    assert client.completions.create(**body, extra_headers={"X-Request-Id": "mine"})._request_id == "mine"
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(**body | {"max_tokens": -1}, extra_headers={"X-Request-Id": "mine"})
    assert refused.value.request_id == "mine"


@pytest.mark.anyio
async def test_closing_an_async_stream_ends_the_request(server):
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.completions.create(model="scripted", prompt="x", max_tokens=500, stream=True)
        async for chunk in stream:
            assert chunk.choices
            break
        await stream.close()
    server.wait_quiet()
