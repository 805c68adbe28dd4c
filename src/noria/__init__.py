"""Noria: an LLM inference server and library built on continuous batching.

`import noria` is cheap; the heavy parts are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from noria.version import __version__

if TYPE_CHECKING:
    from noria.llm import LLM as LLM
    from noria.sampling import SamplingParams as SamplingParams

__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from noria.llm import LLM

        return LLM
    if name == "SamplingParams":
        from noria.sampling import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'noria' has no attribute {name!r}")
