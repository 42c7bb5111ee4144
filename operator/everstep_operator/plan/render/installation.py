"""What a job asks for and this installation does not do, because whoever installed it has not given the right to it."""

from __future__ import annotations

from everstep_operator.plan.snapshot import Snapshot


def refusal(snapshot: Snapshot) -> str | None:
    """Why no worker is created, with what to change; None if nothing is in the way."""
    spec, settings = snapshot.job.spec, snapshot.settings
    if spec.pod_group is not None and spec.pod_group.scheduler not in settings.pod_groups:
        scheduler = spec.pod_group.scheduler
        return (
            f"spec.scheduling.podGroup asks for a PodGroup of {scheduler}, and this installation makes none: whoever "
            f"installed it adds {scheduler} to the chart value podGroups, or the job leaves podGroup out"
        )
    if spec.volume_claim_templates and not settings.volume_claims:
        return (
            "spec.volumeClaimTemplates asks for volume claims, and this installation makes none: whoever installed it "
            "sets the chart value volumeClaims.enabled, or the job leaves them out"
        )
    return None
