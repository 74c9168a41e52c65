"""The error tree; every message says what broke, what was got, what was wanted and what to do.

AfdError
    ConfigError         a flag, file or combination that cannot work; raised before anything loads
    UpstreamMismatch    the installed SGLang is not the one this package was written against
    ProtocolError       a peer sent something that this side does not understand
        EpochMismatch   a message of another generation of the peer set
    Refused             a peer declined to attach and said why
    PeerLost            a peer died, or was never there; whoever has its rows may send them again
        ExchangeFailed  the experts raised on these rows; sending them again would not help
        StallTimeout    no peer came back before the deadline; the step is given up
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


class ExchangeFailed(PeerLost):
    """The MLP servers have no result for these rows, and would have none the next time."""


class StallTimeout(PeerLost):
    """A step waited for MLP servers until its deadline."""


class CapacityError(AfdError):
    """An exchange that does not fit into its slot."""
