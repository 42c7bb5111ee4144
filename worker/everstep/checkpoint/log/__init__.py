"""The commit log: who may write, which records exist, and how a run takes the log."""
