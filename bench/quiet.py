"""A progress callback that prints nothing."""


class Quiet:
    """Prints nothing."""

    def on_message(self, text: str) -> None:
        """Drop the message."""

    def on_progress(self, progress: float) -> None:
        """Nothing."""

    def on_deadline(self, seconds: float, total: float) -> None:
        """Nothing."""

    def on_signal(self, text: str) -> None:
        """Drop the message."""

    def on_step(self, progress: float, values: dict[str, float]) -> None:
        """Drop the metrics."""
