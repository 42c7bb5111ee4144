"""What the operator and the worker agree on: names, exit codes and messages, and nothing else.

Both sides import this package, so it is standard library only and imports neither of them. Changing a value here is
an API change: pods that run an older worker image keep talking to a newer operator.
"""
