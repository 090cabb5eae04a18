"""Stratified splits: choose the examples of one file to hold back for development and for a final test.

A pure function of ids and labels: neither the order of the file nor the seed of a run matters.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from bertsmith.core.errors import UserError
from bertsmith.core.seeds import key_of
from bertsmith.tasks.example_types import Example

MIN_ROWS_TO_SPLIT = 10
"""Minimum rows for a split: a smaller file is used for training as a whole."""
DEV, TEST = "dev", "test-part"
"""Names of the parts; the finished model is tested on the second."""


def held_back(
    examples: Sequence[Example], *, dev_fraction: float, test_fraction: float = 0.0
) -> dict[str, str]:
    """Return the split of each held-back example by its id, in exact fractions, class by class.

    As far as the fraction allows, each class with two or more examples has one held back. The last example
    of a class never is, so that the model sees every class.
    """
    if len(examples) < MIN_ROWS_TO_SPLIT:
        return {}
    left = Counter(label for each in examples for label in each.label_names)
    parts: dict[str, str] = {}
    for split, fraction in ((TEST, test_fraction), (DEV, dev_fraction)):
        rest = [each for each in examples if each.key not in parts]
        count = max(1, int(len(examples) * fraction + 0.5)) if fraction else 0
        strata = _strata(rest, split)
        quotas = _quotas({name: len(each) for name, each in strata.items()}, count)
        for name, of_stratum in strata.items():
            wanted = quotas[name]
            for example in of_stratum:
                if wanted and _spare(example, left):
                    parts[example.key], wanted = split, wanted - 1
    return parts


def held_back_fold(
    examples: Sequence[Example], fold: int, folds: int, *, test_fraction: float = 0.0
) -> dict[str, str]:
    """Hold back one of several folds for development, like `held_back`; each example is in one fold.

    The only example of a class is in no fold: it is always used for training.
    """
    if len(examples) < max(MIN_ROWS_TO_SPLIT, 2 * folds):
        what = f"{len(examples)} rows are too few for {folds} folds"
        raise UserError(what, key="folds", remedy="use fewer folds, or more rows")
    parts = held_back(examples, dev_fraction=0.0, test_fraction=test_fraction)
    rest = [each for each in examples if each.key not in parts]
    left = Counter(label for each in rest for label in each.label_names)
    # One count over all classes: the sizes of folds differ by at most one example, also within a class.
    ordered = [each for of_stratum in _strata(rest, DEV).values() for each in of_stratum]
    for index, example in enumerate(ordered):
        if index % folds == fold and _spare(example, left):
            parts[example.key] = DEV
    return parts


def _strata(examples: Sequence[Example], draw: str) -> dict[str, list[Example]]:
    """Return the examples by class, in the order of a hash of their ids; the rarest label counts."""
    counts = Counter(label for each in examples for label in each.label_names)
    strata: defaultdict[str, list[Example]] = defaultdict(list)
    for example in sorted(examples, key=lambda each: (key_of(0, draw, each.key), each.key)):
        strata[min(example.label_names, key=lambda label: (counts[label], label), default="")].append(example)
    return {name: strata[name] for name in sorted(strata)}


def _quotas(sizes: Mapping[str, int], count: int) -> dict[str, int]:
    """Return the number of examples to hold back in each class, as near to the fraction as possible."""
    whole = sum(sizes.values())
    exact = {name: count * size / whole for name, size in sizes.items()}
    quotas = {name: min(max(int(exact[name]), 1), size - 1) for name, size in sizes.items()}
    count = min(count, sum(size - 1 for size in sizes.values()))
    while sum(quotas.values()) < count:
        open_to = [name for name in quotas if quotas[name] < sizes[name] - 1]
        quotas[max(open_to, key=lambda name: exact[name] - quotas[name])] += 1
    while sum(quotas.values()) > count:
        quotas[
            min((name for name in quotas if quotas[name]), key=lambda name: exact[name] - quotas[name])
        ] -= 1
    return quotas


def _spare(example: Example, left: Counter[str]) -> bool:
    """Return True if training can do without an example, and then count it as held back."""
    if any(left[label] <= 1 for label in example.label_names):
        return False
    left.subtract(example.label_names)
    return True
