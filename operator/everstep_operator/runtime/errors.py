"""What can go wrong in the runtime itself; failures of Kubernetes stay `kube.errors`."""


class RuntimeFault(Exception):
    """Base of this package's errors."""


class QueueFull(RuntimeFault):
    """The bound of a queue is reached; retryable once keys are worked off."""


class QueueShutDown(RuntimeFault):
    """The queue was closed; terminal for the worker that waits on it."""


class Outage(RuntimeFault):
    """Something outside does not work at the moment; the text says what. A later pass overcomes it."""


class NotLeading(RuntimeFault):
    """A write was about to be made without leadership; terminal for that pass, the next leader does it."""
