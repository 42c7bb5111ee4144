"""An authority that signs certificates for servers, as cert-manager or the chart has one."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeAlias

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import NameOID

DAY = timedelta(days=1)
PrivateKey: TypeAlias = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey
PublicKey: TypeAlias = ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey | rsa.RSAPublicKey


def key_of(kind: str) -> PrivateKey:
    if kind == "rsa":
        return rsa.generate_private_key(65537, 2048)
    return ed25519.Ed25519PrivateKey.generate() if kind == "ed25519" else ec.generate_private_key(ec.SECP256R1())


class Authority:
    """`pem` and `key_pem` are its own certificate and key. `by`: the authority that it is an intermediate one of."""

    def __init__(
        self,
        name: str = "authority",
        now: datetime | None = None,
        days: int = 3650,
        *,
        kind: str = "ec",
        by: Authority | None = None,
    ) -> None:
        self._key = key_of(kind)
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        begins = now or datetime.now(UTC)
        issuer = by or self
        builder = self._builder(self._name, issuer._name, self._key.public_key(), begins - DAY, begins + days * DAY)
        extended = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True).add_extension(
            x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False
        )
        self._certificate = issuer._sign(extended)
        self.pem, self.key_pem = _pem(self._certificate), _key_pem(self._key)

    def issue(
        self,
        *hosts: str,
        begins: datetime | None = None,
        ends: datetime | None = None,
        password: bytes | None = None,
        kind: str = "ec",
    ) -> tuple[bytes, bytes]:
        """A certificate for these hosts, and its key."""
        key = key_of(kind)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "server")])
        end = ends or datetime.now(UTC) + 30 * DAY
        begin = begins or min(datetime.now(UTC), end) - DAY
        builder = self._builder(subject, self._name, key.public_key(), begin, end)
        if names := [x509.DNSName(host) for host in hosts]:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return _pem(self._sign(builder)), _key_pem(key, password)

    def _sign(self, builder: x509.CertificateBuilder) -> x509.Certificate:
        own_hash = isinstance(self._key, ed25519.Ed25519PrivateKey)
        return builder.sign(self._key, None if own_hash else hashes.SHA256())

    @staticmethod
    def _builder(
        subject: x509.Name, issuer: x509.Name, key: PublicKey, begins: datetime, ends: datetime
    ) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(begins)
            .not_valid_after(ends)
        )


def put(folder: Path, **files: bytes) -> Path:
    """Files of a mounted Secret; `tls_crt=` is tls.crt."""
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_bytes(text)
    return folder


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: PrivateKey, password: bytes | None = None) -> bytes:
    how = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, how)
