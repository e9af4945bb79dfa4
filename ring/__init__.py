"""Exact attention sharded along the sequence."""
