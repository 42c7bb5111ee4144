"""The process groups that a script uses: it keeps them while their members change."""
