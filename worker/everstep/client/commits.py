"""The commits below a URL, read from here with this process's credentials."""

from __future__ import annotations

from everstep.client.errors import ClusterUnavailable, InvalidRequest
from everstep.client.shapes import Checkpoint, Rows


def commits(url: str) -> Rows[Checkpoint]:
    """The newest first. Raises `InvalidRequest` where a package is missing, and `ClusterUnavailable`."""
    try:
        from everstep.checkpoint.errors import CheckpointError  # noqa: PLC0415
        from everstep.checkpoint.retention.catalog import Catalog  # noqa: PLC0415
        from everstep.storage import StorageError, open_for_command  # noqa: PLC0415
    except ImportError as e:
        raise InvalidRequest(f"the package {e.name} is missing: pip install 'everstep[worker]'") from None
    try:
        commits = Catalog(open_for_command(url)).list()
    except ImportError as e:
        raise InvalidRequest(f"the package {e.name} is missing, which reads {url}: install it here") from None
    except (CheckpointError, StorageError) as e:
        raise ClusterUnavailable(f"the store of the commits cannot be read from here: {e}") from None
    return Rows(
        Checkpoint(
            each.step, each.n, url, each.at, each.world_size, each.bytes, each.pinned, not each.missing, each.tags,
            each.metrics,
        )
        for each in commits
    )  # fmt: skip
