"""The version, where build tools can read it without importing anything."""

__version__ = "0.1.0"
