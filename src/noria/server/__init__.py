"""The HTTP front: OpenAI's API over an engine process.

start.py        from the command to the engine's process
hiding.py       secrets on the command line
run.py          loading, signals, drain, exit code
app.py          all routes, and the layers around them
routes.py       what a route is
calls.py        one request from arrival to end; the access log
access.py       who may call
keys.py         API keys and their tenants
endpoint.py     one POST: read, answer, notice a client that goes away
connections.py  those that send no request, or an endless one, are closed
http1.py        offers of other protocols, and what is no HTTP
request_body.py reading a body within limits
unread.py       what becomes of bodies that nobody has read
reading.py      query and JSON body of the smaller routes
headers.py      heads of answers
gate.py         bounds on the JSON of a call, and on what it may cost
bodies.py       what clients send, typed and checked
served.py       what an endpoint is told of the model
text_work.py    where text becomes tokens: at once, or in threads
templates.py    chat templates rendered in processes that can be killed
template_worker.py  such a process
writing.py      where answers are written: at once, or in threads
generation.py   from prompts to news of sequences
completions.py  /v1/completions: in and out
chat.py         /v1/chat/completions: in and out
answers.py      what they answer, whole or in chunks
envelope.py     what all answers have in common
info.py         health, readiness, load, models, metrics
tokenizing.py   /tokenize and /detokenize
admin.py        pause, resume, reset, abort, explain
openapi.py      the description of all routes
state.py        which phase the server is in, and what the routes share
scripted.py     the same server over an engine without a model
errors.py       errors in OpenAI's shape
"""
