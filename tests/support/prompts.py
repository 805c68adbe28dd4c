"""Prompts for end-to-end tests: text, code and chat, from one token to about 700. Fixed: near ties make greedy answers
depend on every character, so a changed prompt is a changed test."""

from __future__ import annotations

PROSE = (
    "The water wheel stands where the river bends, and nobody in the village remembers who built it. Its buckets "
    "go down empty and come up full, hour after hour, whether or not anyone is watching. In spring, when the snow "
    "melts in the hills, the wheel turns so fast that the old wooden trough overflows and the lower gardens get more "
    "water than they can drink. In August it barely moves. The miller's daughter once counted the buckets and found "
    "that there were forty, one of them cracked, so that it always arrived half empty at the top. "
)
LOG = "".join(
    f"2026-03-{day:02d}T08:{day * 2 % 60:02d}:17Z station={name} level={day * 37 % 211 / 100:.2f}m "
    f"flow={day * 53 % 97} ok\n"
    for day, name in enumerate(
        ("Elm", "Oak", "Ash", "Birch", "Cedar", "Fir", "Hazel", "Larch", "Maple", "Pine"), start=1
    )
)
CODE = '''\
class Ring:
    """A buffer that forgets its oldest entries."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.items = []

    def append(self, item):
        self.items.append(item)
        if len(self.items) > self.capacity:
            del self.items[0]

    def __len__(self):
        return len(self.items)


def moving_average(values, width):
    """Yields the mean of the last `width` values."""
    ring = Ring(width)
    for value in values:
        ring.append(value)
        yield'''

TEXTS = (
    "Hello",
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "Zürich, São Paulo und 東京 liegen auf drei Kontinenten.",
    "def fibonacci(n):\n    ",
    CODE,
    "SELECT name, count(*) FROM orders JOIN customers USING (customer_id)\nWHERE",
    PROSE,
    LOG,
    PROSE * 3 + "In short, the wheel",
    CODE.replace("Ring", "Window") * 2 + "\n\n" + LOG + CODE,
)
CHATS = (
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
        {"role": "assistant", "content": "Because air scatters blue light more than red light."},
        {"role": "user", "content": "And why are sunsets red?"},
    ],
    [{"role": "user", "content": f"Summarise this text in three points:\n\n{PROSE}"}],
)
NEIGHBOURS = tuple(
    f"{verb} {count} {noun}, then explain why {noun} matter."
    for count, verb, noun in zip(
        range(2, 21),
        ("List", "Name", "Describe", "Compare", "Draw") * 4,
        ("rivers", "metals", "planets", "poems", "bridges", "numbers", "birds") * 3,
        strict=False,
    )
)
"""Other people's requests, for tests that must not be disturbed by them."""
