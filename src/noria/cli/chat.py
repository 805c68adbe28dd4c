"""`noria chat`: a conversation in the terminal, streamed. Works with piped input too: one line, one turn."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from noria.cli.common import LogLevel, ModelArgument
from noria.cli.options import GivenSampling
from noria.config import EngineOptions
from noria.errors import ModelError, OptionError, RequestError
from noria.logs import log_to_stderr
from noria.sampling import SamplingParams

if TYPE_CHECKING:
    from noria.llm import LLM

HELP = "/reset forgets the conversation, /exit or Ctrl-D ends, Ctrl-C stops an answer."


def chat(
    model: ModelArgument = None,
    *,
    system: Annotated[str | None, Parameter(help="A system message to begin with.", metavar="TEXT")] = None,
    log_level: LogLevel = "info",
    sampling: GivenSampling,
    engine: EngineOptions,
) -> None:
    """Talk with a model in the terminal."""
    named = sampling.over({})
    if named.n != 1 or named.logprobs is not None or named.prompt_logprobs is not None:
        raise OptionError(
            "a conversation has one answer at a time, shown as text: leave out --n, --logprobs and --prompt-logprobs"
        )
    log_to_stderr(log_level)
    from noria.assembly import build_engine
    from noria.llm import LLM

    with LLM.from_assembled(build_engine(model, engine)) as llm:
        if llm.tokenizer.chat_template is None:
            raise ModelError("this model has no chat template, so it cannot take messages; noria generate runs it")
        Conversation(llm, sampling.over(llm.assembled.sampling_defaults), system).run()


class Conversation:
    """Reads turns from stdin and prints the answers to stdout until the input ends."""

    def __init__(self, llm: LLM, sampling: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._sampling = sampling
        self._opening: list[Mapping[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._opening)
        self._is_terminal = sys.stdin.isatty() and sys.stdout.isatty()

    def run(self) -> None:
        self._say(HELP)
        while (line := self._read_line()) is not None:
            match line.strip():
                case "":
                    continue
                case "/help":
                    self._say(HELP)
                case "/exit":
                    return
                case "/reset":
                    self._messages = list(self._opening)
                    self._say("The conversation begins anew.")
                case text:
                    self._take_turn(text)

    def _read_line(self) -> str | None:
        try:
            return input("> " if self._is_terminal else "")
        except EOFError:
            return None
        except KeyboardInterrupt:  # at the prompt: nothing to stop
            self._say("\n(Ctrl-D or /exit ends)")
            return ""

    def _take_turn(self, text: str) -> None:
        """Answers one message. A refused one is forgotten; an answer that was stopped is kept as far as it came."""
        from noria.text.chat import encode_chat

        question = {"role": "user", "content": text}
        pieces: list[str] = []
        try:
            token_ids = encode_chat(self._llm.tokenizer, [*self._messages, question])
            # Closing the stream is what ends the request after an interrupt.
            with suppress(KeyboardInterrupt), closing(self._llm.stream(token_ids, self._sampling)) as answer:
                for piece in answer:
                    pieces.append(piece)
                    print(piece, end="", flush=True)
        except RequestError as error:
            print(f"noria: {error} (/reset begins anew)", file=sys.stderr)
            return
        print(flush=True)
        self._messages += [question, {"role": "assistant", "content": "".join(pieces)}]

    def _say(self, text: str) -> None:
        if self._is_terminal:
            print(text, file=sys.stderr)
