"""The version, for whoever must not import the package itself to know it."""

__version__ = "0.1.0"
