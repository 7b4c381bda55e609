"""The version, where build tools can read it without importing anything."""

__version__ = "0.2.0"
