"""TLS of the server: certificate, key, and authorities for clients, checked at the start and renewed while it runs.

TLS 1.2 is the least. A certificate that is replaced on disk is used by the next handshake without a restart: it is
tried in a context of its own first, because one that fits no key must not take the place of one that works. What the
authorities are is read once: whom to trust is no matter of routine.
"""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from app.config import Settings, variable
from app.errors import InvalidSettings

logger = logging.getLogger(__name__)


class ServerTls:
    """Raises InvalidSettings for files that cannot be used. `context` is for the listener."""

    def __init__(self, certificate: Path, key: Path | None, client_ca: Path | None) -> None:
        self._certificate = certificate
        self._key = key
        self.context = _context()
        try:
            self._load(self.context)
        except (OSError, ValueError) as error:
            raise InvalidSettings(_complaint("tls_certificate", certificate, error)) from error
        if client_ca is not None:
            try:
                self.context.load_verify_locations(client_ca)
            except (OSError, ValueError) as error:
                raise InvalidSettings(_complaint("tls_client_ca", client_ca, error)) from error
            self.context.verify_mode = ssl.CERT_REQUIRED
        self._seen = self._stamps()

    def renew(self) -> bool:
        """Takes over files that have changed; False when they have not, or cannot be used."""
        stamps = self._stamps()
        if stamps == self._seen:
            return False
        self._seen = stamps
        try:
            self._load(_context())
            self._load(self.context)
        except (OSError, ValueError) as error:
            logger.error(
                "the certificate in %s cannot be used, the one from before stays: %s",
                self._certificate,
                _reason(error),
            )
            return False
        logger.info("the certificate in %s was renewed", self._certificate)
        return True

    def _load(self, context: ssl.SSLContext) -> None:
        # Without a callback, a key with a passphrase would have OpenSSL ask on the terminal.
        context.load_cert_chain(self._certificate, self._key, password=_no_passphrase)

    def _stamps(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(_stamp(path) for path in (self._certificate, self._key) if path is not None)


def server_tls(settings: Settings) -> ServerTls | None:
    """None without a certificate. Raises InvalidSettings."""
    if settings.tls_certificate is None:
        for name in ("tls_key", "tls_client_ca"):
            if getattr(settings, name) is not None:
                raise InvalidSettings(
                    f"{variable(name)}: there is no {variable('tls_certificate')} beside it"
                )
        return None
    return ServerTls(settings.tls_certificate, settings.tls_key, settings.tls_client_ca)


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


def _no_passphrase() -> str:
    raise ValueError("its key has a passphrase, which nobody is there to type")


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _complaint(name: str, path: Path, error: Exception) -> str:
    return f"{variable(name)}={str(path)!r}: {_reason(error)}"


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"not what OpenSSL takes: {error.reason or error}"
    return str(getattr(error, "strerror", None) or error)
