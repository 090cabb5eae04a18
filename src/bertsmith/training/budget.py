"""The budget of a run, which ends it: steps, tokens, minutes or epochs."""

from dataclasses import dataclass

from bertsmith.training.trainer import Progress


class Budget:
    """Budget of a run; learning rate, stages of the data and the progress bar follow it."""

    @property
    def by_clock(self) -> bool:
        """True if the clock decides; then all processes follow the main one's clock."""
        return False

    def fraction(self, at: Progress) -> float:
        """Return the fraction that is spent, at most 1."""
        raise NotImplementedError

    def spent(self, at: Progress) -> bool:
        """True if the budget is spent."""
        return self.fraction(at) >= 1.0

    def shown(self, at: Progress) -> float:
        """Return the fraction of the run's work that is done, for a progress bar."""
        return self.fraction(at)

    def seconds_left(self, at: Progress) -> float:
        """Estimate the seconds for the rest of the run from the steps so far, without the first."""
        done = self.fraction(at)
        return (self.step_seconds(at) or at.seconds) * at.step * (1 - done) / done

    def step_seconds(self, at: Progress) -> float:
        """Return the mean seconds of steps after the first, which may compile; 0 if unknown."""
        return (at.seconds - at.first_step_seconds) / (at.step - 1) if at.step > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Steps(Budget):
    """A number of steps."""

    steps: int

    def fraction(self, at: Progress) -> float:
        """Return the fraction of the steps that are taken."""
        return min(1.0, at.step / self.steps)


@dataclass(frozen=True, slots=True)
class Tokens(Budget):
    """A number of tokens, filler included."""

    tokens: int

    def fraction(self, at: Progress) -> float:
        """Return the fraction of the tokens that were shown."""
        return min(1.0, at.tokens / self.tokens)


@dataclass(slots=True)
class Minutes(Budget):
    """Minutes from the beginning of a run to its end, without the time between two starts."""

    minutes: float
    ending_seconds: float = 0.0
    """Seconds reserved for the end of a run: last evaluation, checkpoint, model and curves."""
    ready_seconds: float | None = None
    """Seconds of the run before its first step; None if the first step compiles and so takes longer."""

    @property
    def by_clock(self) -> bool:
        """Return True."""
        return True

    def fraction(self, at: Progress) -> float:
        """Return the fraction of the time that has passed since the first step."""
        # Do not begin a step that would end too late.
        next_ends = at.seconds + self.step_seconds(at)
        if at.seconds >= self.step_limit or next_ends > self.step_limit:
            return 1.0
        # Count the seconds after the first step, so that a minute of compiling does not use up the warm-up.
        first = at.first_step_seconds
        return (at.seconds - first) / (self.step_limit - first)

    @property
    def step_limit(self) -> float:
        """Seconds of the run when its last step must end."""
        seconds = 60 * self.minutes
        return max(seconds - self.ending_seconds, seconds / 2)

    def step_seconds(self, at: Progress) -> float:
        """Return the mean seconds of steps after the first; of the first if it does not compile."""
        if at.step == 1 and self.ready_seconds is not None:
            return at.first_step_seconds - self.ready_seconds
        return Budget.step_seconds(self, at)

    def seconds_left(self, at: Progress) -> float:
        """Return the seconds until the end of the run."""
        return max(0.0, 60 * self.minutes - at.seconds)

    def steps_that_fit(self, at: Progress) -> int | None:
        """Estimate the total number of steps; None while the seconds of a step are unknown."""
        each = self.step_seconds(at)
        return at.step + max(0, int((self.step_limit - at.seconds) / each)) if each else None


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a run in evaluated tokens, so that the time of its end can be predicted."""

    one_step: float
    evaluation_steps: frozenset[int]
    """Steps after which there is an evaluation, except the last step."""
    one_evaluation: int
    end: int
    """Tokens in all evaluations after the last step."""

    def remaining(self, step: int, steps: int) -> float:
        """Return the work left after a step, including its evaluation, as a multiple of the work done."""
        evaluations = sum(number < step for number in self.evaluation_steps)
        done = step * self.one_step + evaluations * self.one_evaluation
        in_between = len(self.evaluation_steps) * self.one_evaluation
        return (steps * self.one_step + in_between + self.end - done) / done


@dataclass(frozen=True, slots=True)
class Epochs(Budget):
    """The steps of some epochs, or minutes if these end earlier."""

    steps: int
    work: Work
    minutes: Minutes | None = None

    @property
    def by_clock(self) -> bool:
        """True if minutes may end the run."""
        return self.minutes is not None

    def fraction(self, at: Progress) -> float:
        """Return the fraction of the steps or of the minutes, whichever is further."""
        by_clock = 0.0 if self.minutes is None or not at.step else self.minutes.fraction(at)
        return max(at.step / self.steps, by_clock)

    def shown(self, at: Progress) -> float:
        """Return the fraction of the work; evaluations after the last step are part of it."""
        return 1 / (1 + self._remaining(at))

    def seconds_left(self, at: Progress) -> float:
        """Estimate the seconds until the end of the run."""
        return at.seconds * self._remaining(at)

    def _remaining(self, at: Progress) -> float:
        remaining = self.work.remaining(at.step, self.steps)
        if self.minutes is None:
            return remaining
        by_clock = self.minutes.seconds_left(at) / at.seconds
        return min(remaining, by_clock + self.work.end / (at.step * self.work.one_step))
