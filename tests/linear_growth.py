"""The doubling test: a cost in CPU time that grows with a size and no faster."""

from collections.abc import Awaitable, Callable

MAX_GROWTH = 2.6
"""Of the CPU time when a request is twice as large: 2 and some noise; a quadratic step has 4."""
FLOOR = 0.005
"""Seconds of CPU time; shorter ones are mostly constant costs."""
TRIES = 8
"""Times that two sizes are measured in turn: other work on the same cores makes CPU time uneven."""
TRIES_SECONDS = 4.0
"""Seconds for all tries of one size."""
IN_A_ROW = 2
"""Consecutive doublings that must be too slow: outgrowing a cache slows one, a quadratic step slows all."""


async def slow_growth(seconds: Callable[[int], Awaitable[float]], sizes: list[int]) -> str:
    """Return the costs of doubled sizes if they grow faster than the sizes, else nothing."""
    costs, row = [await seconds(sizes[0])], 0
    for size in sizes[1:]:
        before, now = costs[-1], await seconds(size)
        for _ in range(min(TRIES, max(4, int(TRIES_SECONDS / now)))):
            if now <= MAX_GROWTH * max(before, FLOOR):
                row = 0
                break
            # Noise only adds to a cost: the least of several is nearest to it.
            before, now = min(before, await seconds(size // 2)), min(now, await seconds(size))
        else:
            row += 1
        costs.append(now)
        if row == IN_A_ROW:
            return f"{[round(1000 * each, 1) for each in costs]} ms"
    return ""
