"""Where the certificate of the workers' port comes from, and what is no certificate for it."""

from __future__ import annotations

import asyncio
import logging
import ssl
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from everstep_operator.endpoint.certificates import ISSUED, RENEWED, Certificates, CertificateUnusable
from support.clocks.manual import ManualClock
from support.operator.authorities import DAY, Authority, put

HOST = "everstep.everstep-system.svc"


class Told:
    def __init__(self) -> None:
        self.ca, self.ends, self.times = "", datetime.min.replace(tzinfo=UTC), 0

    def __call__(self, ca: str, ends: datetime) -> None:
        self.ca, self.ends, self.times = ca, ends, self.times + 1


def certificates(folder: Path, told: Told | None = None, clock: ManualClock | None = None) -> Certificates:
    return Certificates(str(folder), HOST, clock or ManualClock(datetime.now(UTC)), told or Told())


async def served(found: Certificates, ca: bytes, host: str = HOST) -> int:
    """The serial number of what a server with it shows to a worker that trusts `ca`. Raises ssl.SSLError."""
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=found.context)
    async with server:
        port = server.sockets[0].getsockname()[1]
        trust = ssl.create_default_context(cadata=ca.decode())
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust, server_hostname=host)
        serial = writer.get_extra_info("ssl_object").getpeercert()["serialNumber"]
        writer.close()
        return int(serial, 16)


async def test_certificate_of_a_secret_is_served_and_its_authority_told(tmp_path: Path) -> None:
    authority, told = Authority(), Told()
    chain, key = authority.issue(HOST)
    found = certificates(put(tmp_path, tls_crt=chain, tls_key=key, ca_crt=authority.pem), told)
    assert await served(found, authority.pem)
    assert (told.ca.encode(), told.times) == (authority.pem, 1)
    assert timedelta(days=29) < told.ends - datetime.now(UTC) < timedelta(days=31)
    with pytest.raises(ssl.SSLCertVerificationError):
        await served(found, Authority().pem)
    with pytest.raises(ssl.SSLCertVerificationError):
        await served(found, authority.pem, "other.everstep-system.svc")


async def test_renewed_secret_is_served_to_who_connects_then(tmp_path: Path) -> None:
    old, new, told = Authority(), Authority(), Told()
    chain, key = old.issue(HOST)
    found = certificates(put(tmp_path, tls_crt=chain, tls_key=key, ca_crt=old.pem), told)
    before = await served(found, old.pem)
    found.refresh()
    assert told.times == 1
    chain, key = new.issue("*.everstep-system.svc")
    put(tmp_path, tls_crt=chain, tls_key=key, ca_crt=new.pem + old.pem)
    found.refresh()
    assert await served(found, new.pem) != before
    assert told.ca.encode() == new.pem + old.pem


async def test_secret_that_cannot_be_used_replaces_nothing_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority, told = Authority(), Told()
    chain, key = authority.issue(HOST)
    found = certificates(put(tmp_path, tls_crt=chain, tls_key=key, ca_crt=authority.pem), told)
    before = await served(found, authority.pem)
    put(tmp_path, tls_key=authority.issue(HOST)[1])  # half of the next one
    with caplog.at_level(logging.ERROR):
        found.refresh()
        found.refresh()
    assert len(caplog.records) == 1
    assert (await served(found, authority.pem), told.times) == (before, 1)
    chain, key = authority.issue(HOST)
    put(tmp_path, tls_crt=chain, tls_key=key)
    found.refresh()
    assert (await served(found, authority.pem) != before, told.times) == (True, 2)


async def test_operator_with_an_authority_signs_its_own_certificate_and_renews_it_in_time(tmp_path: Path) -> None:
    clock, told = ManualClock(datetime.now(UTC) - ISSUED + RENEWED), Told()  # the one from then is still good
    authority = Authority(now=clock.now())
    found = certificates(put(tmp_path, ca_crt=authority.pem, ca_key=authority.key_pem), told, clock)
    first = await served(found, authority.pem)
    assert told.ends <= clock.now() + ISSUED
    await clock.advance((ISSUED - RENEWED).total_seconds() - 60)
    found.refresh()
    assert told.times == 1
    await clock.advance(120)
    found.refresh()
    assert told.times == 2
    assert await served(found, authority.pem) != first


def test_certificate_that_the_operator_signs_never_outlives_its_authority(tmp_path: Path) -> None:
    clock, told = ManualClock(datetime.now(UTC)), Told()
    authority = Authority(now=clock.now(), days=10)
    certificates(put(tmp_path, ca_crt=authority.pem, ca_key=authority.key_pem), told, clock)
    assert told.ends <= clock.now() + 10 * DAY


def unusable(kind: str) -> tuple[dict[str, bytes], str]:
    """The files, and what the refusal says."""
    authority, other = Authority(), Authority()
    chain, key = authority.issue(HOST)
    whole = {"tls_crt": chain, "tls_key": key, "ca_crt": authority.pem}
    later, between = datetime.now(UTC) + DAY, Authority("between", by=authority).issue(HOST)
    elsewhere = authority.issue("operator.example.com", "localhost")
    return {
        "empty": ({}, "has neither tls.crt and tls.key, nor ca.crt and ca.key: is it the Secret that tls.secretName"),
        "no key": ({"tls_crt": chain, "ca_crt": authority.pem}, "has neither tls.crt and tls.key"),
        "another key": ({**whole, "tls_key": other.issue(HOST)[1]}, "do not belong together"),
        "encrypted key": (
            {**whole, **dict(zip(("tls_crt", "tls_key"), authority.issue(HOST, password=b"x"), strict=True))},
            "the key is encrypted",
        ),
        "no PEM": ({**whole, "tls_crt": b"certificate"}, r"tls\.crt is no certificate in PEM"),
        "no CA": ({**whole, "ca_crt": b"authority"}, r"ca\.crt is no certificate in PEM"),
        "not begun": (
            {**whole, **dict(zip(("tls_crt", "tls_key"), authority.issue(HOST, begins=later), strict=True))},
            "begins only at",
        ),
        "of another authority": ({**whole, "ca_crt": other.pem}, "who trusts ca.crt does not accept it"),
        "without its intermediate": (
            {"tls_crt": between[0], "tls_key": between[1], "ca_crt": authority.pem},
            "An intermediate authority belongs into tls.crt, behind the certificate; its root into ca.crt",
        ),
        "another host": (
            {**whole, "tls_crt": elsewhere[0], "tls_key": elsewhere[1]},
            f"is for operator.example.com, localhost, and workers reach the operator as {HOST}: add that",
        ),
        "no host": (
            dict(zip(("tls_crt", "tls_key"), authority.issue(), strict=True)),
            "is for no host name, and workers reach",
        ),
        "another authority's key": (
            {"ca_crt": authority.pem, "ca_key": other.key_pem},
            "ca.key is not the key of the first certificate in ca.crt",
        ),
        "too large": ({**whole, "ca_crt": authority.pem * 200}, "more than 65536 bytes"),
    }[kind]


KINDS = (
    "empty", "no key", "another key", "encrypted key", "no PEM", "no CA", "not begun", "of another authority",
    "without its intermediate", "another host", "no host", "another authority's key", "too large",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_folder_without_a_certificate_for_the_operator_is_refused_by_file(kind: str, tmp_path: Path) -> None:
    files, refusal = unusable(kind)
    with pytest.raises(CertificateUnusable, match=refusal):
        certificates(put(tmp_path / "secret", **files))


KEY_TYPES = ("ec", "rsa", "ed25519")


@pytest.mark.parametrize("before", KEY_TYPES)
@pytest.mark.parametrize("after", KEY_TYPES)
async def test_renewed_certificate_is_served_whatever_type_its_key_has(before: str, after: str, tmp_path: Path) -> None:
    """OpenSSL keeps one certificate for each type of key, and chooses among them."""
    authority = Authority()
    chain, key = authority.issue(HOST, kind=before)
    found = certificates(put(tmp_path, tls_crt=chain, tls_key=key, ca_crt=authority.pem))
    first = await served(found, authority.pem)
    chain, key = authority.issue(HOST, kind=after)
    put(tmp_path, tls_crt=chain, tls_key=key)
    found.refresh()
    assert await served(found, authority.pem) != first


@pytest.mark.parametrize("kind", KEY_TYPES)
async def test_authority_may_have_a_key_of_each_type_and_be_an_intermediate_one(kind: str, tmp_path: Path) -> None:
    authority = Authority(kind=kind)
    own = put(tmp_path / "own", ca_crt=authority.pem, ca_key=authority.key_pem)
    assert await served(certificates(own), authority.pem)
    between = Authority("between", by=authority)
    chain, key = between.issue(HOST)
    whole = put(tmp_path / "whole", tls_crt=chain + between.pem, tls_key=key, ca_crt=authority.pem)
    assert await served(certificates(whole), authority.pem)


async def test_ended_certificate_keeps_no_operator_from_starting_and_replaces_no_good_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority, told = Authority(), Told()
    ended = dict(zip(("tls_crt", "tls_key"), authority.issue(HOST, ends=datetime.now(UTC) - DAY), strict=True))
    good = dict(zip(("tls_crt", "tls_key"), authority.issue(HOST), strict=True))
    found = certificates(put(tmp_path, **ended, ca_crt=authority.pem), told)
    assert told.ends < datetime.now(UTC)
    assert "has ended at" in caplog.records[0].__dict__["reason"]
    put(tmp_path, **good)
    found.refresh()
    serial = await served(found, authority.pem)
    put(tmp_path, **ended)
    found.refresh()
    assert await served(found, authority.pem) == serial


def test_pods_get_the_certificates_of_the_file_and_nothing_else_that_is_in_it(tmp_path: Path) -> None:
    authority, told = Authority(), Told()
    chain, key = authority.issue(HOST)
    comment = "# Zertifizierungsstelle für Übungen\n".encode()
    certificates(put(tmp_path, tls_crt=chain, tls_key=key, ca_crt=comment + authority.key_pem + authority.pem), told)
    assert told.ca.encode() == authority.pem


def test_trouble_of_any_kind_leaves_the_certificate_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority, told = Authority(), Told()
    chain, key = authority.issue(HOST)
    found = certificates(put(tmp_path, tls_crt=chain, tls_key=key, ca_crt=authority.pem), told)
    put(tmp_path, **dict(zip(("tls_crt", "tls_key"), authority.issue(HOST), strict=True)))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))  # as if the disk were full
    found.refresh()
    assert told.times == 1
    monkeypatch.setattr(tempfile, "tempdir", None)
    found.refresh()
    assert told.times == 2


async def test_certificate_from_a_clock_that_was_ahead_is_good_when_it_is_set_back(tmp_path: Path) -> None:
    clock = ManualClock(datetime.now(UTC) + 3 * DAY)
    authority = Authority()
    found = certificates(put(tmp_path, ca_crt=authority.pem, ca_key=authority.key_pem), clock=clock)
    clock.jump_wall(-3 * 86400)
    assert await served(found, authority.pem)


async def test_authority_that_ends_soon_is_not_asked_again_and_again(tmp_path: Path) -> None:
    clock, told = ManualClock(datetime.now(UTC)), Told()
    authority = Authority(now=clock.now(), days=5)
    found = certificates(put(tmp_path, ca_crt=authority.pem, ca_key=authority.key_pem), told, clock)
    for _ in range(10):
        await clock.advance(10)
        found.refresh()
    assert told.times == 1
