"""The HTTP front: OpenAI's API over an engine process.

run.py          start, signals, drain, exit code
app.py          routes and the state they share
endpoint.py     one POST: read, answer, notice a client that goes away
bodies.py       what clients send, typed and checked
generation.py   from prompts to news of sequences
completions.py  /v1/completions: in and out
chat.py         /v1/chat/completions: in and out
errors.py       errors in OpenAI's shape
"""
