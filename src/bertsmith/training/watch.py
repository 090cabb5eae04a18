"""Who is told how a run goes."""

from typing import Any, Protocol


class Watch(Protocol):
    """Takes remarks and lines of metrics."""

    def note(self, text: str) -> None:
        """Take a remark worth a line."""

    def step(self, progress: float, values: dict[str, Any]) -> None:
        """Take a line of metrics."""

    def alert(self, text: str) -> None:
        """Take a remark that comes amid anything else, from a signal: nothing may be waited for."""
