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


def test_extra_fields_and_errors(client):
    answer = client.completions.create(model="scripted", prompt="x", max_tokens=2, extra_body={"top_k": 5})
    assert len(answer.choices[0].text) == 2
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="scripted", prompt="x", max_tokens=-1)
    assert refused.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt="x")
    assert missing.value.code == "model_not_found"


@pytest.mark.anyio
async def test_closing_an_async_stream_ends_the_request(server):
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.completions.create(model="scripted", prompt="x", max_tokens=500, stream=True)
        async for chunk in stream:
            assert chunk.choices
            break
        await stream.close()
    server.wait_quiet()
