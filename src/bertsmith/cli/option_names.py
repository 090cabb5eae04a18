"""Options by names they had before: one thing has one name on every verb, and old scripts still run."""

from typing import Any

from typer.core import TyperCommand

OLD_NAMES: dict[str, dict[str, str]] = {
    "answer": {"--text": "--passage-text"},
    "evaluate": {"--input": "--data"},
    "finetune": {"--second": "--text2"},
    "inspect": {"--second": "--text2"},
    "predict": {"--data": "--input"},
}
"""For each verb its old names, which no help shows, and what stands for them now."""


class Verb(TyperCommand):
    """A command that understands the old names of its options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As Click does it, of today's names."""
        renamed = OLD_NAMES.get(self.name or "", {})
        end = args.index("--") if "--" in args else len(args)  # behind it stand no options
        today = []
        for word in args[:end]:
            name, equals, value = word.partition("=")
            today.append(renamed.get(name, name) + equals + value)
        return super().parse_args(ctx, [*today, *args[end:]])
