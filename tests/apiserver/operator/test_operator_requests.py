"""What the operator asks of a real API server, request by request."""

from __future__ import annotations

import pytest

from everstep_operator.kube.resources import LEASES
from everstep_operator.kube.wire import Lease
from support.apiserver.operators import Operators, Place
from support.apiserver.waiting import eventually

pytestmark = pytest.mark.apiserver

LEASE = "everstep-operator"


async def test_lease_that_somebody_deletes_is_made_again_by_its_leader_in_the_same_epoch(place: Place) -> None:
    """A renewal does not look first: an API server may answer it with 404 or 409, or make a Lease of it."""
    async with Operators(place).run():
        first = await led(place)
        await place.client.delete(LEASES, place.namespace, LEASE)
        again = await led(place, other_than=first.metadata.uid)
        assert (again.spec.holder_identity, again.spec.lease_transitions) == (
            first.spec.holder_identity,
            first.spec.lease_transitions,
        )
        version = again.metadata.resource_version

        async def renewed() -> bool:
            return (await led(place)).metadata.resource_version != version

        await eventually("it is renewed", renewed)
        assert (await led(place)).spec.lease_transitions == first.spec.lease_transitions


async def led(place: Place, other_than: str = "") -> Lease:
    """The Lease, once somebody holds it."""
    found: list[Lease] = []

    async def held() -> bool:
        listed = (await place.client.list(LEASES, place.namespace)).items
        found[:] = [lease for lease in listed if lease.spec.holder_identity and lease.metadata.uid != other_than]
        return bool(found)

    await eventually("somebody holds the Lease", held)
    return found[0]
