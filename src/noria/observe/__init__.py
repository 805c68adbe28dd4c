"""What the engine and the front did, told to people and their tools.

Of the engine everything is read from its step records (`stats`), so that it adds up. What records do not know has two
sources of its own: the calls that clients make, counted by the front (`calls`), and processor time, which the system
tells (`cpu`).
"""
