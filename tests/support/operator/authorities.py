"""An authority that signs certificates for servers, as cert-manager or the chart has one."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = timedelta(days=1)


class Authority:
    """`pem` and `key_pem` are its own certificate and key."""

    def __init__(self, name: str = "authority", now: datetime | None = None, days: int = 3650) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        begins = now or datetime.now(UTC)
        self._certificate = (
            self._builder(self._name, self._key.public_key(), begins, begins + days * DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self.pem, self.key_pem = _pem(self._certificate), _key_pem(self._key)

    def issue(self, *hosts: str, ends: datetime | None = None, password: bytes | None = None) -> tuple[bytes, bytes]:
        """A certificate for these hosts, and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "server")])
        end = ends or datetime.now(UTC) + 30 * DAY
        builder = self._builder(subject, key.public_key(), min(datetime.now(UTC), end) - DAY, end)
        if names := [x509.DNSName(host) for host in hosts]:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return _pem(builder.sign(self._key, hashes.SHA256())), _key_pem(key, password)

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, begins: datetime, ends: datetime
    ) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(begins - DAY)
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


def _key_pem(key: ec.EllipticCurvePrivateKey, password: bytes | None = None) -> bytes:
    how = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, how)
