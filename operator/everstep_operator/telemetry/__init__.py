"""What the operator says about itself: JSON logs and Prometheus metrics. Decides nothing and talks to nobody."""
