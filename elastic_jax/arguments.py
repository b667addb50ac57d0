"""Checks of arguments that texts and numbers come in by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

_ROLES = ("system", "user", "assistant")


def check_number(name: str, value: Any, accepted: str, lowest: float, highest: float) -> float:
    """A real number between two, both of which count; ValueError where it is none."""
    try:
        number = float(value) if isinstance(value, Real) else math.nan
    except OverflowError:
        number = math.nan
    if not lowest <= number <= highest:
        raise ValueError(f"{name}={value!r}: accepted are {accepted}")
    return number


def check_text(name: str, text: str) -> None:
    """ValueError for a text that UTF-8 has no bytes for."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} has half of a surrogate pair at character {error.start}: accepted is text that UTF-8 can hold") from None


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
