"""LangChain's classes for OpenAI.

python -m venv /tmp/langchain && /tmp/langchain/bin/pip install langchain-openai
/tmp/langchain/bin/python scripts/clients/langchain_client.py http://127.0.0.1:8000
"""

import asyncio

import openai
from common import PROMPT, arguments, raises, try_all
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI

QUESTION = [SystemMessage("Answer in one sentence."), HumanMessage("What is the capital of France?")]


def settings(url: str, model: str) -> dict:
    return {"base_url": f"{url}/v1", "api_key": "none", "model": model, "temperature": 0, "max_tokens": 16,
            "max_retries": 0}  # fmt: skip


def chat(url: str, model: str) -> None:
    """Chat: invoke and stream are one text; usage in both; stop; the finish reason."""
    chat_model = ChatOpenAI(**settings(url, model), stream_usage=True)
    whole = chat_model.invoke(QUESTION)
    assert whole.content
    assert whole.response_metadata["finish_reason"] in ("stop", "length")
    chunks = list(chat_model.stream(QUESTION))
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert total.content == whole.content
    assert total.usage_metadata["total_tokens"] == whole.usage_metadata["total_tokens"] > 16
    assert chat_model.invoke(QUESTION, stop=[whole.content[4:8]]).content == whole.content[:4]
    assert chat_model.bind(logprobs=True, top_logprobs=2).invoke(QUESTION).response_metadata["logprobs"]["content"]
    several = ChatOpenAI(**settings(url, model) | {"temperature": 1}, n=2).generate([QUESTION])
    assert len(several.generations[0]) == 2


def chain(url: str, model: str) -> None:
    """A chain of prompt, model and parser: invoked, in batches, and asynchronously as a stream."""
    prompt = ChatPromptTemplate.from_messages([("user", "What is the capital of {country}?")])
    pipeline = prompt | ChatOpenAI(**settings(url, model)) | StrOutputParser()
    whole = pipeline.invoke({"country": "France"})
    assert pipeline.batch([{"country": "France"}, {"country": "Spain"}])[0] == whole

    async def run() -> None:
        assert "".join([text async for text in pipeline.astream({"country": "France"})]) == whole

    asyncio.run(run())


def completions(url: str, model: str) -> None:
    """Completions: invoke and stream are one text; several prompts; stop."""
    text_model = OpenAI(**settings(url, model))
    whole = text_model.invoke(PROMPT)
    assert whole
    assert "".join(text_model.stream(PROMPT)) == whole
    result = text_model.generate([PROMPT, "Two and two"])
    assert result.generations[0][0].text == whole
    assert result.llm_output["token_usage"]["completion_tokens"] > 16
    assert text_model.invoke(PROMPT, stop=[whole[4:8]]) == whole[:4]


def errors(url: str, model: str) -> None:
    """Errors: the SDK's own, naming the field."""
    for change, kind, params in (
        ({"max_tokens": -1}, openai.BadRequestError, ("max_tokens", "max_completion_tokens")),
        ({"model": "no-such-model"}, openai.NotFoundError, ("model",)),
    ):
        with raises(kind) as refused:
            ChatOpenAI(**settings(url, model) | change).invoke(QUESTION)
        assert refused.error.param in params, refused.error


if __name__ == "__main__":
    url, model = arguments(__doc__)
    try_all("langchain-openai", [chat, chain, completions, errors], url, model)
