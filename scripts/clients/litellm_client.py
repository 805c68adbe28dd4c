"""LiteLLM, under its names for servers like this one: `hosted_vllm/`, `openai/` and `text-completion-openai/`.

python -m venv /tmp/litellm && /tmp/litellm/bin/pip install litellm
/tmp/litellm/bin/python scripts/clients/litellm_client.py http://127.0.0.1:8000
"""

import asyncio
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # prices are no business of ours: do not fetch any

import litellm
from common import MESSAGES, PROMPT, arguments, raises, try_all

CHAT_PROVIDERS = ["openai", "hosted_vllm"]
TEXT_PROVIDERS = ["text-completion-openai", "hosted_vllm"]


def options(url: str) -> dict:
    return {"api_base": f"{url}/v1", "api_key": "none", "temperature": 0, "max_tokens": 16, "num_retries": 0}


def chat(url: str, model: str) -> None:
    """Chat: whole and streamed are one text, with usage at the end; stop; n; logprobs."""
    for provider in CHAT_PROVIDERS:
        body = {"model": f"{provider}/{model}", "messages": MESSAGES} | options(url)
        whole = litellm.completion(**body)
        text = whole.choices[0].message.content
        assert text
        assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
        chunks = list(litellm.completion(**body, stream=True, stream_options={"include_usage": True}))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
        assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
        rebuilt = litellm.stream_chunk_builder(chunks)
        assert (rebuilt.choices[0].message.content, rebuilt.usage.total_tokens) == (text, whole.usage.total_tokens)
        assert rebuilt.choices[0].finish_reason == whole.choices[0].finish_reason
        assert litellm.completion(**body, stop=[text[4:8]]).choices[0].message.content == text[:4]
        assert len(litellm.completion(**body | {"temperature": 1}, n=2).choices) == 2
        assert litellm.completion(**body, logprobs=True, top_logprobs=1).choices[0].logprobs.content


def completions(url: str, model: str) -> None:
    """Completions: whole and streamed are one text; several prompts."""
    for provider in TEXT_PROVIDERS:
        body = {"model": f"{provider}/{model}", "prompt": PROMPT} | options(url)
        whole = litellm.text_completion(**body)
        assert whole.choices[0].text
        chunks = list(litellm.text_completion(**body, stream=True))
        assert "".join(chunk.choices[0].text or "" for chunk in chunks if chunk.choices) == whole.choices[0].text
        assert len(litellm.text_completion(**body | {"prompt": [PROMPT, "Two and two"]}).choices) == 2


def errors(url: str, model: str) -> None:
    """Errors become LiteLLM's: not found, bad request, and a context that is too long."""
    for provider in CHAT_PROVIDERS:
        body = {"messages": MESSAGES, "model": f"{provider}/{model}"} | options(url)
        for change, kind in (
            ({"model": f"{provider}/no-such-model"}, litellm.NotFoundError),
            ({"max_tokens": -1}, litellm.BadRequestError),
            ({"messages": [{"role": "user", "content": "x y " * 20_000}]}, litellm.ContextWindowExceededError),
        ):
            with raises(kind):
                litellm.completion(**body | change)


def concurrently(url: str, model: str) -> None:
    """Eight calls at once from its asynchronous interface, through its router."""
    router = litellm.Router(
        model_list=[
            {"model_name": "any", "litellm_params": {"model": f"hosted_vllm/{model}"} | options(url)},
        ]
    )

    async def run() -> None:
        answers = await asyncio.gather(*(router.acompletion(model="any", messages=MESSAGES) for _ in range(8)))
        assert len({answer.choices[0].message.content for answer in answers}) == 1

    asyncio.run(run())


if __name__ == "__main__":
    url, model = arguments(__doc__)
    litellm.suppress_debug_info = True
    try_all("litellm", [chat, completions, errors, concurrently], url, model)
