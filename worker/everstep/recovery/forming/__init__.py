"""Makes and closes the gloo groups of one round."""
