"""The one exception meant for people."""


class UserError(Exception):
    """Something the user can mend: what is wrong, where it stands, and what to do about it."""

    def __init__(self, what: str, *, where: str = "", remedy: str = "") -> None:
        self.what, self.where, self.remedy = what, where, remedy
        super().__init__(self.line())

    def line(self) -> str:
        """The whole message as one line: `where: what; remedy`."""
        place = f"{self.where}: " if self.where else ""
        advice = f"; {self.remedy}" if self.remedy else ""
        return " ".join(f"{place}{self.what}{advice}".split())
