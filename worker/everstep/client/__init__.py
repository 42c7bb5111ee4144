"""A Python client for jobs on clusters and local runs."""
