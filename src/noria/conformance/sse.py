"""Server-sent events, read as the HTML standard says a client must read them."""

from __future__ import annotations

import re

from noria.conformance.contract import expect, fail


def read_events(body: bytes) -> list[str]:
    """The data of each event. Comments and other fields are passed over. Raises `Unmet` where a client would lose text.

    Lines may end with CR LF, LF or CR; an event ends with an empty line, and one that does not is thrown away.
    """
    try:
        text = body.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        fail(f"the stream is not UTF-8: {error}")
    lines = re.split("\r\n|\n|\r", text)
    expect(lines.pop() == "", "the stream ends in the middle of a line")
    events: list[str] = []
    data: list[str] = []
    for line in lines:
        name, _, value = line.partition(":")
        if line == "":
            if data:
                events.append("\n".join(data))
            data = []
        elif name == "data":
            data.append(value.removeprefix(" "))
        else:
            expect(name in ("", "event", "id", "retry"), f"not a line of an event stream: {line[:80]!r}")
    expect(not data, "the last event has no empty line after it, so clients throw it away")
    return events
