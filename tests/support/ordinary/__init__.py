"""Ordinary training scripts that are played with kills."""
