"""Parts of the operator that run in the test's process."""
