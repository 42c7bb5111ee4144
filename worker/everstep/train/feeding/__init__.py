"""The data of a run: the loaders that it trains on, and other loaders that must follow the world."""
