"""Numbers, ages and other people's text, for a terminal (pure)."""

from __future__ import annotations


def clean(text: str) -> str:
    """Text of a server without what could move the cursor or forge a line."""
    if text.isprintable():  # most is
        return text
    return "".join(char if char.isprintable() else "?" for char in text)


def short(number: float) -> str:
    """1234567 as 1.2M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= size:
            scaled = number / (1e3 if unit == "k" else size)
            return f"{scaled:.0f}{unit}" if scaled >= 100 else f"{scaled:.1f}{unit}"
    is_whole = number == int(number)
    return f"{number:.0f}" if is_whole or number >= 100 else f"{number:.1f}"


def milliseconds(number: float) -> str:
    """1500 as 1.5 s."""
    if number >= 1000:
        return f"{number / 1000:.1f} s"
    return f"{number:.0f} ms" if number >= 10 else f"{number:.1f} ms"


def duration(seconds: float) -> str:
    """75 as 1 min 15 s."""
    whole = max(0, int(seconds))
    parts = (
        (whole // 86400, "d"),
        (whole // 3600 % 24, "h"),
        (whole // 60 % 60, "min"),
        (whole % 60, "s"),
    )
    first = next((index for index, (number, _) in enumerate(parts) if number), None)
    if first is None:
        return "0 s"
    return " ".join(f"{number} {unit}" for number, unit in parts[first : first + 2] if number)


def ago(seconds: float) -> str:
    """Short enough for a column."""
    if seconds < 1:
        return "now"
    return f"{' '.join(duration(seconds).split(' ')[:2])} ago"
