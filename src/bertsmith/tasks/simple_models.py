"""Simple baselines without a network that a trained model should beat: TF-IDF and a dictionary of spans."""

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from bertsmith.core.errors import UserError
from bertsmith.core.seeds import stream
from bertsmith.tasks.example_types import TaggedExample, TextExample
from bertsmith.tasks.predictions import Numbers
from bertsmith.tasks.tag_spans import scheme_of, spans_of

MAX_ROWS = 20_000
"""Maximum training rows of TF-IDF and logistic regression: with many classes, more take minutes."""
MAX_ITERATIONS = 1000
INVERSE_PENALTY = 10.0
"""scikit-learn's C; on six sets of 1,000 rows its default of 1 is 1.4 points better to 16.7 worse."""
MAX_SPAN = 20
"""Maximum words in a span of the dictionary, so that time is linear in the text."""
UNTAGGED = "O"


def tfidf_probabilities(
    train: Sequence[TextExample], examples: Sequence[TextExample], labels: tuple[str, ...]
) -> Numbers:
    """Return the probabilities [M, C] of TF-IDF with logistic regression; the texts of a pair are joined."""
    try:
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.linear_model import LogisticRegression
    except ModuleNotFoundError as error:
        raise UserError("needs scikit-learn", remedy="pip install 'bertsmith[sklearn]'") from error
    known = [example for example in train if example.label is not None]
    if len(known) > MAX_ROWS:
        known = [known[index] for index in stream(0, "simple model").permutation(len(known))[:MAX_ROWS]]
    scores_MC = np.zeros((len(examples), len(labels)), np.float32)
    try:
        words = TfidfVectorizer()
        model = LogisticRegression(C=INVERSE_PENALTY, max_iter=MAX_ITERATIONS)
        model.fit(
            words.fit_transform([" ".join(each.parts) for each in known]), [each.label for each in known]
        )
    except ValueError as error:  # all texts are empty, or there is a single class
        raise UserError(f"cannot be fitted ({error})") from error
    columns = [labels.index(label) for label in model.classes_]
    scores_MC[:, columns] = model.predict_proba(words.transform([" ".join(each.parts) for each in examples]))
    return scores_MC


def dictionary_tags(
    train: Sequence[TaggedExample], examples: Sequence[TaggedExample], labels: tuple[str, ...]
) -> list[list[str]]:
    """Return the tags of each sentence by the spans of the training set: the longest one wins.

    Tags that are not spans come from a dictionary of words, each with its most frequent tag.
    """
    tagged = [(example.words, example.tags) for example in train if example.tags is not None]
    scheme = scheme_of(tags for _, tags in tagged)
    types: defaultdict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
    for words, tags in tagged:
        for span in spans_of(tags, scheme):
            types[tuple(words[span.first : span.end])][span.type] += 1
    if not types or UNTAGGED not in labels:
        return _word_tags(tagged, examples)
    longest = min(max(map(len, types)), MAX_SPAN)
    found = []
    for example in examples:
        guesses, first = [UNTAGGED] * len(example.words), 0
        while first < len(guesses):
            ends = range(min(first + longest, len(guesses)), first, -1)
            end = next((end for end in ends if example.words[first:end] in types), None)
            if end is not None:
                ((kind, _),) = types[example.words[first:end]].most_common(1)
                guesses[first:end] = _span_tags(end - first, kind, labels)
            first = end or first + 1
        found.append(guesses)
    return found


def _span_tags(length: int, kind: str, labels: tuple[str, ...]) -> list[str]:
    """Return the tags of a span in the first scheme that the labels follow: BIOES, IOB2 or IOB1."""
    ending = f"-{kind}" if kind else ""
    letters = ["S"] if length == 1 else ["B", *"I" * (length - 2), "E"]
    for spelled in (letters, ["B", *"I" * (length - 1)], ["I"] * length):
        tags = [f"{letter}{ending}" for letter in spelled]
        if set(tags) <= set(labels):
            return tags
    return [UNTAGGED] * length


def _word_tags(
    tagged: Sequence[tuple[Sequence[str], Sequence[str]]], examples: Sequence[TaggedExample]
) -> list[list[str]]:
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for words, tags in tagged:
        for word, tag in zip(words, tags, strict=True):
            counts[word][tag] += 1
    (usual, _), *_ = sum(counts.values(), Counter[str]()).most_common(1)
    usual_of = {word: each.most_common(1)[0][0] for word, each in counts.items()}
    return [[usual_of.get(word, usual) for word in example.words] for example in examples]
