"""`noria conformance`: black-box checks of any OpenAI-compatible server. It needs nothing but the server's URL.

Checks look at contracts, never at what a model says: that the pieces of a stream make the whole text, that usage adds
up, that a refusal names the field. `noria.conformance.catalogue` lists them all, by theme; `noria.conformance.run` runs
them. Everything goes over the standard library's sockets and `http.client`: several checks need a connection in their
hands (pipelined requests, half a body, a client that leaves), and a tool for other people's servers should need no
extra.
"""
