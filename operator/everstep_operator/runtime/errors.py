"""What can go wrong in the runtime itself; failures of Kubernetes stay `kube.errors`."""

from everstep_operator.errors import RetryableError, TerminalError


class QueueFull(RetryableError):
    """The bound of a queue is reached; there is room once keys are worked off."""


class NotLeading(TerminalError):
    """A write was about to be made without leadership. The pass is over; the next leader does it."""
