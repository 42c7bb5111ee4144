"""Reads the claims of a bearer token, without a request. Pure: it knows no clock.

Claims prove nothing: they count only after a signature check or a TokenReview. But a token whose own claims name no
pod, or another audience, needs no review: reading it costs microseconds, and a review costs a request. This module does
not judge whether a token has expired. Our clock may be wrong by more than a token's lifetime of an hour, and would then
refuse valid tokens for good; and a forger chooses the times of a forged token.
Invariants: a token that the API server would accept for our audience is read; no message quotes a token.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import Annotated

import msgspec

from everstep_operator.errors import TerminalError

MAX_TOKEN = 8 * 1024  # characters; a projected token has about 1,200
MAX_AUDIENCES = 32

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=253)]


@dataclass(frozen=True, slots=True)
class PodIdentity:
    """The pod to which a token is bound."""

    namespace: str
    pod_name: str
    pod_uid: str


class ClaimsRefused(TerminalError):
    """The token cannot be a worker's; the message says why and is sent to the sender."""


@dataclass(frozen=True, slots=True)
class Claims:
    """`key_id` names the signing key according to the token; empty if it names none. `expires`: seconds since 1970."""

    pod: PodIdentity
    key_id: str
    expires: float = 0.0


class _Header(msgspec.Struct):
    alg: str
    kid: Annotated[str, msgspec.Meta(max_length=256)] = ""


class _Bound(msgspec.Struct):
    name: _Name
    uid: _Name


class _Kubernetes(msgspec.Struct):
    namespace: _Name
    pod: _Bound


class _Payload(msgspec.Struct):
    aud: str | Annotated[list[str], msgspec.Meta(max_length=MAX_AUDIENCES)]
    sub: Annotated[str, msgspec.Meta(max_length=600)]
    kubernetes: _Kubernetes = msgspec.field(name="kubernetes.io")
    exp: float = 0.0


_HEADER = msgspec.json.Decoder(_Header)
_PAYLOAD = msgspec.json.Decoder(_Payload)


def read_claims(token: str, audience: str) -> Claims:
    """The claims of a service account's token that is bound to a pod.

    Raises ClaimsRefused if it is no such token, or not for `audience`.
    """
    parts = token.split(".", 3) if len(token) <= MAX_TOKEN else ()
    if len(parts) != 3 or not all(parts):
        raise ClaimsRefused("this is no service account's token")
    try:
        header, payload = _HEADER.decode(_bytes(parts[0])), _PAYLOAD.decode(_bytes(parts[1]))
    except (binascii.Error, ValueError, RecursionError) as e:
        raise ClaimsRefused("this is no token of a service account that is bound to a pod") from e
    audiences = (payload.aud,) if isinstance(payload.aud, str) else payload.aud
    if audience not in audiences:
        raise ClaimsRefused(f"the token is for another audience: project one for {audience}")
    namespace = payload.kubernetes.namespace
    if not payload.sub.startswith(f"system:serviceaccount:{namespace}:"):
        raise ClaimsRefused("the token's subject is no service account of its pod's namespace")
    bound = payload.kubernetes.pod
    return Claims(PodIdentity(namespace, bound.name, bound.uid), header.kid, payload.exp)


def _bytes(part: str) -> bytes:
    """base64url without padding, as JWTs have it. Raises ValueError."""
    return base64.urlsafe_b64decode(part.encode("ascii") + b"=" * (-len(part) % 4))
