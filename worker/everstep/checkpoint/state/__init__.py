"""A training state as named tensors and JSON values, and back. Knows no store."""
