"""Where text becomes tokens: on the event loop when that is quicker than to ask, else in a thread: `TextWork`.

Short prompts are tokenised at once (some 0.25 ms per 1,000 characters; a thread costs about 0.1 ms, more when all cores
are busy). Long ones, and everything about chat templates, which wait for their process (`noria.server.templates`), have
threads: few of them, since the engine needs the cores, and one apart for request-supplied templates, which may be slow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from noria.config import ServerOptions
from noria.server.errors import unavailable
from noria.server.template_worker import LOWEST_PRIORITY
from noria.server.templates import ProcessTemplate, TemplateProcess
from noria.text.chat_template import ChatTemplate
from noria.text.tokenizer import Tokenizer

T = TypeVar("T")

LARGE_BODY_BYTES = 8 * 1024
"""A body above this is understood in a thread."""

MAX_WAITING = 64
"""Calls of one kind that may wait for a thread: beyond, they are refused rather than kept in memory."""


class _Pool:
    """A few threads, and a bound on who waits for them."""

    def __init__(self, num_threads: int, purpose: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=f"noria-{purpose}")
        self._purpose = purpose
        self._most = num_threads + MAX_WAITING
        self._num_inside = 0

    async def run(self, call: Callable[[], T]) -> T:
        if self._num_inside >= self._most:
            raise unavailable(
                f"{self._num_inside} calls are at {self._purpose} already; come back later", "text_queue_full"
            )
        self._num_inside += 1
        # The pool's queue keeps what is cancelled until a thread comes to it: of a call, then, no more than the list.
        waiting = [call]
        del call
        future = self._threads.submit(lambda: waiting.pop()())
        loop = asyncio.get_running_loop()

        def leave() -> None:
            self._num_inside -= 1

        def end(future: Future[T]) -> None:
            waiting.clear()
            _call_soon(loop, leave)

        # Counted until the thread is done with it, which may be later than that anybody waits for it.
        future.add_done_callback(end)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(call)


class TextWork:
    """The threads and template processes of one server. Used on its event loop."""

    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self._long_texts = _Pool(2, "tokenising")
        self._chats = _Pool(2, "chat")
        self._foreign_chats = _Pool(1, "request-templates")
        cpu_s = options.chat_template_timeout_s
        self.templates = TemplateProcess(cpu_s=cpu_s, param="messages")
        self.foreign_templates = TemplateProcess(cpu_s=cpu_s, param="chat_template", niceness=LOWEST_PRIORITY)

    def take_template(self, tokenizer: Tokenizer) -> None:
        """Lets the model's own template be rendered in a process, which is started, as is that for those of requests
        if there may be any. Blocks for some milliseconds."""
        template = tokenizer.chat_template
        if template is not None:
            tokenizer.chat_template = ProcessTemplate(
                template.source, special_tokens=template.special_tokens, process=self.templates
            )
            self.templates.start()
        if self._options.trust_request_chat_template:
            self.foreign_templates.start()  # while the machine is not busy: its priority is low

    def foreign_template(self, source: str, own: ChatTemplate | None) -> ChatTemplate:
        """A request's template, with the special tokens of the model's."""
        special_tokens = {} if own is None else own.special_tokens
        return ProcessTemplate(source, special_tokens=special_tokens, process=self.foreign_templates)

    async def run(self, call: Callable[[], T], *, num_bytes: int) -> T:
        """What `call` makes of a text of `num_bytes`: at once if it is short."""
        return call() if num_bytes <= LARGE_BODY_BYTES else await self._long_texts.run(call)

    async def run_chat(self, call: Callable[[], T], *, is_foreign: bool) -> T:
        """What `call` makes of messages with a template."""
        return await (self._foreign_chats if is_foreign else self._chats).run(call)

    def close(self) -> None:
        """Waits for nobody: what is under way in a thread is a bounded piece of work, or ends with its process."""
        for pool in (self._long_texts, self._chats, self._foreign_chats):
            pool.close()
        self.templates.close()
        self.foreign_templates.close()
