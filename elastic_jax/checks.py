"""Checks of what files and callers give: every failure is a ValueError of one line that names the value and what is accepted."""

from __future__ import annotations

import contextlib
import json
import reprlib
from collections.abc import Iterator, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

# Positions, token ids and sizes are int32 on the device.
MAX_INT32 = 2**31 - 1

_ROLES = ("system", "user", "assistant")


def check_number(name: str, value: float | None, low: float, high: float, *, whole: bool = False) -> None:
    """Raises unless `value` is a number (an integer if `whole`) from `low` to `high`, both included. No NaN, no bool, no text."""
    if isinstance(value, bool) or not isinstance(value, Integral if whole else Real) or not low <= value <= high:
        kind, bounds = ("whole number", f"{low} to {high}") if whole else ("number", f"{low:g} to {high:g}")
        raise ValueError(f"{name}={reprlib.repr(value)}: a {kind} from {bounds} is needed")


def check_text(name: str, text: str) -> None:
    """ValueError for a text that UTF-8 has no bytes for: damaged files and wrong cuts leave half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is not valid UTF-8 (half of a surrogate pair at character {error.start})") from None


def check_chat(name: str, chat: Any) -> None:
    """ValueError for what is not a conversation that ends with the user."""
    messages = list(chat) if isinstance(chat, Sequence) else []
    if not messages or not all(
        isinstance(m, dict) and m.get("role") in _ROLES and isinstance(m.get("content"), str) and len(m) == 2 for m in messages
    ):
        accepted = f'a text, or a list of {{"role", "content"}} with roles {", ".join(_ROLES)} and texts as content'
        raise ValueError(f"{name}={chat!r}: accepted is {accepted}")
    if messages[-1]["role"] != "user":
        raise ValueError(f"{name} ends with a message of the role {messages[-1]['role']!r}: the last one must be the user's")
    for message in messages:
        check_text(name, message["content"])


def differences(there: dict[str, Any], now: dict[str, Any]) -> str:
    """Of a run's settings, name by name; "" where there is none."""
    names = sorted(there.keys() | now.keys())
    return "; ".join(f"{n}: {there.get(n)!r} there, {now.get(n)!r} now" for n in names if there.get(n) != now.get(n))


@contextlib.contextmanager
def errors_name(source: object) -> Iterator[None]:
    """The message of a ValueError raised inside begins with `source`."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """A file that holds a JSON object.

    Raises:
      FileNotFoundError: no such file.
      ValueError: it is damaged, or holds something else than an object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # also of text that is not UTF-8, of integers too long, of thousands of open brackets
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a JSON {type(content).__name__}: an object is needed")
    return content
