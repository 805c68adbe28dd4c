"""The jinja2 environment in which chat templates run.

Imported by `noria.text.chat_template` when a template is first used, because importing jinja2 takes time.
"""

from __future__ import annotations

from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from noria.text.chat_template import tojson


class GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}`: marks the assistant's words for training; plain text to us."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own way)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def raise_exception(message: Any) -> NoReturn:
    """How templates refuse a conversation."""
    raise jinja2.TemplateError(str(message))


def make_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, GenerationTag]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    return environment
