"""Measurements of an engine, for `noria bench`."""
