"""A router's answer as a table of a given width (pure)."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sgl_router_afd.api.shapes import GroupsAnswer, GroupView, RouterView, ServerView
from sgl_router_afd.status_words import ago, clean, duration, milliseconds, short
from sglang_afd.config import Role

MAX_EVENTS = 10
COLUMN_GAP = "  "
HEADER = (
    "server",
    "state",
    "running",
    "waiting",
    "KV",
    "tok/s",
    "TTFT",
    "uneven",
    "heard",
    "peers",
)
LEFT = frozenset({0, 1, 9})  # columns of words
ROOM_FOR_PEERS = 12
COLOURS = {
    "ready": "32",
    "serving": "32",
    "forming": "36",
    "wiring": "36",
    "waiting": "36",
    "degraded": "33",
    "draining": "35",
    "dead": "31",
}


@dataclass(frozen=True, kw_only=True)
class Style:
    """Of the terminal."""

    width: int
    has_colour: bool = False

    def state(self, state: str, text: str) -> str:
        """Text in the colour of a state; the word is there without it, too."""
        code = COLOURS.get(state)
        return f"\x1b[{code}m{text}\x1b[0m" if self.has_colour and code else text

    def strong(self, text: str) -> str:
        """For headings."""
        return f"\x1b[1m{text}\x1b[0m" if self.has_colour else text


def table(base: str, answer: GroupsAnswer, style: Style) -> str:
    """Everything, each line at most as wide as the terminal where words allow it."""
    lines = _router(base, answer.router, style)
    if not (answer.groups or answer.unplaced or answer.unheard):
        lines += ["", *_first_steps(base)]
    for group in answer.groups:
        lines += ["", *_group(group, style)]
    if answer.unplaced:
        lines += ["", style.strong("in no group"), *_servers(answer.unplaced, style)]
    if answer.unheard:
        lines += ["", style.strong("never answered")]
        for one in answer.unheard:
            lines += _wrapped(f"{clean(one.url)}: {clean(one.reason)}", style, "  ")
    if answer.events:
        lines += ["", style.strong("recent events")]
        for event in answer.events[:MAX_EVENTS]:
            lines += _wrapped(f"{ago(event.ago_s):>12}  {clean(event.text)}", style, "  ", 16)
    return "\n".join(lines) + "\n"


def _router(base: str, router: RouterView, style: Style) -> list[str]:
    facts = (
        f"up {duration(router.up_s)}",
        f"policy {clean(router.policy)}",
        f"data plane {clean(router.data_plane)}",
        f"ratio {clean(router.ratio)}" if router.ratio else "no target ratio",
        f"{router.num_requests_in_flight} requests, {router.num_requests_waiting} held",
        f"version {clean(router.package_version)}",
    )
    return [style.strong(f"router {clean(base)}"), *_wrapped(", ".join(facts), style, "  ")]


def _first_steps(base: str) -> list[str]:
    launch = "python -m sglang_afd.launch_server --model-path MODEL"
    return [
        "No server has registered yet. Start at least one of each role:",
        f"  {launch} --role mlp --port 30010 --afd-router {clean(base)}",
        f"  {launch} --role attn --port 30020 --afd-router {clean(base)}",
    ]


def _group(group: GroupView, style: Style) -> list[str]:
    models = ", ".join(map(clean, group.models)) or "no model yet"
    name, word = f"group {clean(group.name)}", group.state.upper()
    facts = f"serves {models}, epoch {group.epoch}"
    head = f"{style.strong(name)}  {style.state(group.state, word)}"
    if len(f"{name}  {word}  {facts}") <= style.width:
        lines = [f"{head}  {facts}"]
    else:
        lines = [head, *_wrapped(facts, style, "  ")]
    lines += _wrapped(clean(group.reason), style, "  ")
    return lines + _servers((*group.attn, *group.mlp), style)


def _servers(servers: Sequence[ServerView], style: Style) -> list[str]:
    rows = [_row(server) for server in servers]
    if not rows:
        return []
    widths = [max(len(row[column]) for row in (HEADER, *rows)) for column in range(len(HEADER))]
    widths[-1] = 0  # the last column may be cut
    room = style.width - 2 - sum(widths) - len(COLUMN_GAP) * (len(widths) - 1)
    if room < ROOM_FOR_PEERS:
        return [line for server in servers for line in _tall(server, style)]
    lines = ["  " + _line(HEADER, widths)]
    for server, row in zip(servers, rows, strict=True):
        shown = [*row[:-1], row[-1] if len(row[-1]) <= room else row[-1][: room - 3] + "..."]
        line = _line(shown, widths)
        start = widths[0] + len(COLUMN_GAP)
        end = start + len(row[1])
        line = line[:start] + style.state(server.standing, line[start:end]) + line[end:]
        lines.append("  " + line.rstrip())
        lines += _reasons(server, style, "      ")
    return lines


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = (
        text.ljust(width) if column in LEFT else text.rjust(width)
        for column, (text, width) in enumerate(zip(row, widths, strict=True))
    )
    return COLUMN_GAP.join(cells).rstrip()


def _row(server: ServerView) -> tuple[str, ...]:
    peers = " ".join(map(clean, server.attached)) or "-"
    heard = ago(server.last_heard_ago_s)
    head = (_name(server), clean(server.standing))
    load = server.load
    if server.role is Role.MLP:
        uneven = f"{load.expert_imbalance:.2f}x" if load.expert_imbalance else "-"
        return (*head, "-", "-", "-", "-", "-", uneven, heard, peers)
    return (
        *head,
        f"{load.num_running}/{server.capacity.max_running_requests}",
        str(load.num_waiting),
        _kv(server),
        short(load.tokens_per_s),
        _ttft(server),
        "-",
        heard,
        peers,
    )


def _tall(server: ServerView, style: Style) -> list[str]:
    """One server where a row of the table has no room."""
    load = server.load
    state = style.state(server.standing, clean(server.standing))
    if server.role is Role.MLP:
        known = f"{load.expert_imbalance:.2f}x uneven" if load.expert_imbalance else ""
        facts: Iterable[str] = filter(None, (known, f"heard {ago(server.last_heard_ago_s)}"))
    else:
        facts = (
            f"{load.num_running}/{server.capacity.max_running_requests} running",
            f"{load.num_waiting} waiting",
            f"KV {_kv(server)}",
            f"{short(load.tokens_per_s)} tok/s",
            f"TTFT {_ttft(server)}",
            f"heard {ago(server.last_heard_ago_s)}",
        )
    peers = f"attached to {', '.join(map(clean, server.attached))}" if server.attached else ""
    return [
        f"  {_name(server)}  {state}",
        *_reasons(server, style, "    "),
        *_wrapped(", ".join(facts), style, "    "),
        *_wrapped(peers, style, "    "),
    ]


def _reasons(server: ServerView, style: Style, indent: str) -> list[str]:
    said = [clean(server.reason)] if server.reason else []
    said += [f"lost {clean(loss.peer)}: {clean(loss.reason)}" for loss in server.lost]
    return [line for text in said for line in _wrapped(text, style, indent)]


def _name(server: ServerView) -> str:
    return f"{server.role} {clean(server.server_id)}"


def _kv(server: ServerView) -> str:
    total = server.capacity.kv_tokens
    used = max(0, total - server.load.free_kv_tokens)
    return f"{int(100 * used / total + 0.5)}%" if total else "-"  # halves up, as on the page


def _ttft(server: ServerView) -> str:
    return "-" if server.ttft_ms is None else milliseconds(server.ttft_ms)


def _wrapped(text: str, style: Style, indent: str, hang: int = 0) -> list[str]:
    return textwrap.wrap(
        text,
        style.width,
        initial_indent=indent,
        subsequent_indent=" " * hang or indent,
        drop_whitespace=True,
        break_on_hyphens=False,
    )
