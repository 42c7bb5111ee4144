"""Which commits there are and which stay: rules, holds, clean-up. No torch."""
