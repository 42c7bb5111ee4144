"""What makes a release: `make version` and `make release`. docs/operations/releasing.md says how to use it."""
