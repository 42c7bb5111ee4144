"""Runs of the examples, and the figures that they measured."""
