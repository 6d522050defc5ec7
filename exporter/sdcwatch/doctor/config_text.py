"""Reads the configuration that Alertmanager shows of itself: the block YAML that Go's encoder writes, and no more.

A program on a training node must not need a YAML library for one question. What is not of that form is a ValueError,
never a guess: anchors, tags and nested flow collections are refused. Blank lines inside long texts (templates of
messages) are lost; no route depends on one. Standard library only.
Flow: path_checks -> **config_text** -> routes.
"""

from __future__ import annotations

import json
import re
from typing import Any

_KEY = re.compile(r"""("(?:[^"\\]|\\.)*"|'(?:[^']|'')*'|(?!\? )[^\s"'\[{&*!|>%@`#].*?)\s*:(?:\s+(.*))?\Z""")
_Line = tuple[int, str]


def parse(text: str) -> Any:
    """Mappings, lists and text (nothing is turned into a number or a boolean).

    Raises:
        ValueError: not of the form that is understood; the message shows the line.
    """
    lines = [
        (len(raw) - len(raw.lstrip(" ")), raw.strip())
        for raw in text.splitlines()
        if raw.strip() and not raw.lstrip().startswith("#") and raw.strip() != "---"
    ]
    reader = _Reader(lines)
    value = reader.block(0)
    if reader.position != len(lines):
        raise ValueError(f"not understood: {lines[reader.position][1][:80]!r}")
    return value


class _Reader:
    def __init__(self, lines: list[_Line]) -> None:
        self.lines = lines
        self.position = 0

    def block(self, indent: int) -> Any:
        """A mapping or list whose lines stand at `indent` or deeper, from the current position on."""
        if self.position >= len(self.lines):
            return None
        at, content = self.lines[self.position]
        if at < indent:
            return None
        return self._list(at) if _is_item(content) else self._mapping(at)

    def _mapping(self, indent: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while self._stands_at(indent) and not _is_item(self.lines[self.position][1]):
            content = self.lines[self.position][1]
            match = _KEY.match(content)
            if match is None:
                raise ValueError(f"not understood: {content[:80]!r}")
            self.position += 1
            key, value = _plain(match.group(1)), match.group(2)
            if key in found:
                raise ValueError(f"twice: {key[:80]!r}")
            found[key] = self._value(value, indent)
        return found

    def _list(self, indent: int) -> list[Any]:
        found: list[Any] = []
        while self._stands_at(indent) and _is_item(self.lines[self.position][1]):
            inside = self.lines[self.position][1][1:].strip()
            if not inside:
                self.position += 1
                found.append(self.block(indent + 1))
            elif _is_item(inside) or _KEY.match(inside):
                # The rest of the line is the first line of a block two columns further in.
                self.lines[self.position] = (indent + 2, inside)
                found.append(self.block(indent + 2))
            else:
                self.position += 1
                found.append(self._value(inside, indent))
        return found

    def _value(self, value: str | None, indent: int) -> Any:
        if value is None:
            if self.position < len(self.lines):
                at, content = self.lines[self.position]
                if at > indent or (at == indent and _is_item(content)):
                    return self.block(at)
            return None
        if re.fullmatch(r"[|>][+-]?\d?[+-]?", value):
            return "\n".join(self._deeper(indent))
        more = self._deeper(indent)  # Go folds long texts
        for part in more:
            value = value[:-1] + part.removeprefix("\\") if value.endswith("\\") else f"{value} {part}"
        return _scalar(value)

    def _deeper(self, indent: int) -> list[str]:
        found = []
        while self.position < len(self.lines) and self.lines[self.position][0] > indent:
            found.append(self.lines[self.position][1])
            self.position += 1
        return found

    def _stands_at(self, indent: int) -> bool:
        return self.position < len(self.lines) and self.lines[self.position][0] == indent


def _is_item(content: str) -> bool:
    return content == "-" or content.startswith("- ")


def _scalar(value: str) -> Any:
    if value in ("{}", "[]"):
        return {} if value == "{}" else []
    if value[0] in "&*!%@`{" or value.startswith("? ") or (value[0] == "[" and not value.endswith("]")):
        raise ValueError(f"not understood: {value[:80]!r}")
    if value[0] == "[":
        return [_plain(part.strip()) for part in value[1:-1].split(",")]
    return _plain(value)


def _plain(value: str) -> str:
    if value.startswith('"'):
        try:
            return str(json.loads(value))
        except ValueError:
            raise ValueError(f"not understood: {value[:80]!r}") from None
    if value.startswith("'"):
        if len(value) < 2 or not value.endswith("'"):
            raise ValueError(f"not understood: {value[:80]!r}")
        return value[1:-1].replace("''", "'")
    return value
