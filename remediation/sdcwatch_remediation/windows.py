"""Weekly windows in which the service may act unasked, such as `Mon-Fri 08:00-18:00`; pure.

What it does: reads them and says whether a time lies in one. Times are UTC, the end is not part of the window, and a
window that ends before it begins goes over midnight.
What it never does: know a time zone: a change of clocks must not move what a service is allowed to do.
Its place: `policy` asks, `config` checks what was written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime, timezone

_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_FORM = re.compile(r"(\w{3})(?:-(\w{3}))? (\d{2}):(\d{2})-(\d{2}):(\d{2})", re.ASCII)


def inside(texts: Iterable[str], now: float) -> bool:
    """Whether a time in unix seconds lies in one of the windows; with no window at all, always.

    Raises:
        ValueError: a text is not a window.
    """
    windows = [parse(text) for text in texts]
    if not windows:
        return True
    at = datetime.fromtimestamp(now, tz=timezone.utc)
    day, minute = at.weekday(), at.hour * 60 + at.minute
    return any(_holds(days, begin, end, day, minute) for days, begin, end in windows)


def parse(text: str) -> tuple[frozenset[int], int, int]:
    """Return the days (Monday is 0), the first minute and the minute after the last of one window.

    Raises:
        ValueError: the text is not a window; the message shows one.
    """
    found = _FORM.fullmatch(text.strip())
    try:
        if found is None:
            raise ValueError
        first = _DAYS.index(found[1].lower())
        last = _DAYS.index((found[2] or found[1]).lower())
        begin, end = int(found[3]) * 60 + int(found[4]), int(found[5]) * 60 + int(found[6])
        if begin >= 1440 or end > 1440 or begin == end or int(found[4]) > 59 or int(found[6]) > 59:
            raise ValueError
    except ValueError:
        raise ValueError(f"{text!r} is no window; write it as 'Mon-Fri 08:00-18:00' (UTC)") from None
    return frozenset((first + n) % 7 for n in range((last - first) % 7 + 1)), begin, end


def _holds(days: frozenset[int], begin: int, end: int, day: int, minute: int) -> bool:
    if begin < end:
        return day in days and begin <= minute < end
    return (day in days and minute >= begin) or ((day - 1) % 7 in days and minute < end)
