"""Instruments that look into a training that goes on, and cost nothing while nobody looks."""
