"""The templates of a job's volume claims, in the form that a StatefulSet has them.

The operator makes the claims with its own permissions. So a template has the fields by which a volume is made, and none
by which a claim takes a volume or data that are there already.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field, StringConstraints

from everstep_operator.api.base import ApiModel, Check, ObjectName

VolumeName = Annotated[
    str, StringConstraints(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
]  # a DNS label
_NUMBER = r"([1-9][0-9]*(\.[0-9]+)?|0\.[0-9]*[1-9][0-9]*)"  # above 0
Quantity = Annotated[str, StringConstraints(min_length=1, max_length=32, pattern=rf"^{_NUMBER}([KMGTPE]i|[kMGTPE])?$")]


class AccessMode(StrEnum):
    """By how many nodes or pods a volume is used at a time."""

    READ_WRITE_ONCE = "ReadWriteOnce"
    READ_WRITE_ONCE_POD = "ReadWriteOncePod"
    READ_WRITE_MANY = "ReadWriteMany"


class Retention(StrEnum):
    """What becomes of claims."""

    RETAIN = "Retain"
    DELETE = "Delete"


class ClaimMetadata(ApiModel):
    """The name of a template."""

    name: VolumeName = Field(
        description="Name of the volume, by which containers mount it. Worker 3 has the claim NAME-JOB-w3.",
    )


class ClaimRequests(ApiModel):
    """The size of a volume."""

    storage: Quantity = Field(description="Bytes, as a Kubernetes quantity such as 100Gi.")


class ClaimResources(ApiModel):
    """What a claim asks for."""

    requests: ClaimRequests = Field(description="The size of the volume.")


class ClaimSpec(ApiModel):
    """The volume that each worker gets."""

    access_modes: tuple[AccessMode, ...] = Field(
        min_length=1, max_length=3, description="As of any claim. ReadWriteOnce is what most classes have."
    )
    storage_class_name: ObjectName | None = Field(default=None, description="Absent: the cluster's default class.")
    resources: ClaimResources = Field(description="The size of the volume.")

    CHECKS: ClassVar[tuple[Check, ...]] = (
        Check(
            cel="self.accessModes.size() == 1 || !self.accessModes.exists(m, m == 'ReadWriteOncePod')",
            message="ReadWriteOncePod must be the only one of accessModes",
            field=".accessModes",
            holds=lambda c: len(c.access_modes) == 1 or AccessMode.READ_WRITE_ONCE_POD not in c.access_modes,
        ),
    )


class ClaimTemplate(ApiModel):
    """A volume of each worker's own, which its successors find again."""

    metadata: ClaimMetadata = Field(description="The name of the template.")
    spec: ClaimSpec = Field(description="The volume that each worker gets.")


class ClaimRetention(ApiModel):
    """When claims are deleted."""

    when_deleted: Retention = Field(
        default=Retention.RETAIN,
        description="What becomes of the claims when the job is deleted. A worker that is not wanted any more leaves "
        "its claim behind in either case.",
    )
