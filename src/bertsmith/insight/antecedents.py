"""Baselines that find the antecedent of a mention without a model.

From Clark et al. 2019, section 4.3: the nearest mention, the nearest one with the same head word, and a sieve
of rules (after Lee et al. 2011). The sieve tries the same words, the same head word, a mention that agrees in
number, gender and person, and any mention, in this order. Each rule prefers the nearest mention.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bertsmith.insight.mentions import Mention

Answer = Callable[[int, Sequence[Mention], Sequence[str]], int | None]
"""Function from the index of a mention, all mentions and the words to the index of its antecedent, if any."""

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
    """Person, number and gender of a mention; an empty gender agrees with any other."""

    person: str
    plural: bool
    gender: str

    def allows(self, other: "Agreement") -> bool:
        """True if the two mentions can refer to one entity."""
        genders = not self.gender or not other.gender or self.gender == other.gender
        return self.person == other.person and self.plural == other.plural and genders


def nearest(asked: int, mentions: Sequence[Mention], words: Sequence[str]) -> int | None:
    """Return the previous mention."""
    del mentions, words
    return asked - 1 if asked else None


def same_head(asked: int, mentions: Sequence[Mention], words: Sequence[str]) -> int | None:
    """Return the nearest earlier mention with the same head word."""
    head = words[mentions[asked].head].lower()
    return _last(asked, lambda number: words[mentions[number].head].lower() == head)


def sieve(asked: int, mentions: Sequence[Mention], words: Sequence[str]) -> int | None:
    """Return the nearest earlier mention that passes the strictest rule passed by any mention."""

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
    """Return person, number and gender by the forms of pronouns; a noun has a known number and no gender."""
    word = words[mention.head].lower()
    if mention.kind != "pronoun":
        return Agreement("third", mention.plural, "")
    person = next((name for name, forms in PERSONS.items() if word in forms.split()), "third")
    gender = next((name for name, forms in GENDERS.items() if word in forms.split()), "")
    return Agreement(person, word in PLURALS.split(), gender)


def _last(asked: int, holds: Callable[[int], bool]) -> int | None:
    return next((number for number in reversed(range(asked)) if holds(number)), None)


BASELINES: dict[str, Answer] = {"nearest mention": nearest, "same head word": same_head, "rules": sieve}
