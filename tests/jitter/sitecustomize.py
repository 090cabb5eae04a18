"""`--jitter`: clocks that jump, and threads and processes that are held up, as on a very busy machine.

Python imports this file when it starts, so that the processes of a test are held up too: `pytest_configure`
puts this folder on PYTHONPATH. The clocks are shifted by one function of the true time, the same in all
processes, because several of them may compare readings of the monotonic clock.
"""

import os
import random
import sys
import time
from collections.abc import Callable
from functools import lru_cache

SETTING = "BERTSMITH_TESTS_JITTER"
"""The environment variable with the seed and the true monotonic time at which the jumps began."""
SLOT_SECONDS = 0.5
"""At most one jump in each."""
HELD_UP = {
    "open",
    "os.listdir",
    "os.mkdir",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.scandir",
    "fcntl.flock",
}
HELD_UP |= {"_thread.start_new_thread", "os.fork", "os.kill", "os.posix_spawn"}
HELD_UP |= {
    "subprocess.Popen",
    "socket.__new__",
    "socket.accept",
    "socket.bind",
    "socket.connect",
    "socket.sendmsg",
}
"""The audit events after which whoever caused them may have to wait."""
SHARE_HELD_UP, LONGEST_HOLD_SECONDS = 0.04, 0.01
SWITCH_SECONDS = 1e-5
"""How long a thread computes before another has its turn; Python's own is 0.005."""

TRUE_TIME = time.monotonic
SLEEP = time.sleep
chance = random.Random()


class Jumps:
    """How far the clocks have jumped at a true monotonic time."""

    def __init__(self, seed: str, began: float) -> None:
        self.seed, self.began = seed, began
        self.passed = [0.0]

    def at(self, now: float) -> float:
        slots, within = divmod(max(0.0, now - self.began) / SLOT_SECONDS, 1)
        while len(self.passed) <= slots:
            self.passed.append(self.passed[-1] + self.slot(len(self.passed) - 1)[1])
        moment, seconds, _ = self.slot(int(slots))
        return self.passed[int(slots)] + (seconds if within >= moment else 0.0)

    @lru_cache(maxsize=4)  # noqa: B019 - one for a process
    def slot(self, index: int) -> tuple[float, float, float]:
        """When in this slot, by how many seconds, and how wrong the time of day is meanwhile."""
        drawn = random.Random(f"{self.seed}:{index}")
        seconds = min(2.0, drawn.expovariate(4)) if drawn.random() < 0.2 else 0.0
        return drawn.random(), seconds, drawn.uniform(-1, 1)

    def wrong(self, now: float) -> float:
        """Seconds by which the time of day is wrong: it is corrected forwards and backwards."""
        return self.slot(int(max(0.0, now - self.began) / SLOT_SECONDS))[2]


def hold_up() -> None:
    """Let others have their turn, now and then."""
    if chance.random() < SHARE_HELD_UP:
        SLEEP(chance.uniform(0, LONGEST_HOLD_SECONDS))


def start(setting: str) -> None:
    """Shift the clocks of this process and hold it up from now on."""
    seed, began = setting.split()
    jumps = Jumps(seed, float(began))

    def shifted(name: str, shift: Callable[[float], float]) -> None:
        clock = getattr(time, name)

        def reading() -> float:
            hold_up()
            return clock() + shift(TRUE_TIME())

        setattr(time, name, reading)
        setattr(time, f"{name}_ns", lambda: int(reading() * 1e9))

    for name in ("monotonic", "perf_counter"):
        shifted(name, jumps.at)
    shifted("time", lambda now: jumps.at(now) + jumps.wrong(now))
    # Others on the same cores take no CPU time of this process, but its caches: the same work costs more.
    for name in ("process_time", "thread_time"):
        slower(name)

    def heard(event: str, _: tuple[object, ...]) -> None:
        if event in HELD_UP:
            hold_up()

    sys.addaudithook(heard)
    sys.setswitchinterval(SWITCH_SECONDS)


def slower(name: str) -> None:
    """Let a clock of CPU time run faster by a share that changes."""
    clock = getattr(time, name)
    last, added = clock(), 0.0

    def reading() -> float:
        nonlocal last, added
        now = clock()
        added += max(0.0, now - last) * chance.uniform(0, 0.3)
        last = now
        return now + added

    setattr(time, name, reading)


# A test that imports this file finds the clocks shifted already.
if SETTING in os.environ and time.monotonic.__module__ == "time":
    start(os.environ[SETTING])
