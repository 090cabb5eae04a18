"""The skeleton that the cards of all training jobs have, as Markdown: what, how, and with which results."""

from collections.abc import Iterable, Sequence

Block = list[str]
"""Lines that stand together; a blank line comes before the next block."""


def card_text(title: str, introduction: str, blocks: Sequence[Block], *, caveat: str) -> str:
    """A whole card: its title and introduction, blocks of facts and results, and what to beware of."""
    whole = [[f"# {title}"], [introduction], *blocks, [caveat]]
    return "\n\n".join("\n".join(block) for block in whole) + "\n"


def facts_block(facts: Iterable[str], *, heading: str = "") -> Block:
    """Facts as a list."""
    return [*_heading(heading), *(f"- {fact}" for fact in facts)]


def table_block(columns: Sequence[str], rows: Iterable[Sequence[str]], *, heading: str = "") -> Block:
    """Results as a table."""
    header, *body = (f"| {' | '.join(cells)} |" for cells in (columns, *rows))
    return [*_heading(heading), header, "|---" * len(columns) + "|", *body]


def _heading(text: str) -> Block:
    return [f"## {text}"] if text else []
