"""Puts the page together from its files, with headers that let nothing else run in it."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from importlib.resources import files

# In the order in which they are needed; main.js begins to ask the router.
SCRIPTS = ("dom", "words", "facts", "tiles", "server", "group", "view", "key", "main")


@dataclass(frozen=True, kw_only=True)
class Document:
    """The page as it is sent."""

    body: bytes
    etag: str
    headers: dict[str, str]


def load() -> Document:
    """Read the page's files, which are part of the package."""
    assets = files(__package__) / "assets"
    style = (assets / "page.css").read_text(encoding="utf-8")
    script = "".join((assets / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS)
    shell = (assets / "page.html").read_text(encoding="utf-8")
    body = shell.replace("/*style*/", style).replace("/*script*/", script).encode()
    etag = hashlib.sha256(body).hexdigest()[:32]
    headers = {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": _policy(style, script),
        "Cache-Control": "no-cache",
        "ETag": f'"{etag}"',
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return Document(body=body, etag=etag, headers=headers)


def _policy(style: str, script: str) -> str:
    """Only these very bytes run, they talk to this router alone, and text never becomes HTML."""
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hash(script)}",
            f"style-src {_hash(style)}",
            "img-src data:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
