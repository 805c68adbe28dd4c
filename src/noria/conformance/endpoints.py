"""The two generating endpoints, so that one check can be written for both."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

PROMPTS = (
    "Once upon a time, in a village by a river, there lived",
    "The history of the wheel begins with",
    "Here is a long list of words: one, two, three,",
)
"""Asked greedily, at least one of them gets a text that goes on for some tokens."""


class Endpoint(ABC):
    """How one endpoint is asked and how its answers are read."""

    name: str
    path: str
    id_prefix: str
    object_name: str
    chunk_object_name: str

    @abstractmethod
    def prompt(self, text: str) -> dict[str, Any]:
        """The field that carries a prompt."""

    @abstractmethod
    def text(self, choice: dict[str, Any]) -> str:
        """The text of a choice of a whole answer."""

    @abstractmethod
    def piece(self, choice: dict[str, Any]) -> str:
        """The text that a choice of a chunk adds."""

    def body(self, model: str, fields: dict[str, Any]) -> dict[str, Any]:
        """A short greedy request, with `fields` in place of the defaults."""
        return {"model": model, "max_tokens": 12, "temperature": 0} | self.prompt(PROMPTS[0]) | fields


class Completions(Endpoint):
    name = "completions"
    path = "/v1/completions"
    id_prefix = "cmpl-"
    object_name = chunk_object_name = "text_completion"

    def prompt(self, text: str) -> dict[str, Any]:
        return {"prompt": text}

    def text(self, choice: dict[str, Any]) -> str:
        return str(choice["text"])

    def piece(self, choice: dict[str, Any]) -> str:
        return str(choice.get("text") or "")


class Chat(Endpoint):
    name = "chat"
    path = "/v1/chat/completions"
    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def prompt(self, text: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": f"Continue this, at length: {text}"}]}

    def text(self, choice: dict[str, Any]) -> str:
        return str(choice["message"]["content"])

    def piece(self, choice: dict[str, Any]) -> str:
        return str(choice["delta"].get("content") or "")


COMPLETIONS = Completions()
CHAT = Chat()
