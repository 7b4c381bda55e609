"""Benchmarks, runs and metrics."""
