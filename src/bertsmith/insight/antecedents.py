"""Questions for an antecedent, and what answers them without a model.

The baselines of Clark et al. 2019, section 4.3: the nearest mention, the nearest one with the same head word,
and a sieve of rules (after Lee et al. 2011): the same words, then the same head word, then a mention that
agrees in number, gender and person, then any; within a sieve the nearest.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bertsmith.insight.mentions import Mention

Answer = Callable[[int, Sequence[Mention], Sequence[str]], int | None]
"""From the number of a mention, all mentions and the words to the number of its antecedent, if any."""

PERSONS = {
    "first": "i me my mine myself we us our ours ourselves",
    "second": "you your yours yourself yourselves",
}
PLURALS = "we us our ours ourselves they them their theirs themselves these those"
GENDERS = {
    "masculine": "he him his himself",
    "feminine": "she her hers herself",
    "neuter": "it its itself this that",
}


@dataclass(frozen=True, slots=True)
class Agreement:
    """What mentions must not differ in; an empty gender agrees with every one."""

    person: str
    plural: bool
    gender: str

    def allows(self, other: "Agreement") -> bool:
        """Whether both can speak of one entity."""
        genders = not self.gender or not other.gender or self.gender == other.gender
        return self.person == other.person and self.plural == other.plural and genders


def nearest(asked: int, mentions: Sequence[Mention], words: Sequence[str]) -> int | None:
    """The mention before."""
    del mentions, words
    return asked - 1 if asked else None


def same_head(asked: int, mentions: Sequence[Mention], words: Sequence[str]) -> int | None:
    """The nearest earlier mention with the same head word."""
    head = words[mentions[asked].head].lower()
    return _last(asked, lambda number: words[mentions[number].head].lower() == head)


def sieve(asked: int, mentions: Sequence[Mention], words: Sequence[str]) -> int | None:
    """The nearest earlier mention that passes the strictest sieve that any passes."""

    def text(number: int) -> list[str]:
        return [word.lower() for word in words[mentions[number].start : mentions[number].end]]

    agreement = agreement_of(mentions[asked], words)
    found = _last(asked, lambda number: text(number) == text(asked))
    if found is None:
        found = same_head(asked, mentions, words)
    if found is None:
        found = _last(asked, lambda number: agreement.allows(agreement_of(mentions[number], words)))
    return nearest(asked, mentions, words) if found is None else found


def agreement_of(mention: Mention, words: Sequence[str]) -> Agreement:
    """Person, number and gender, by the forms of pronouns; of nouns, number alone is known."""
    word = words[mention.head].lower()
    if mention.kind != "pronoun":
        return Agreement("third", mention.plural, "")
    person = next((name for name, forms in PERSONS.items() if word in forms.split()), "third")
    gender = next((name for name, forms in GENDERS.items() if word in forms.split()), "")
    return Agreement(person, word in PLURALS.split(), gender)


def _last(asked: int, holds: Callable[[int], bool]) -> int | None:
    return next((number for number in reversed(range(asked)) if holds(number)), None)


BASELINES: dict[str, Answer] = {"nearest mention": nearest, "same head word": same_head, "rules": sieve}
