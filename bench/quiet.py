"""A watch over a run that keeps silent."""


class Quiet:
    """Says nothing."""

    def note(self, text: str) -> None:
        """Leave the remark out."""

    def alert(self, text: str) -> None:
        """Leave the remark out."""

    def step(self, progress: float, values: dict[str, float]) -> None:
        """Leave the numbers out."""
