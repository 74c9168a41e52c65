"""The shared secret: where it is read from, and how both sides prove that they know it."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import stat
from pathlib import Path
from urllib.parse import urlsplit

from sglang_afd.errors import ConfigError
from sglang_afd.files import read_file

MIN_SECRET_BYTES = 16
NONCE_BYTES = 32


def load_secret(path: str) -> bytes:
    """Read the shared secret; an empty path means that there is none.

    Raises:
        ConfigError: The file is missing, readable by others, or too short to be a secret.
    """
    if not path:
        return b""
    file = Path(path)
    try:
        mode = stat.S_IMODE(file.stat().st_mode)
        secret = read_file(file).strip()
    except OSError as error:
        raise ConfigError(f"--afd-secret-file {path}: {error.strerror}") from None
    if mode & 0o077:
        raise ConfigError(
            f"--afd-secret-file {path} has mode {mode:04o}, so others can read it; chmod 600 {path}"
        )
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"--afd-secret-file {path} holds {len(secret)} bytes; at least {MIN_SECRET_BYTES} are "
            f"needed, e.g. `openssl rand -hex 32 > {path}`"
        )
    return secret


def prove(secret: bytes, role: str, *parts: bytes) -> bytes:
    """HMAC-SHA256 over the prover's role and what the proof is bound to.

    The role keeps a proof from being sent back to its author.
    """
    digest = hmac.new(secret, b"sglang-afd\0" + role.encode(), hashlib.sha256)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.digest()


def verify(proof: bytes, secret: bytes, role: str, *parts: bytes) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(proof, prove(secret, role, *parts))


def is_loopback(address: str) -> bool:
    """Is this exchange address, or HTTP host, reachable from this host only?

    Args:
        address: `ipc://path`, `tcp://host:port`, an http URL, or a bare host.
    """
    if address.startswith("ipc://"):
        return True
    host = urlsplit(address if "://" in address else f"//{address}").hostname or ""
    if host == "localhost":
        return True
    # A bare IPv6 address looks like a host with a port.
    ip = _ip_address(address) or _ip_address(host)
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped:
        return ip.ipv4_mapped.is_loopback
    return ip is not None and ip.is_loopback


def _ip_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def require_secret_beyond_loopback(address: str, secret: bytes, flag: str) -> None:
    """Refuse an address that others can reach unless peers must prove a secret.

    Raises:
        ConfigError: Names the flag, the address and the two ways out.
    """
    if not secret and not is_loopback(address):
        raise ConfigError(
            f"{flag} {address} can be reached from other hosts; give both roles the same "
            f"--afd-secret-file, or use ipc:// or 127.0.0.1"
        )
