"""The words for a distribution of ours that is missing, in one place.

No package index has the names for us: what is there under one of them is somebody else's. So these words never say
`pip install` and a name alone. An extra of a distribution that is installed is another matter: pip takes only other
people's packages for it.
"""

from everstep.version import __version__


def remedy(*distributions: str) -> str:
    """What to do where `distributions` are missing, such as `everstep-local`."""
    names = " and ".join(distributions)
    return f"install {names} {__version__} from your checkout or release of Everstep (docs/how-to-install.md)"
