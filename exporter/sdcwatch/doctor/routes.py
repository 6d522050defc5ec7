"""Which receivers an alert would reach: Alertmanager's routing rules, over the configuration that it shows of itself.

Pure. It knows matchers in their three spellings, `continue`, and inherited receivers; inhibitions and silences are
not part of a route. Flow: config_text -> **routes** -> path_checks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_MATCHER = re.compile(r'\s*"?([A-Za-z_][^\s"=~!]*)"?\s*(=~|!~|!=|=)\s*(.*?)\s*\Z', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Landing:
    """Where an alert lands.

    Attributes:
        receiver: name of the receiver.
        timed: the route is muted or active at certain times only.
    """

    receiver: str
    timed: bool


def resolve(config: Any, labels: Mapping[str, str]) -> list[Landing]:
    """Every receiver that an alert with these labels reaches, in the order of the routes.

    Args:
        config: the parsed configuration.

    Raises:
        ValueError: the configuration has a part that is not understood.
    """
    route = config.get("route") if isinstance(config, dict) else None
    if not isinstance(route, dict):
        raise ValueError("the configuration has no route")
    return _matches(route, labels, "") or []


def webhooks(config: Any, receiver: str) -> list[str]:
    """URLs of a receiver's webhooks; `<secret>` where Alertmanager hides them."""
    for each in config.get("receivers") or []:
        if isinstance(each, dict) and each.get("name") == receiver:
            found = [hook for hook in each.get("webhook_configs") or [] if isinstance(hook, dict)]
            return [str(hook.get("url") or hook.get("url_file") or "") for hook in found]
    return []


def _matches(route: Any, labels: Mapping[str, str], inherited: str) -> list[Landing] | None:
    """None where the route does not take the alert."""
    if not isinstance(route, dict):
        raise ValueError("a route is no mapping")
    if not all(_holds(matcher, labels) for matcher in _matchers(route)):
        return None
    receiver = route.get("receiver") or inherited
    found: list[Landing] = []
    for child in route.get("routes") or []:
        landed = _matches(child, labels, receiver)
        if landed is None:
            continue
        found += landed
        if child.get("continue") != "true":
            break
    if found:
        return found
    return [Landing(receiver, bool(route.get("mute_time_intervals") or route.get("active_time_intervals")))]


def _matchers(route: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    found = [(name, "=", str(value)) for name, value in (route.get("match") or {}).items()]
    found += [(name, "=~", str(value)) for name, value in (route.get("match_re") or {}).items()]
    for text in route.get("matchers") or []:
        match = _MATCHER.match(text)
        if match is None:
            raise ValueError(f"matcher {text!r} is not understood")
        name, operator, value = match.groups()
        if len(value) > 1 and value.startswith('"') and value.endswith('"'):
            value = re.sub(r'\\(["\\n])', lambda m: "\n" if m.group(1) == "n" else m.group(1), value[1:-1])
        found.append((name, operator, value))
    return found


def _holds(matcher: tuple[str, str, str], labels: Mapping[str, str]) -> bool:
    name, operator, wanted = matcher
    value = labels.get(name, "")
    if operator in ("=", "!="):
        return (value == wanted) == (operator == "=")
    try:
        found = re.fullmatch(wanted, value) is not None
    except re.error:
        raise ValueError(f"expression {wanted!r} is not understood") from None
    return found == (operator == "=~")
