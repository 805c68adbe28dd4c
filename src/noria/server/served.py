"""What an endpoint's own part is told of the model and the server: `ServedModel`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from noria.server.errors import ApiError
from noria.server.text_work import TextWork
from noria.text.chat_template import ChatTemplate
from noria.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model under the name that the client used for it."""

    name: str
    tokenizer: Tokenizer
    max_model_len: int
    text_work: TextWork
    trust_request_chat_template: bool = False
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    """For sampling parameters that a request leaves out."""

    def request_template(self, source: str | None) -> ChatTemplate | None:
        """The template that a request brings, if it does. Raises `ApiError` unless the operator allows that."""
        if source is None:
            return None
        if not self.trust_request_chat_template:
            raise ApiError(
                400,
                "chat templates that come with a request are refused here: leave chat_template out, or start the "
                "server with --trust-request-chat-template",
                param="chat_template",
                code="unsupported_parameter",
            )
        return self.text_work.foreign_template(source, self.tokenizer.chat_template)
