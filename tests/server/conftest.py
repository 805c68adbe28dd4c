"""Fixtures of the server tests."""

from collections.abc import Iterator

import pytest
from serving import Server, running_server


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server whose engine verifies every plan and answers with letters that depend on everything before them."""
    with running_server({"checked": True, "max_model_len": 512, "num_blocks": 256}) as running:
        yield running
        assert running.process.poll() is None, "the server ended; its log:\n" + "".join(running.log)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
