"""Write trees of plain values as TOML text; the standard library only reads TOML."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_PADDED_EXPONENT = re.compile(r"(e[+-])0(?=\d)")
_COMMENT_COLUMN = 36


def toml_text(tree: Mapping[str, Any], comments: Mapping[str, str] | None = None) -> str:
    """Return the tree as a TOML document, with `comments` at the ends of the lines of some dotted keys."""
    return "\n".join(_lines(tree, (), comments or {})).lstrip("\n") + "\n"


def value_text(value: Any) -> str:
    """Return one value as TOML: text, number, truth value, list or table, all on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"{value:_}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, float):
        return _PADDED_EXPONENT.sub(r"\1", repr(value))
    if isinstance(value, str):
        # JSON escapes everything that TOML does, except DEL, the one control character above the space.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{_key_text(key)} = {value_text(held)}' for key, held in value.items())} }}"
    assert isinstance(value, Sequence), f"TOML does not have a {type(value).__name__}"
    return f"[{', '.join(map(value_text, value))}]"


def _lines(tree: Mapping[str, Any], path: tuple[str, ...], comments: Mapping[str, str]) -> Iterator[str]:
    # Plain values first: values below a header belong to that table.
    for key, value in tree.items():
        if not isinstance(value, Mapping):
            line = f"{_key_text(key)} = {value_text(value)}"
            comment = comments.get(".".join((*path, key)))
            yield f"{line:<{_COMMENT_COLUMN}}  # {comment}" if comment else line
    for key, value in tree.items():
        if isinstance(value, Mapping):
            inner = (*path, key)
            yield f"\n[{'.'.join(map(_key_text, inner))}]"
            yield from _lines(value, inner, comments)


def _key_text(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else value_text(key)
