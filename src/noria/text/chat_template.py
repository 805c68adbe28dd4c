"""A model's chat template: jinja2 source that turns messages into one text.

Used by `noria.text.chat`, which checks the messages and tokenizes what comes out. The template is foreign code: it
runs in jinja2's immutable sandbox, which bounds what it can reach but not how long it takes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from noria.errors import RequestError

if TYPE_CHECKING:
    import jinja2


class ChatTemplate:
    """One template, compiled at first use and then shared.

    Offers templates what transformers offers them: `messages`, `tools`, `documents`, `add_generation_prompt`, the
    model's special tokens by name, `raise_exception`, `strftime_now`, `tojson` that leaves HTML alone,
    `break`/`continue`, and `{% generation %}` (which has no effect here).
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        clock: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`special_tokens`: variable name to spelling, such as {"bos_token": "<s>"}."""
        self.source = source
        self.special_tokens = {"bos_token": "", "eos_token": "", **(special_tokens or {})}
        self._clock = clock

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation. Raises `RequestError` (param "messages") if the template fails or refuses.

        `template_kwargs` are further variables; they cannot replace the messages or the special tokens.
        """
        variables = {"tools": None, "documents": None} | dict(template_kwargs or {}) | self.special_tokens
        try:
            return self._compiled.render(variables, messages=messages, add_generation_prompt=add_generation_prompt)
        except RequestError:
            raise
        except Exception as error:  # Anything can come out of foreign code; all of it is about these messages.
            reason = str(error) or type(error).__name__
            raise RequestError(f"the chat template cannot render these messages: {reason}", param="messages") from error

    @cached_property
    def _compiled(self) -> jinja2.Template:
        # Not at the top: jinja2 costs some 50 ms, which completions need not pay.
        import jinja2

        from noria.text.chat_environment import make_environment

        environment = make_environment()
        environment.globals["strftime_now"] = lambda fmt: self._clock().strftime(fmt)
        try:
            return environment.from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            message = f"the model's chat template does not compile: line {error.lineno}: {error.message}"
            raise RequestError(message, param="messages") from error


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on it: jinja2's own filter escapes for HTML and sorts keys."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
