"""Runs of the training script."""
