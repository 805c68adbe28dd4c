"""Every error that Noria raises on purpose, as one small tree.

    NoriaError
    ├── OptionError             an option of the engine cannot be honoured; the message says what to change
    ├── ModelError              a model cannot be found, read or run
    │   ├── ModelFileError      a file or tensor is missing, truncated, unexpected or misshapen
    │   └── UnsupportedError    a well-formed model that this version cannot run; lists what is supported
    ├── RequestError            one request is wrong (HTTP 400); nobody else is affected
    │   └── ContextLengthError  prompt, or prompt and max_tokens, exceed the context
    ├── UnavailableError        nothing is wrong with the request, but not now (HTTP 503)
    └── EngineError             the engine itself failed or is gone

Anything else that escapes is a bug.
"""

from __future__ import annotations


class NoriaError(Exception):
    """Base of every deliberate error."""


class OptionError(NoriaError):
    """An engine option has a bad value, alone or beside another one."""


class ModelError(NoriaError):
    """A model cannot be found, read or run."""


class ModelFileError(ModelError):
    """A model file is missing, truncated or inconsistent; the message names the file and the tensor."""


class UnsupportedError(ModelError):
    """A well-formed model asks for something this version does not have; the message lists what it has."""


class RequestError(NoriaError):
    """One request is refused.

    `param` is the name of the offending field as the client spelled it (None when no single field is at
    fault); `code` is a short machine-readable reason in the manner of OpenAI's API.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextLengthError(RequestError):
    """The prompt alone, or prompt plus `max_tokens`, is longer than the context.

    Messages say "this model's maximum context length is": clients that shorten and try again look for these words.
    """

    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class UnavailableError(NoriaError):
    """The request is refused for now: the queue is full, or the engine is draining.

    `code` says which in a word, for machines.
    """

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


class EngineError(NoriaError):
    """The engine failed; requests that were in it are lost."""
