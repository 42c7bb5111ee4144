"""The certificate of the port that workers reach by TLS: read from a folder again and again, or issued here.

The folder is a mounted Secret, which changes while the operator runs. With `tls.crt` and `tls.key` somebody else renews
the certificate (cert-manager, a person). With `ca.crt` and `ca.key` alone this replica signs one for itself, which
nobody else ever has. Workers verify either by `ca.crt`, whose text each pod gets when it is made; without it they take
the authorities of their image. Invariants: what cannot be used replaces nothing, so a half-written or wrong Secret ends
no connection; a private key is in no log; connections that are open go on under the certificate that they began with.
"""

from __future__ import annotations

import contextlib
import logging
import ssl
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from everstep_operator.errors import TerminalError
from everstep_operator.runtime.clock import Clock

if TYPE_CHECKING:
    from cryptography import x509

log = logging.getLogger("everstep.tls")

CERTIFICATE, KEY, CA, CA_KEY = "tls.crt", "tls.key", "ca.crt", "ca.key"
READ_AGAIN = 10.0  # seconds
MAX_BYTES = 64 * 1024  # of each file: pods get ca.crt in their environment
ISSUED = timedelta(days=30)
RENEWED = ISSUED / 3  # before the end
CLOCKS_DIFFER = timedelta(hours=1)


class CertificateUnusable(TerminalError):
    """The text names the file, and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    files: dict[str, bytes]
    ends: datetime
    issued: bool


class Certificates:
    """`context` is for a server. `host`: the name by which workers reach it, which the certificate must be for.

    `on_change` gets the text of `ca.crt`, or "" without it, and when the certificate ends: at the start, and with each
    change. Raises CertificateUnusable.
    """

    def __init__(self, folder: str, host: str, clock: Clock, on_change: Callable[[str, datetime], None]) -> None:
        self._folder, self._host, self._clock, self._on_change = Path(folder), host, clock, on_change
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._problem = ""
        self._loaded = self._load(self._read())
        self._tell()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._clock.sleep(READ_AGAIN)
            self.refresh()

    def refresh(self) -> None:
        """Take what the folder holds now. If it cannot be used, the present certificate stays, and the log says why."""
        try:
            files = self._read()
            if files == self._loaded.files and not self._is_due():
                return
            self._loaded = self._load(files)
        except CertificateUnusable as e:
            if str(e) != self._problem:
                log.error("the certificate stays as it was", extra={"reason": str(e), "ends": str(self._loaded.ends)})
            self._problem = str(e)
            return
        self._problem = ""
        self._tell()

    def _is_due(self) -> bool:
        return self._loaded.issued and self._clock.now() >= self._loaded.ends - RENEWED

    def _tell(self) -> None:
        log.info("certificate", extra={"host": self._host, "ends": str(self._loaded.ends)})
        self._on_change(self._loaded.files.get(CA, b"").decode(), self._loaded.ends)

    def _read(self) -> dict[str, bytes]:
        files = {}
        for name in (CERTIFICATE, KEY, CA, CA_KEY):
            try:
                with (self._folder / name).open("rb") as file:
                    files[name] = file.read(MAX_BYTES + 1)
            except FileNotFoundError:
                continue
            except OSError as e:
                raise CertificateUnusable(f"{self._folder / name}: {e.strerror}") from e
            if len(files[name]) > MAX_BYTES:
                raise CertificateUnusable(f"{self._folder / name}: more than {MAX_BYTES} bytes")
        return files

    def _load(self, files: dict[str, bytes]) -> _Loaded:
        issued = CERTIFICATE not in files and CA in files and CA_KEY in files
        if issued:
            chain, key = _issue(files[CA], files[CA_KEY], self._host, self._clock.now())
        elif CERTIFICATE in files and KEY in files:
            chain, key = files[CERTIFICATE], files[KEY]
        else:
            raise CertificateUnusable(
                f"{self._folder} has neither {CERTIFICATE} and {KEY}, nor {CA} and {CA_KEY}: is it the Secret that "
                "tls.secretName means?"
            )
        if CA in files:
            try:
                ssl.create_default_context(cadata=files[CA].decode("ascii"))
            except (ssl.SSLError, ValueError) as e:
                raise CertificateUnusable(f"{self._folder / CA} is no certificate in PEM: {e}") from e
        ends = _check(chain, self._host, self._folder / CERTIFICATE, self._clock.now())
        self._activate(chain, key)
        return _Loaded(files, ends, issued)

    def _activate(self, chain: bytes, key: bytes) -> None:
        """First in a context of its own: one that failed half-way would serve no certificate at all."""
        with tempfile.TemporaryDirectory() as folder:
            paths = Path(folder, CERTIFICATE), Path(folder, KEY)
            for path, text in zip(paths, (chain, key), strict=True):
                path.touch(mode=0o600)
                path.write_bytes(text)
            try:
                for context in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self.context):
                    context.load_cert_chain(*paths, password=_no_password)
            except (ssl.SSLError, ValueError) as e:
                raise CertificateUnusable(
                    f"{self._folder / CERTIFICATE} and {KEY} do not belong together, or are no PEM: {e}"
                ) from e


def _no_password() -> str:
    """Without it, OpenSSL asks at the terminal for that of an encrypted key, and waits."""
    raise ValueError("the key is encrypted")


def _check(chain: bytes, host: str, path: Path, now: datetime) -> datetime:
    """When the certificate ends. Raises CertificateUnusable if it has ended, or is for others than `host`."""
    from cryptography import x509  # noqa: PLC0415  # an operator without TLS does not need it

    try:
        leaf = x509.load_pem_x509_certificates(chain)[0]
        ends = leaf.not_valid_after_utc
        names: list[str] = []
        with contextlib.suppress(x509.ExtensionNotFound):
            names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value.get_values_for_type(
                x509.DNSName
            )
    except ValueError as e:
        raise CertificateUnusable(f"{path} is no certificate in PEM: {e}") from e
    if now >= ends:
        raise CertificateUnusable(f"{path} has ended at {ends}: renew it")
    if host and not any(_covers(name, host) for name in names):
        raise CertificateUnusable(
            f"{path} is for {', '.join(names) or 'no host name'}, and workers reach the operator as {host}: add that "
            "to its subjectAltName (dnsNames of a cert-manager Certificate)"
        )
    return ends


def _covers(name: str, host: str) -> bool:
    """RFC 6125: a wildcard stands for one label, the first."""
    name, host = name.lower().rstrip("."), host.lower().rstrip(".")
    return name == host or (name.startswith("*.") and host.partition(".")[2] == name[2:])


def _issue(ca: bytes, ca_key: bytes, host: str, now: datetime) -> tuple[bytes, bytes]:
    """A certificate for the host and its key, in PEM."""
    from cryptography import x509  # noqa: PLC0415
    from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID  # noqa: PLC0415

    try:
        authority = x509.load_pem_x509_certificates(ca)[0]
        signer = serialization.load_pem_private_key(ca_key, None)
    except (ValueError, TypeError) as e:
        raise CertificateUnusable(f"{CA} and {CA_KEY} cannot be read: {e}") from e
    if authority.public_key() != signer.public_key():
        raise CertificateUnusable(f"{CA_KEY} is not the key of the first certificate in {CA}")
    if now >= authority.not_valid_after_utc:
        raise CertificateUnusable(f"{CA} has ended at {authority.not_valid_after_utc}: delete its Secret, and upgrade")
    key = ec.generate_private_key(ec.SECP256R1())
    builder: x509.CertificateBuilder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "everstep-operator")]))
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(max(now - CLOCKS_DIFFER, authority.not_valid_before_utc))
        .not_valid_after(min(now + ISSUED, authority.not_valid_after_utc))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    )
    with contextlib.suppress(x509.ExtensionNotFound):  # OpenSSL compares it with the authority's own
        of_authority = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        builder = builder.add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(of_authority), critical=False
        )
    chain = builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)  # type: ignore[arg-type]
    return chain, key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
