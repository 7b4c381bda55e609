"""Attempts to break the program: crashes, power cuts, hostile files, hostile clients. `make torture` runs them all."""
