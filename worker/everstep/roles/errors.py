"""Errors of roles: one that a new connection mends, and one that needs a person."""

from everstep.contract.refusal import Refusal


class HubLost(ConnectionError):
    """The hub is gone, or the way to it is. `follow` looks for the next one."""


class RolesError(Refusal, RuntimeError):
    """A mistake in the script or in how it was started; trying again cannot help."""
