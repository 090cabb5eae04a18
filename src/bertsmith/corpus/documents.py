"""Documents and sentences of raw text blocks: the part of reading that workers do."""

import html
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from sentencex import segment  # type: ignore[import-untyped]

from bertsmith.core.errors import UserError
from bertsmith.core.files import lone_surrogate

# In UTF-8: a longer document is cut into several at line ends, to bound the memory.
DOCUMENT_BYTES = 4 << 20

Layout = Literal["text", "jsonl", "parquet", "wiki"]
EncodingErrors = Literal["strict", "replace"]
SEGMENTED = 1 << 12  # maximum characters passed to the sentence splitter at once
# Languages with rules in sentencex 1.0 (one file each in its src/languages). For others it uses the rules of
# a related language, or else of English.
_WITH_RULES = re.compile(
    "am|ar|bg|bn|ca|da|de|el|en|es|fi|fr|gu|hi|hy|it|ja|kk|kn|ml|mr|my|nl|pa|pl|pt|ru|sk|ta|te|uk"
)


@dataclass(frozen=True, slots=True)
class Document:
    """A text of stripped, non-empty lines, and its location (`part-0.txt.xz:1234`)."""

    text: str
    where: str


@dataclass(frozen=True, slots=True)
class Reading:
    """Settings for reading a file: its layout, the record field with the text, the action on bad UTF-8."""

    layout: Layout
    field: str = "text"
    errors: EncodingErrors = "strict"


@dataclass(frozen=True, slots=True)
class Block:
    """The raw bytes of some whole documents of one file."""

    content: bytes
    source: str
    first_line: int  # of the file, from 1; a row in a Parquet file
    first_byte: int  # of the unpacked file
    reading: Reading
    row_ends: tuple[int, ...] = ()  # Parquet only: end of each row's text in the content
    file_bytes: int = 0  # bytes of the file on disk read for this block, for a progress bar


def documents_of(block: Block) -> Iterator[Document]:
    """Yield the documents of a block in order, each at most DOCUMENT_BYTES long."""
    for text, line in _TEXTS[block.reading.layout](block):
        where = f"{block.source}:{line}"
        # A character takes at most four bytes in UTF-8, so most texts need no encoding to check their size.
        if len(text) * 4 <= DOCUMENT_BYTES:
            yield Document(text, where)
            continue
        rest = text.encode("utf-8")
        while rest:
            end = end_of_piece(rest, DOCUMENT_BYTES)
            if piece := rest[:end].decode("utf-8").strip():
                yield Document(piece, where)
            rest = rest[end:]


def tidied(text: str) -> str:
    """Strip the lines of a text and remove empty ones, so that it is one document."""
    return "\n".join(filter(None, map(str.strip, _with_plain_line_ends(text).split("\n"))))


def end_of_piece(content: bytes | bytearray, limit: int) -> int:
    """Return where to cut a long document: after the last line end in the limit, or space, or character."""
    if len(content) <= limit:
        return len(content)
    for separator in (b"\n", b" "):
        if end := content.rfind(separator, 0, limit) + 1:
            return end
    while content[limit] & 0xC0 == 0x80 and limit > 1:  # inside a character of several bytes
        limit -= 1
    return limit


def _plain_texts(block: Block) -> Iterator[tuple[str, int]]:
    lines: list[str] = []
    for number, line in enumerate(_lines(block), block.first_line):
        if line:
            lines.append(line)
        elif lines:
            yield "\n".join(lines), number - len(lines)
            lines = []
    if lines:
        yield "\n".join(lines), number + 1 - len(lines)


def _wiki_texts(block: Block) -> Iterator[tuple[str, int]]:
    """Yield the pages that WikiExtractor writes, without the line that repeats the title.

    BERT was trained on the text passages of Wikipedia without its headers (Devlin et al. 2018, 3.1).
    """
    page: _Page | None = None
    for number, line in enumerate(_lines(block), block.first_line):
        if line.startswith("<doc ") or line == "</doc>":
            if page and page.lines:
                yield "\n".join(page.lines), page.first_line
            tag = line.removesuffix(">").rstrip()  # no regular expression: a search would be quadratic
            quoted = tag[:-1].partition('title="')[2] if tag != line and tag.endswith('"') else ""
            page = None if line == "</doc>" else _Page(_unescaped(quoted).strip(), number, [])
        elif page:
            page.add(line)
        elif line:
            remedy = "use `format=text` if WikiExtractor did not write this"
            raise UserError(
                "is outside <doc ...> and </doc>", where=f"{block.source}:{number}", remedy=remedy
            )
    if page and page.lines:
        yield "\n".join(page.lines), page.first_line


@dataclass(slots=True)
class _Page:
    title: str
    first_line: int
    lines: list[str]

    def add(self, line: str) -> None:
        text = _unescaped(line).strip()  # WikiExtractor writes &lt; for <
        if text and (self.lines or text != self.title):
            self.lines.append(text)


def _unescaped(text: str) -> str:
    try:
        return html.unescape(text)
    except ValueError:  # a character reference with more digits than Python parses: &#111...
        return text


def _jsonl_texts(block: Block) -> Iterator[tuple[str, int]]:
    # Split at line feeds only: a JSON string may contain U+2028 and other separators.
    for number, line in enumerate(_decoded(block).split("\n"), block.first_line):
        if line and not line.isspace():
            value = _field_of(line, block.reading, f"{block.source}:{number}")
            if text := tidied(value):
                yield text, number


def _field_of(line: str, reading: Reading, where: str) -> str:
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"is not valid JSON ({error})", where=where, remedy=_ONE_OBJECT_A_LINE) from error
    if not isinstance(record, dict):
        raise UserError("is not a JSON object", where=where, remedy=_ONE_OBJECT_A_LINE)
    if reading.field not in record:
        remedy = f"choose one of its fields with `text`: {', '.join(record) or 'it is empty'}"
        raise UserError(f"lacks the field {reading.field!r}", where=where, remedy=remedy)
    value = record[reading.field]
    if value is None:  # the record has no text: common in exported tables
        return ""
    if not isinstance(value, str):
        raise UserError(
            f"field {reading.field!r} is not text", where=where, remedy="choose another with `text`"
        )
    if fault := lone_surrogate(value):
        if reading.errors == "strict":
            raise UserError(fault, where=where, remedy=_REPLACE)
        value = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value


def _parquet_texts(block: Block) -> Iterator[tuple[str, int]]:
    start = 0
    for row, end in enumerate(block.row_ends, block.first_line):
        try:
            text = block.content[start:end].decode("utf-8", block.reading.errors)
        except UnicodeDecodeError as error:
            raise UserError("is not UTF-8 text", where=f"{block.source}:{row}", remedy=_REPLACE) from error
        if text := tidied(text):
            yield text, row
        start = end


def _lines(block: Block) -> Iterator[str]:
    return map(str.strip, _with_plain_line_ends(_decoded(block)).split("\n"))


def _with_plain_line_ends(text: str) -> str:
    """Normalise line ends, and remove NUL, which C programs take for the end of a text."""
    if "\0" in text:
        text = text.replace("\0", "")
    if "\r" in text:  # \r\r\n results from converting Unix to Windows twice
        text = re.sub(r"(?<!\r)\r++\n", "\n", text).replace("\r", "\n")
    return text


def _decoded(block: Block) -> str:
    try:
        return block.content.decode("utf-8", block.reading.errors)
    except UnicodeDecodeError as error:
        line = block.first_line + block.content.count(b"\n", 0, error.start)
        what = f"is not UTF-8 text (byte {block.first_byte + error.start})"
        remedy = f"convert it (iconv -f LATIN1 -t UTF-8), or {_REPLACE}"
        raise UserError(what, where=f"{block.source}:{line}", remedy=remedy) from error


_TEXTS = {"text": _plain_texts, "jsonl": _jsonl_texts, "parquet": _parquet_texts, "wiki": _wiki_texts}
_REPLACE = "use `encoding_errors=replace`"
_ONE_OBJECT_A_LINE = 'write one object per line: {"text": "..."}, or use `format=text` if it is prose'


# ---- sentences, by sentencex: it supports the abbreviations of many languages and loses no character


def spaced_sentences(line: str, *, language: str = "en") -> list[str]:
    """Return the sentences of a line, each with a leading space if the line has space before it.

    In a byte-level vocabulary, a word with a space before it is another piece than the word alone.
    """
    found: list[str] = []
    gap = False
    for part in _segments(line, language):
        if sentence := part.strip():
            spaced = found and (gap or part[:1].isspace())
            found.append(f" {sentence}" if spaced else sentence)
        gap = part[-1:].isspace()
    return found


def _segments(line: str, language: str) -> Iterator[str]:
    """Split a line into sentences, at most SEGMENTED characters at once: sentencex is quadratic in quotes."""
    start = 0
    while len(line) - start > SEGMENTED:
        end = line.rfind(" ", start + 1, start + SEGMENTED) + 1 or start + SEGMENTED
        parts = segment(language, line[start:end])
        # The last sentence may continue after the cut; a longer one than SEGMENTED is cut there.
        whole = parts[:-1] or parts
        yield from whole
        start += sum(map(len, whole)) or end - start
    yield from segment(language, line[start:])


def check_language(language: str) -> str:
    """Return the language code, or raise if it is not a valid code."""
    # sentencex accepts any word as a language.
    if not re.fullmatch(r"[a-z]{2,3}(-[a-z0-9]+)*", language):
        remedy = "write the two or three letters of ISO 639: en, de, zh"
        raise UserError(f"{language!r} is not a language code", key="language", remedy=remedy)
    return language


def has_rules(language: str) -> bool:
    """True if sentencex has its own rules for this language."""
    return _WITH_RULES.fullmatch(language) is not None
