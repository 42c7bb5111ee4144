"""The operator's JSON logs and Prometheus metrics. This package decides nothing and sends nothing."""
