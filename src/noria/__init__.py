"""Noria: an LLM inference server and library built on continuous batching.

`import noria` is cheap; the heavy parts are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from noria.llm import LLM as LLM
    from noria.sampling import SamplingParams as SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from noria.llm import LLM

        return LLM
    if name == "SamplingParams":
        from noria.sampling import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'noria' has no attribute {name!r}")
