"""The error of a release that is refused."""


class ReleaseError(Exception):
    """Its text is one line: what is wrong, where, and what to do."""
