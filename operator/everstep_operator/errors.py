"""The bases of the operator's errors: errors that may pass by themselves, and errors that do not.

Callers need no other distinction. A `RetryableError` may be over at the next try, or after a fresh read. A
`TerminalError` stays until somebody changes the request, the object, the permissions or the configuration.
"""


class OperatorError(Exception):
    """The text says what was wrong, where, and what to do; it is fit for a log line or an answer."""


class RetryableError(OperatorError):
    """The same request may succeed later without anybody's action."""


class TerminalError(OperatorError):
    """Repeating the same thing cannot succeed until something else changes."""
