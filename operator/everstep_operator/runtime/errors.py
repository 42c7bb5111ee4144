"""Errors of the runtime itself. Failures of Kubernetes are those of `kube.errors`."""

from everstep_operator.errors import RetryableError, TerminalError


class QueueFull(RetryableError):
    """A queue is full. It has room again once keys have been worked on."""


class NotLeading(TerminalError):
    """A write was about to be made without leadership. The pass ends, and the next leader does the work."""
