"""Scripts of other libraries, and how they are run."""
