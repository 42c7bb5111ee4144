"""Which folder a path means, and which texts are no path: a URL with a slash too few must not make a folder `s3:`.

Invariant: a text that is refused here says in its error what to write instead, and every folder can be written somehow.
"""

from __future__ import annotations

import os
import re
from urllib.parse import unquote

from everstep.storage.errors import StoreUnusable

# `s3:/bucket`, `gs:bucket`: what stands before the first slash looks like a scheme. RFC 3986 says how schemes look.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(/*)(.*)", re.DOTALL)
# `10.0.0.5:9000`, `[::1]:9000`: no scheme begins so, and a folder `2026-01-01T10:00` does not either.
_ADDRESS = re.compile(r"(\d{1,3}(?:\.\d{1,3}){3}|\[[0-9A-Fa-f:.]+\]):\d+(/.*)?", re.DOTALL)
_PORT = re.compile(r"\d+(/|$)")
_VARIABLE = re.compile(r"\$(\w+|\{[^}]*\})")


def folder(path: str) -> str:
    """The folder that `path`, which has no `://`, means: `~` is the home folder. Raises `StoreUnusable`."""
    if path != path.strip():
        raise StoreUnusable(f"{path!r} begins or ends with a blank or a line break: take it away")
    _check_variables(path)
    if path.startswith("~"):
        found = os.path.expanduser(path)
        if found.startswith("~"):
            name = path.partition("/")[0]
            raise StoreUnusable(f"{path}: {name} is no user with a home folder; a folder of that name is ./{path}")
        return found
    if _ADDRESS.fullmatch(path):
        raise StoreUnusable(f"{path}: {_of_host(path)}; a folder of that name is ./{path}")
    if (said := _SCHEME.match(path)) and "/" not in said[1]:
        raise StoreUnusable(f"{path}: {_instead(said[1], said[3])}; a folder of that name is ./{path}")
    return path


def folder_of_url(url: str, rest: str) -> str:
    """The folder of a `file://` URL, of which `rest` is what follows that, %-encoded. Raises `StoreUnusable`."""
    host, slash, _ = rest.partition("/")
    if host.lower() == "localhost" and slash:  # RFC 8089: the same as none
        rest = rest[len(host) :]
    if not rest.startswith("/"):
        raise StoreUnusable(f"{url}: a file URL needs an absolute path, as in file:///path")
    _check_variables(url)
    return unquote(rest)


def _check_variables(path: str) -> None:
    if (variable := _VARIABLE.search(path)) is not None:
        name = variable[0]
        raise StoreUnusable(
            f"{path}: {name} is an environment variable, and nothing replaces it here: give the path itself. A folder "
            f"of that name is %24{name[1:]} in a file:// URL"
        )


def _instead(scheme: str, rest: str) -> str:
    match scheme.lower():
        case "file" | "local":
            return f"a file URL has three slashes: file:///{rest}"
        case "dbfs":
            return f"a folder of Databricks is mounted at /dbfs: /dbfs/{rest}"
        case _ if _PORT.match(rest):
            return _of_host(f"{scheme}:{rest}")
        case known:
            return f"two slashes follow the scheme of a URL: {known}://{rest}"


def _of_host(text: str) -> str:
    return (
        f"this looks like a host with a port, and says no scheme: http://{text} for a web server; for an S3 server "
        "s3://BUCKET/FOLDER, with the server as AWS_ENDPOINT_URL"
    )


def normal(url: str) -> tuple[str, str, str]:
    """A URL, its scheme in lower case (RFC 3986: schemes have no case), and what follows `://`; the text itself and two
    empty ones if it has no `://`. Raises `StoreUnusable` for blanks around it."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return url, "", ""
    if url != url.strip():
        raise StoreUnusable(f"{url!r} begins or ends with a blank or a line break: take it away")
    scheme = scheme.lower()
    return f"{scheme}://{rest}", scheme, rest
