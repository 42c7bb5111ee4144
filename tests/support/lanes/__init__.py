"""How the lanes of tests run, and the plugins that keep them honest."""
