"""The error tree; every message says what broke, what was got, what was wanted and what to do.

AfdError
    ConfigError         a flag, file or combination that cannot work; raised before anything loads
    UpstreamMismatch    the installed SGLang is not the one this package was written against
    ProtocolError       a peer sent something that this side does not understand
        EpochMismatch   a message of another generation of the peer set
    Refused             a peer declined to attach and said why
    PeerLost            a peer died, stalled past the deadline, or was never there
    CapacityError       more rows than a slot holds
"""

from __future__ import annotations


class AfdError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(AfdError):
    """A setting that cannot work; the process exits before anything loads."""


class UpstreamMismatch(AfdError):
    """SGLang differs from what a hook or a call was written against."""


class ProtocolError(AfdError):
    """A message that breaks the protocol."""


class EpochMismatch(ProtocolError):
    """A message of another epoch than the one in force."""


class Refused(AfdError):
    """The other side declined to attach.

    Args:
        code: One of `protocol.messages.RefusalCode`, for programs.
        message: The sentence for people.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class PeerLost(AfdError):
    """A peer is gone, or did not answer before the stall deadline."""


class CapacityError(AfdError):
    """An exchange that does not fit into its slot."""
