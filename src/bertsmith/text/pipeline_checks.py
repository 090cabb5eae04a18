"""Safety checks for a foreign tokenizer.json: it must not multiply the text or take exponential time."""

import json
import re
from collections.abc import Iterator
from typing import Any

from bertsmith.core.errors import UserError
from bertsmith.text.tokenizer_settings import FETCH_AGAIN

MAX_GROWTH = 100
"""Maximum growth of a text by all replacements together; a single one may spell out a character."""
MAX_PATTERN = 5000
"""Maximum length of a pattern in characters; usual tokenizers have some hundred."""
SHOWN = 60

MAX_SPELLINGS = 200
"""Maximum spellings of a repeated group, over its optional and repeated parts; usual patterns have fewer."""

ATOM = re.compile(r"\\.|\[(?:\\.|[^\]])*\]|[^()+*{},0-9]", re.DOTALL)
"""An escape, a character class, or any character that neither groups nor repeats."""
INNERMOST_GROUP = re.compile(r"\(([^()]*)\)")
ENDLESS = re.compile(r"[+*]|\{\d*,\}")
NESTED = re.compile(r"R(?:[+*]|\{\d*,\})")
REPEATED_GROUP = re.compile(r"\(((?:\\.|\[(?:\\.|[^\]])*\]|[^()\\\[])*)\)(?:[+*]|\{\d*,\})", re.DOTALL)
"""A repeated group without a group inside."""
QUANTIFIED = re.compile(
    r"(\\[pP]\{\^?\w+\}|\\.|\[(?:\\.|[^\]])*\]|[^\\\[{}?])(?:(\?)|\{(\d+)(?:,(\d+))?\})?", re.DOTALL
)
"""A character or a class, with its number of repetitions."""


def check_pipeline(pipeline: str, *, where: str) -> None:
    """Raise if replacements multiply text, patterns may backtrack exponentially, or templates lack a text."""
    try:
        parts = json.loads(pipeline)
    except (ValueError, RecursionError):
        return  # the library reports the error
    if not isinstance(parts, dict):
        return
    faults = [_pattern_fault(name, parts.get(name)) for name in ("normalizer", "pre_tokenizer", "decoder")]
    faults += [_template_fault(template) for template in _templates(parts.get("post_processor"))]
    for fault in filter(None, faults):
        raise UserError(fault, where=where, remedy=FETCH_AGAIN)


def _pattern_fault(name: str, part: Any) -> str:
    growth = 1.0
    for pattern, content in _patterns(part):
        regex, replaced = pattern.get("Regex"), pattern.get("String")
        if isinstance(regex, str) and takes_for_ever(regex):
            return f"the pattern {regex[:SHOWN]!r} in its {name} repeats repetitions: it may take for ever"
        length = len(replaced) if isinstance(replaced, str) else 1
        growth *= max(1.0, len(content) / max(1, length))
    return f"its {name} replaces text by {growth:.0f} times as much" if growth > MAX_GROWTH else ""


def _template_fault(template: dict[str, Any]) -> str:
    """Return the fault that would make the library lose a text or panic with its own traceback, or ""."""
    single, pair, defined = (template.get(name) for name in ("single", "pair", "special_tokens"))
    if not isinstance(single, list) or not isinstance(pair, list) or not isinstance(defined, dict):
        return ""  # the library reports the error
    if _named_in(single, "Sequence") != {"A"} or _named_in(pair, "Sequence") != {"A", "B"}:
        return "its template omits a text, or has one too many"
    unknown = _named_in([*single, *pair], "SpecialToken") - defined.keys()
    return f"its template names {min(unknown)[:SHOWN]!r}, not one of its special_tokens" if unknown else ""


def _templates(part: Any) -> Iterator[dict[str, Any]]:
    """Yield each template of a post-processor, which may be a sequence of several."""
    if isinstance(part, dict):
        if part.get("type") == "TemplateProcessing":
            yield part
        several = part.get("processors")
        for each in several if isinstance(several, list) else ():
            yield from _templates(each)


def _named_in(form: list[Any], kind: str) -> set[str]:
    """Return the ids of the texts, or of the special tokens, in a template."""
    held = [each.get(kind) for each in form if isinstance(each, dict)]
    return {str(each.get("id")) for each in held if isinstance(each, dict)}


def _patterns(part: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield each pattern in a part of a pipeline, with its replacement."""
    if isinstance(part, list):
        for each in part:
            yield from _patterns(each)
    elif isinstance(part, dict):
        if isinstance(pattern := part.get("pattern"), dict):
            content = part.get("content")
            yield pattern, content if isinstance(content, str) else ""
        for value in part.values():
            if isinstance(value, (list, dict)):
                yield from _patterns(value)


def takes_for_ever(regex: str) -> bool:
    """True if a pattern has exponentially many ways to match some text, or is too long to check."""
    return len(regex) > MAX_PATTERN or has_nested_quantifiers(regex) or has_ambiguous_repeats(regex)


def has_ambiguous_repeats(regex: str) -> bool:
    """True if a group that repeats endlessly can match some text in two ways: (a|aa)+ has 2^(n/2) for n."""
    return any(_is_ambiguous(group[1]) for group in REPEATED_GROUP.finditer(regex))


def _is_ambiguous(held: str) -> bool:
    """True if two sequences of alternatives spell the same text (Sardinas and Patterson 1953)."""
    spellings = [row for alternative in _alternatives(held) for row in _spellings(alternative)]
    if len(spellings) > MAX_SPELLINGS or len(spellings) != len(set(spellings)):
        return True
    known = set(spellings) - {()}
    left = {other[len(one) :] for one in known for other in known if _begins(other, one) and one != other}
    seen: set[tuple[str, ...]] = set()
    while left:
        if () in left or left & known:
            return True
        seen |= left
        left = {
            longer[len(shorter) :]
            for rest in left
            for word in known
            for longer, shorter in ((rest, word), (word, rest))
            if _begins(longer, shorter)
        } - seen
    return False


def _begins(text: tuple[str, ...], start: tuple[str, ...]) -> bool:
    return len(start) <= len(text) and all(
        one == other or "." in (one, other) for one, other in zip(text, start, strict=False)
    )


def _alternatives(held: str) -> list[str]:
    """Split at each bar outside of classes and escapes."""
    parts, found = [""], re.findall(r"\\.|\[(?:\\.|[^\]])*\]|.", held.removeprefix("?:"), re.DOTALL)
    for piece in found:
        if piece == "|":
            parts.append("")
        else:
            parts[-1] += piece
    return parts


def _spellings(alternative: str) -> list[tuple[str, ...]]:
    """Return the sequences of characters and classes that an alternative spells, without look-arounds."""
    rows: list[tuple[str, ...]] = [()]
    for atom, optional, fewest, most in QUANTIFIED.findall(alternative):
        low = 0 if optional else int(fewest or 1)
        high = 1 if optional else int(most or low)
        rows = [row + (atom,) * count for row in rows for count in range(low, min(high, low + 8) + 1)]
        if len(rows) > MAX_SPELLINGS:
            break
    return rows


def has_nested_quantifiers(regex: str) -> bool:
    """True if a group that repeats endlessly contains another endless repeat: (a+)+ matches n in 2^n ways."""
    plain = ATOM.sub("x", regex)
    while group := INNERMOST_GROUP.search(plain):
        held = "R" if ENDLESS.search(group[1]) or "R" in group[1] else "x"
        plain = plain[: group.start()] + held + plain[group.end() :]
        if NESTED.search(plain):
            return True
    return False
