"""The certificate of the port that workers reach by TLS: read from a folder again and again, or issued here.

The folder is a mounted Secret, which changes while the operator runs. With `tls.crt` and `tls.key` somebody else renews
the certificate (cert-manager, a person). With `ca.crt` and `ca.key` alone this replica signs one for itself, which
nobody else ever has. Workers verify either by `ca.crt`, whose certificates each pod gets when it is made; without it
they take the authorities of their image. Invariants: a certificate replaces another one only if a client that trusts
`ca.crt` has accepted it, in a handshake within this process; so a half-written or wrong Secret ends no connection. A
private key is in no log, and in no pod. Connections that are open go on under the certificate that they began with.
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
from typing import TYPE_CHECKING, Any

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
MESSAGES = 20  # of a handshake within this process; it takes four


class CertificateUnusable(TerminalError):
    """The text names the file, and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    files: dict[str, bytes]
    context: ssl.SSLContext
    ca: str  # the certificates of ca.crt in PEM, and nothing else
    begins: datetime
    ends: datetime
    renewable: bool  # one that is issued now would end later


class Certificates:
    """`context` is for a server. `host`: the name by which workers reach it, which the certificate must be for.

    `on_change` gets the authorities, or "" without any, and when the certificate ends: at the start, and with each
    change. Raises CertificateUnusable, but not for one that has ended: an operator without workers' calls still plans.
    """

    def __init__(self, folder: str, host: str, clock: Clock, on_change: Callable[[str, datetime], None]) -> None:
        self._folder, self._host, self._clock, self._on_change = Path(folder), host, clock, on_change
        self._problem = ""
        self._loaded = self._load(self._read(), may_have_ended=True)
        # A context keeps one certificate for each type of key, and may go on with the older one. So each certificate
        # has a context of its own, and this one hands over to the newest.
        self.context = _server_context()
        self.context.sni_callback = self._hand_over
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
        except Exception as e:  # of files that anybody may have written, and libraries that read them
            text = str(e) if isinstance(e, CertificateUnusable) else f"{type(e).__name__}: {e}"
            if text != self._problem:
                log.error("the certificate stays as it was", extra={"reason": text, "ends": str(self._loaded.ends)})
            self._problem = text
            return
        self._problem = ""
        self._tell()

    def _hand_over(self, connection: Any, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = self._loaded.context

    def _is_due(self) -> bool:
        """Whether a certificate of our own is to be issued anew; also where the clock was ahead when it was issued."""
        now = self._clock.now()
        return self._loaded.renewable and (now >= self._loaded.ends - RENEWED or now < self._loaded.begins)

    def _tell(self) -> None:
        log.info("certificate", extra={"host": self._host, "ends": str(self._loaded.ends)})
        self._on_change(self._loaded.ca, self._loaded.ends)

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

    def _load(self, files: dict[str, bytes], *, may_have_ended: bool = False) -> _Loaded:
        now = self._clock.now()
        ca = _authorities(files[CA], self._folder / CA) if files.get(CA, b"").strip() else ""
        limit = None
        if CERTIFICATE not in files and ca and CA_KEY in files:
            chain, key, limit = _issue(files[CA], files[CA_KEY], self._host, now)
        elif CERTIFICATE in files and KEY in files:
            chain, key = files[CERTIFICATE], files[KEY]
        else:
            raise CertificateUnusable(
                f"{self._folder} has neither {CERTIFICATE} and {KEY}, nor {CA} and {CA_KEY}: is it the Secret that "
                "tls.secretName means?"
            )
        begins, ends = _check(chain, self._host, self._folder / CERTIFICATE)
        context = self._context_of(chain, key)
        if now >= ends:
            text = f"{self._folder / CERTIFICATE} has ended at {ends}: renew it"
            if not may_have_ended:
                raise CertificateUnusable(text)
            log.error("no worker is reached by TLS", extra={"reason": text})
        else:
            self._prove(context, ca, begins, now)
        return _Loaded(files, context, ca, begins, ends, limit is not None and ends < limit)

    def _prove(self, context: ssl.SSLContext, ca: str, begins: datetime, now: datetime) -> None:
        """See that a worker accepts it."""
        if begins > now:
            raise CertificateUnusable(f"{self._folder / CERTIFICATE} begins only at {begins}")
        if not ca:
            return  # the authorities of the workers' images are not known here
        try:
            _shake_hands(context, ssl.create_default_context(cadata=ca), self._host)
        except ssl.SSLError as e:
            raise CertificateUnusable(
                f"{self._folder / CERTIFICATE}: who trusts {CA} does not accept it: {e}. An intermediate authority "
                f"belongs into {CERTIFICATE}, behind the certificate; its root into {CA}"
            ) from e

    def _context_of(self, chain: bytes, key: bytes) -> ssl.SSLContext:
        context = _server_context()
        with tempfile.TemporaryDirectory() as folder:
            paths = Path(folder, CERTIFICATE), Path(folder, KEY)
            for path, text in zip(paths, (chain, key), strict=True):
                path.touch(mode=0o600)
                path.write_bytes(text)
            try:
                context.load_cert_chain(*paths, password=_no_password)
            except (ssl.SSLError, ValueError) as e:
                raise CertificateUnusable(
                    f"{self._folder / CERTIFICATE} and {KEY} do not belong together, or are no PEM: {e}"
                ) from e
        return context


def _server_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _no_password() -> str:
    """Without it, OpenSSL asks at the terminal for that of an encrypted key, and waits."""
    raise ValueError("the key is encrypted")


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> None:
    """Let them meet without a network. Raises ssl.SSLError as a worker would see it."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname=host),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    done = set()
    for _ in range(MESSAGES):
        for end in ends:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
                done.add(end)
        if len(done) == len(ends):
            return
    raise ssl.SSLError("the handshake has no end")


def _authorities(text: bytes, path: Path) -> str:
    """The certificates of a file in PEM. A key beside them, or a comment, is left out: pods get this."""
    from cryptography import x509  # noqa: PLC0415  # an operator without TLS does not need it
    from cryptography.hazmat.primitives.serialization import Encoding  # noqa: PLC0415

    try:
        return "".join(each.public_bytes(Encoding.PEM).decode() for each in x509.load_pem_x509_certificates(text))
    except ValueError as e:
        raise CertificateUnusable(f"{path} is no certificate in PEM: {e}") from e


def _check(chain: bytes, host: str, path: Path) -> tuple[datetime, datetime]:
    """When the certificate begins and ends. Raises CertificateUnusable if it is for others than `host`."""
    from cryptography import x509  # noqa: PLC0415

    try:
        leaf = x509.load_pem_x509_certificates(chain)[0]
        names: list[str] = []
        with contextlib.suppress(x509.ExtensionNotFound):
            names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value.get_values_for_type(
                x509.DNSName
            )
    except ValueError as e:
        raise CertificateUnusable(f"{path} is no certificate in PEM: {e}") from e
    if host and not any(_covers(name, host) for name in names):
        raise CertificateUnusable(
            f"{path} is for {', '.join(names) or 'no host name'}, and workers reach the operator as {host}: add that "
            "to its subjectAltName (dnsNames of a cert-manager Certificate)"
        )
    return leaf.not_valid_before_utc, leaf.not_valid_after_utc


def _covers(name: str, host: str) -> bool:
    """RFC 6125: a wildcard stands for one label, the first. A client's own rules are asked by `_shake_hands`."""
    name, host = name.lower(), host.lower()
    return name == host or (name.startswith("*.") and host.partition(".")[2] == name[2:])


def _issue(ca: bytes, ca_key: bytes, host: str, now: datetime) -> tuple[bytes, bytes, datetime]:
    """A certificate for the host and its key, in PEM; and when its authority ends."""
    from cryptography import x509  # noqa: PLC0415
    from cryptography.exceptions import UnsupportedAlgorithm  # noqa: PLC0415
    from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519  # noqa: PLC0415
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID  # noqa: PLC0415

    try:
        authority = x509.load_pem_x509_certificates(ca)[0]
        signer: Any = serialization.load_pem_private_key(ca_key, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as e:
        raise CertificateUnusable(f"{CA} and {CA_KEY} cannot be read: {e}") from e
    if authority.public_key() != signer.public_key():
        raise CertificateUnusable(f"{CA_KEY} is not the key of the first certificate in {CA}")
    begins, limit = authority.not_valid_before_utc, authority.not_valid_after_utc
    if not begins <= now < limit:
        raise CertificateUnusable(f"{CA} is good from {begins} to {limit} alone: delete its Secret, and upgrade")
    key = ec.generate_private_key(ec.SECP256R1())
    builder: x509.CertificateBuilder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "everstep-operator")]))
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)  # not now: clocks of workers may be behind
        .not_valid_after(min(now + ISSUED, limit))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    )
    with contextlib.suppress(x509.ExtensionNotFound):  # OpenSSL compares it with the authority's own
        of_authority = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        builder = builder.add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(of_authority), critical=False
        )
    has_own_hash = isinstance(signer, ed25519.Ed25519PrivateKey | ed448.Ed448PrivateKey)
    chain = builder.sign(signer, None if has_own_hash else hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    return (
        chain,
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
        limit,
    )
