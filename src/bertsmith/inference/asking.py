"""A task head asked about texts: classes, numbers, tags, answers, choices.

Shapes: M texts, C classes, P tagged words.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bertsmith.ground.errors import UserError
from bertsmith.inference.engine import WINDOW_TEXTS, Engine, listed
from bertsmith.inference.pairs import listed_pairs
from bertsmith.inference.reading import Text
from bertsmith.inference.replies import Choice, Classification, Entity, TaggedWord
from bertsmith.inference.task_model import TaskModel, task_model_of
from bertsmith.inference.tuned import Tuned
from bertsmith.inference.words import Word, joined_words, words_of_texts
from bertsmith.model.weights import Model, head_outputs
from bertsmith.recipe.finetuning import TextSection
from bertsmith.tasks.answers import QuestionAnswer
from bertsmith.tasks.examples import ChoiceExample, Example, Kind, Question, TaggedExample, TextExample
from bertsmith.tasks.outcome import Outcome
from bertsmith.tasks.tag_schemes import scheme_of, spans_of
from bertsmith.tasks.task_file import TaskNote

Sentence = str | Sequence[str]
"""A sentence as it is written, or its words."""
Numbers = NDArray[np.float32]

SQUAD_LONGEST = 384
"""Longest window of a question and its passage in run_squad.py."""
NAMED_TAGS = 5
CLASS_KINDS: dict[str, Kind] = {
    "single_label_classification": "classify",
    "multi_label_classification": "multilabel",
    "regression": "regress",
}
"""What `problem_type` of a config.json means."""
OTHER_KINDS: dict[str, Kind] = {"tag": "tag", "span": "span", "choice": "choice"}
"""Heads that are asked in one way only."""

PAIR_WANTED = "pass a tuple of two texts"
TEXT_WANTED = "pass one str"


@dataclass(frozen=True, slots=True)
class Asker:
    """A task head with what it takes to ask it."""

    model: TaskModel
    engine: Engine
    tuned: bool
    """Whether task.json says how; then its rule for long texts holds, and texts have the form it says."""

    @property
    def note(self) -> TaskNote:
        """How the head is asked."""
        return self.model.note

    def classify(self, texts: Iterable[Text], *, truncate: bool) -> list[Classification]:
        """The class of each text, or its classes."""
        if self.note.kind == "regress":
            raise UserError("this model gives a text a number, not a class", remedy="call score")
        return [self._classification(row_C) for row_C in self._text_scores(texts, truncate)]

    def score(self, texts: Iterable[Text], *, truncate: bool) -> list[float]:
        """The number of each text."""
        if self.note.kind != "regress":
            raise UserError("this model gives a text a class, not a number", remedy="call classify")
        return [float(number) for number in self._text_scores(texts, truncate)]

    def tag(self, sentences: Iterable[Sentence]) -> list[list[TaggedWord]]:
        """The tag of each word of each sentence, long sentences being read in windows."""
        words = self._words(listed(sentences))
        examples = [
            TaggedExample(str(number), tuple(word.text for word in each), None, number, f"text {number}")
            for number, each in enumerate(words)
        ]
        if not examples:
            return []
        encoded = self.model.encode(examples)
        scores_PC = self.model.outcome(examples, encoded).scores
        tagged: list[list[TaggedWord]] = [[] for _ in words]
        for place in np.lexsort((encoded.words_P2[:, 1], encoded.words_P2[:, 0])).tolist():
            sentence, number = encoded.words_P2[place].tolist()
            tagged[sentence].append(self._tagged(words[sentence][number], scores_PC[place]))
        return tagged

    def entities(self, texts: Iterable[str]) -> list[list[Entity]]:
        """The stretches of each text that its words' tags mark."""
        scheme = scheme_of([self.note.labels])
        if not any(spans_of([label], scheme) for label in self.note.labels):
            named = ", ".join(self.note.labels[:NAMED_TAGS])
            what = f"the tags of this model mark no stretches of words (they are {named} ...)"
            raise UserError(what, remedy="call tag")
        several = listed(texts)
        for number, text in enumerate(several):
            if not isinstance(text, str):
                what = f"is {type(text).__name__}, not a text"
                raise UserError(what, where=f"text {number}", remedy="a text with entities is a str")
        tagged = zip(several, self.tag(several), strict=True)
        return [self.entities_of(text, words) for text, words in tagged]

    def entities_of(self, text: str, words: Sequence[TaggedWord]) -> list[Entity]:
        """The stretches that the tags of a text's words mark."""
        spans = spans_of([word.tag for word in words], scheme_of([self.note.labels]))
        return [_entity(text, span.type, words[span.first : span.end]) for span in spans]

    def answers(self, questions: Iterable[tuple[str, str]]) -> list[list[QuestionAnswer]]:
        """To each question about its passage the answer, then what else was considered, best first."""
        pairs = listed_pairs(questions)
        for number, pair in enumerate(pairs):
            for name, text in zip(("question", "passage"), pair, strict=True):
                if isinstance(text, str) and not text.strip():
                    raise UserError("is empty", where=f"{name} {number}", remedy="give it some words")
        self._refuse_unreadable(pairs)
        examples = [
            Question(str(number), *pair, answers=(), labelled=False, article="", where=f"question {number}")
            for number, pair in enumerate(pairs)
        ]
        return [[answer, *_others(answer)] for answer in self._outcome(examples).answers] if examples else []

    def choose(self, options: Iterable[tuple[str, str]], *, truncate: bool) -> Choice:
        """The most probable of these pairs."""
        pairs = listed_pairs(options)
        if len(pairs) < 2:
            raise UserError(f"a choice among {len(pairs)} is none", remedy="give at least two pairs")
        self._refuse_unreadable(pairs, truncate=truncate)
        shares = self._outcome([ChoiceExample("0", tuple(pairs), None, "the options")]).scores
        return Choice(int(shares.argmax()), tuple(float(share) for share in shares))

    def _classification(self, probabilities_C: Numbers) -> Classification:
        shares = [float(share) for share in probabilities_C]
        best = int(probabilities_C.argmax())
        labels = self.note.labels
        likely = tuple(label for label, share in zip(labels, shares, strict=True) if share >= 0.5)
        is_several = self.note.kind == "multilabel"
        return Classification(
            label=labels[best],
            probability=shares[best],
            probabilities=dict(zip(labels, shares, strict=True)),
            labels=likely if is_several else (labels[best],),
            is_several=is_several,
        )

    def _tagged(self, word: Word, probabilities_C: Numbers) -> TaggedWord:
        best = int(probabilities_C.argmax())
        return TaggedWord(
            word.text, self.note.labels[best], word.start, word.end, float(probabilities_C[best])
        )

    def _text_scores(self, texts: Iterable[Text], truncate: bool) -> Numbers | list[Numbers]:
        """Probabilities [M, C], or numbers [M]."""
        several = listed(texts)
        self._refuse_unreadable(several, truncate=truncate)
        examples = [
            TextExample(str(number), text, None, f"text {number}") for number, text in enumerate(several)
        ]
        if self.tuned:
            self._refuse_other_form(examples)
        return self._outcome(examples).scores if examples else []

    def _words(self, sentences: Sequence[Sentence]) -> list[list[Word]]:
        written = [_written(sentence, where=f"text {number}") for number, sentence in enumerate(sentences)]
        self._refuse_unreadable(written)
        cut = words_of_texts(written, self.engine.tokenizer)
        return [
            each if isinstance(sentence, str) else joined_words(sentence)
            for sentence, each in zip(sentences, cut, strict=True)
        ]

    def _refuse_unreadable(self, texts: Sequence[Text], *, truncate: bool = True) -> None:
        """Stop at what is no text, at empty ones, and at long ones where nothing says what to do."""
        for first in range(0, len(texts), WINDOW_TEXTS):
            some = texts[first : first + WINDOW_TEXTS]
            self.engine.reader.encode(some, truncate=truncate or self.tuned, first=first)

    def _refuse_other_form(self, examples: Sequence[TextExample]) -> None:
        for example in examples:
            if isinstance(example.texts, str) == self.note.pairs:
                forms = ("is one text", "pairs") if self.note.pairs else ("is a pair", "single texts")
                what = f"{forms[0]}, but this model was fine-tuned on {forms[1]}"
                remedy = PAIR_WANTED if self.note.pairs else TEXT_WANTED
                raise UserError(what, where=example.where, remedy=remedy)

    def _outcome(self, examples: Sequence[Example]) -> Outcome:
        return self.model.outcome(examples, self.model.encode(examples))


def text_ability(model: Model, tuned: Tuned | None) -> set[str]:
    """Whether a head for texts gives classes or numbers; nothing where it cannot be asked."""
    if tuned is not None and tuned.note.head_name == "classify":
        return {"score" if tuned.note.kind == "regress" else "classify"}
    try:
        return {"score" if stranger_note(model, "classify").kind == "regress" else "classify"}
    except UserError:  # several numbers for a text
        return set()


def asker_of(model: Model, engine: Engine, head: str, tuned: Tuned | None) -> Asker:
    """The way to ask a head of a model: as its folder was trained, or as heads of its kind usually are."""
    own = tuned if tuned is not None and tuned.note.head_name == head else None
    asked = own or Tuned(stranger_note(model, head))
    _refuse_unfit(model, asked)
    return Asker(task_model_of(engine.network, asked, engine), engine, own is not None)


def stranger_note(model: Model, head: str) -> TaskNote:
    """How a head is asked where no task.json says it: labels by config.json, windows as in run_squad.py."""
    outputs, positions = head_outputs(model.network)[head], model.network.shape.positions
    kind = _kind(model, head, outputs)
    longest = min(SQUAD_LONGEST, positions) if kind == "span" else positions
    usual = TextSection()
    text = TextSection(longest=longest, longest_question=min(usual.longest_question, longest // 2))
    labels = model.labels() or tuple(f"LABEL_{number}" for number in range(outputs))
    named = labels if kind in ("classify", "multilabel", "tag") else ()
    return TaskNote(task=head, kind=kind, metrics=(), labels=named, text=text)


def _kind(model: Model, head: str, outputs: int) -> Kind:
    if head in OTHER_KINDS:
        return OTHER_KINDS[head]
    if outputs == 1:
        return "regress"
    kind = CLASS_KINDS.get(str(model.extras.get("problem_type")), "classify")
    if kind == "regress":
        what = f"this model gives a text {outputs} numbers"
        raise UserError(what, remedy="take one that gives a single number")
    return kind


def _refuse_unfit(model: Model, tuned: Tuned) -> None:
    """Stop where a task.json was changed so that it speaks of another model."""
    note, positions = tuned.note, model.network.shape.positions
    has_mix = "output.weight" in tuned.mix  # then no head of the network answers
    outputs = len(tuned.mix["output.weight"]) if has_mix else head_outputs(model.network)[note.head_name]
    if note.outputs != outputs:
        what = f"names {note.outputs} outputs, but the head has {outputs}"
    elif note.text.longest > positions:
        what = f"has text.longest = {note.text.longest}, but the model takes {positions} tokens"
    else:
        return
    raise UserError(what, where="task.json", remedy="put the file back that the run wrote")


def _entity(text: str, kind: str, words: Sequence[TaggedWord]) -> Entity:
    start, end = words[0].start, words[-1].end
    return Entity(kind, text[start:end], start, end, sum(word.probability for word in words) / len(words))


def _others(answer: QuestionAnswer) -> list[QuestionAnswer]:
    """What else was considered, as answers of their own."""
    return [
        replace(
            answer,
            text=guess.text,
            start=guess.start,
            end=guess.start + len(guess.text),
            score=guess.start_score + guess.end_score,
            probability=guess.probability,
        )
        for guess in answer.nbest
        if guess.text != answer.text
    ]


def _written(sentence: object, *, where: str) -> str:
    """A sentence as one string; words that are given apart are joined by spaces."""
    if isinstance(sentence, str):
        return sentence
    if not isinstance(sentence, list | tuple):
        what = f"is {type(sentence).__name__}, neither a sentence nor its words"
        raise UserError(what, where=where, remedy="a sentence is a str, or a list of words")
    for number, word in enumerate(sentence):
        if not isinstance(word, str) or not word.strip():
            what = f"word {number} is {'empty' if isinstance(word, str) else type(word).__name__}"
            raise UserError(what, where=where, remedy="a word is a str with something in it")
    return " ".join(sentence)
