"""Predictions of task heads for texts: classes, numbers, tags, answers, choices.

Shapes: M texts, C classes, P tagged words.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bertsmith.core.errors import Remedy, UserError
from bertsmith.core.steps import Steps, finished
from bertsmith.inference.engine import WINDOW_TEXTS, Engine
from bertsmith.inference.fill_mask import check_count
from bertsmith.inference.finetuned_folder import FinetunedTask
from bertsmith.inference.outputs import Choice, Classification, Entity, TaggedWord
from bertsmith.inference.task_model import TaskModel, task_model_of
from bertsmith.inference.text_reader import TextInput, TokenizedText, as_list, as_pairs
from bertsmith.inference.text_words import joined_words, words_of_texts
from bertsmith.model.folder.model_folder import Model, head_outputs
from bertsmith.recipe.finetuning_schema import TextSection
from bertsmith.tasks.answers import QuestionAnswer
from bertsmith.tasks.example_types import (
    ChoiceExample,
    Question,
    QuestionTokens,
    TaggedExample,
    TextExample,
)
from bertsmith.tasks.kinds.kind import AnyKind
from bertsmith.tasks.kinds.registry import kinds_of_head
from bertsmith.tasks.kinds.text_kind import TextKind
from bertsmith.tasks.predictions import ExampleT, PredictedSplit
from bertsmith.tasks.tag_spans import scheme_of, spans_of
from bertsmith.tasks.task_config import TaskConfig

Sentence = str | Sequence[str]
"""A sentence as written, or its words."""

NAMED_TAGS = 5


@dataclass(frozen=True, slots=True)
class Predictor:
    """A task head, and the engine that reads texts for it.

    A server computes in steps: it can serve others between two batches of a long text.
    """

    model: TaskModel
    engine: Engine
    finetuned: bool
    """True if it has a task.json, which decides the form of texts and the rule for long ones."""

    @property
    def config(self) -> TaskConfig:
        """The labels, the rule for long texts and the rest of task.json."""
        return self.model.config

    def classify_in_steps(
        self, texts: Iterable[TextInput], *, truncate: bool = False
    ) -> Steps[list[Classification]]:
        """Return the class or classes of each text."""
        if self.config.kind.ability != "classify":
            raise UserError("this model gives a text a number, not a class", remedy="call score")
        labels, kind = self.config.labels, self.config.kind
        assert isinstance(kind, TextKind)
        predicted = yield from self._predict_texts(texts, truncate)
        if predicted is None:
            return []
        found = []
        targets = kind.predicted_targets(predicted.encoded, predicted.predictions)
        for row_C, target in zip(predicted.predictions.scores, targets, strict=True):
            probabilities = dict(zip(labels, map(float, row_C), strict=True))
            chosen = kind.labels_of(labels, target)
            label = labels[int(row_C.argmax())] if kind.many_labels else chosen[0]
            found.append(
                Classification(
                    label=label,
                    probability=probabilities[label],
                    probabilities=probabilities,
                    labels=chosen,
                    is_several=kind.many_labels,
                )
            )
        return found

    def score_in_steps(self, texts: Iterable[TextInput], *, truncate: bool = False) -> Steps[list[float]]:
        """Return the number of each text."""
        if self.config.kind.ability != "score":
            raise UserError("this model gives a text a class, not a number", remedy="call classify")
        predicted = yield from self._predict_texts(texts, truncate)
        return [] if predicted is None else [float(number) for number in predicted.predictions.scores]

    def tag_in_steps(self, sentences: Iterable[Sentence | TokenizedText]) -> Steps[list[list[TaggedWord]]]:
        """Return the tag of each word of each sentence; long sentences are read in windows."""
        several = as_list(sentences)
        written = [_written(sentence, number) for number, sentence in enumerate(several)]
        words = [
            joined_words(sentence) if isinstance(sentence, list | tuple) else cut
            for sentence, cut in zip(several, words_of_texts(self._tokenized(written)), strict=True)
        ]
        examples = [
            TaggedExample(str(number), tuple(word.text for word in each), None, number, "")
            for number, each in enumerate(words)
        ]
        if not examples:
            return []
        predicted = yield from self._predict_in_steps(examples)
        encoded, scores_PC = predicted.encoded, predicted.predictions.scores
        tags_P = self.config.kind.predicted_targets(encoded, predicted.predictions)
        tagged: list[list[TaggedWord]] = [[] for _ in words]
        # Windows and batches arrive in any order: sort them by sentence and word.
        for row in np.lexsort((encoded.words_P2[:, 1], encoded.words_P2[:, 0])).tolist():
            sentence, number = encoded.words_P2[row].tolist()
            word, tag = words[sentence][number], int(tags_P[row])
            label, probability = self.config.labels[tag], float(scores_PC[row, tag])
            tagged[sentence].append(TaggedWord(word.text, label, word.start, word.end, probability))
        return tagged

    def entities(self, texts: Iterable[str]) -> list[list[Entity]]:
        """Return the entities that the tags of each text's words mark."""
        scheme = scheme_of([self.config.labels])
        if not any(spans_of([label], scheme) for label in self.config.labels):
            named = ", ".join(self.config.labels[:NAMED_TAGS])
            what = f"the tags of this model mark no stretches of words (they are {named} ...)"
            raise UserError(what, remedy="call tag")
        several = as_list(texts)
        for number, text in enumerate(several):
            if not isinstance(text, str):
                what = f"is {type(text).__name__}, not a text"
                raise UserError(what, index=number, remedy="a text with entities is a str")
        tagged = zip(several, finished(self.tag_in_steps(several)), strict=True)
        return [self.entities_of(text, words) for text, words in tagged]

    def entities_of(self, text: str, words: Sequence[TaggedWord]) -> list[Entity]:
        """Return the entities that the tags of a text's words mark."""
        entities = []
        for span in spans_of([word.tag for word in words], scheme_of([self.config.labels])):
            of_span = words[span.first : span.end]
            start, end = of_span[0].start, of_span[-1].end
            probability = sum(word.probability for word in of_span) / len(of_span)
            entities.append(Entity(span.type, text[start:end], start, end, probability))
        return entities

    def answers_in_steps(
        self, questions: Iterable[tuple[str, str] | TokenizedText], *, best: int
    ) -> Steps[list[list[QuestionAnswer]]]:
        """Return the `best` answers to each question from its passage, the best first."""
        check_count("best", best)
        pairs = as_pairs(questions)
        for number, pair in enumerate(pairs):
            texts = pair.text if isinstance(pair, TokenizedText) else pair
            for name, text in zip(("question", "passage"), texts, strict=True):
                if isinstance(text, str) and not text.strip():
                    raise UserError("is empty", field=name, index=number, remedy="write some words")
        examples = [_question(each, number) for number, each in enumerate(self._tokenized(pairs))]
        if not examples:
            return []
        predicted = yield from self._predict_in_steps(examples)
        return [[answer, *_others(answer)][:best] for answer in predicted.predictions.answers]

    def choose_each(
        self, questions: Iterable[Iterable[tuple[str, str] | TokenizedText]], *, truncate: bool
    ) -> list[Choice]:
        """Return the most probable pair of each question."""
        examples = []
        for number, options in enumerate(questions):
            pairs = as_pairs(options)
            if len(pairs) < 2:
                raise UserError(f"cannot choose among {len(pairs)} pairs", remedy="give at least two pairs")
            read = list(self._tokenized(pairs, truncate=truncate))  # reports any text that cannot be read
            texts = tuple(each.text for each in read if isinstance(each.text, tuple))
            pieces = tuple(np.array(part, np.int32) for each in read for part in each.pieces())
            examples.append(ChoiceExample(str(number), texts, None, "", pieces))
        if not examples:
            return []
        predicted = self._predict(examples)
        chosen = self.config.kind.predicted_targets(predicted.encoded, predicted.predictions)
        bounds = predicted.encoded.items_M1[1:-1]
        probabilities = np.split(predicted.predictions.scores, bounds)
        return [
            Choice(int(index), tuple(map(float, each)))
            for index, each in zip(chosen, probabilities, strict=True)
        ]

    def _predict_texts(
        self, texts: Iterable[TextInput], truncate: bool
    ) -> Steps[PredictedSplit[TextExample] | None]:
        """Return the predictions for texts: probabilities [M, C] or numbers [M]; None without texts."""
        examples: list[TextExample] = []
        for number, each in enumerate(self._tokenized(as_list(texts), truncate=truncate)):
            # With their tokens, so that they are tokenized only once; arrays are smaller than lists.
            pieces = tuple(np.array(part, np.int32) for part in each.pieces())
            examples.append(TextExample(str(number), each.text, None, "", pieces))
        if self.finetuned:
            takes_pairs = self.config.pairs
            forms = ("is one text", "pairs") if takes_pairs else ("is a pair", "single texts")
            for index, example in enumerate(examples):
                if isinstance(example.texts, str) == takes_pairs:
                    what = f"{forms[0]}, but this model was fine-tuned on {forms[1]}"
                    remedy = Remedy.PASS_PAIR if takes_pairs else Remedy.PASS_TEXT
                    raise UserError(what, index=index, remedy=remedy)
        return (yield from self._predict_in_steps(examples)) if examples else None

    def _tokenized(self, texts: Sequence[TextInput], *, truncate: bool = True) -> Iterator[TokenizedText]:
        """Yield texts with their tokens; reject empty and overlong ones, and other types."""
        reader = self.engine.reader
        for first in range(0, len(texts), WINDOW_TEXTS):
            tokenized = reader.tokenize(texts[first : first + WINDOW_TEXTS], first=first)
            reader.check(tokenized, truncate=truncate or self.finetuned, first=first)
            yield from tokenized

    def _predict(self, examples: Sequence[ExampleT]) -> PredictedSplit[ExampleT]:
        encoded = self.model.encode(examples)
        return PredictedSplit(examples, encoded, self.model.predict(examples, encoded))

    def _predict_in_steps(self, examples: Sequence[ExampleT]) -> Steps[PredictedSplit[ExampleT]]:
        encoded = self.model.encode(examples)
        return PredictedSplit(examples, encoded, (yield from self.model.predict_in_steps(examples, encoded)))


def ability_of_head(model: Model, head: str, finetuned: FinetunedTask | None) -> str:
    """Return the ability of a task head, as fine-tuned or by default; "" if it predicts nothing."""
    if finetuned is not None and finetuned.config.head_name == head:
        return finetuned.config.kind.ability
    try:
        return default_config(model, head).kind.ability
    except UserError:  # several numbers for a text
        return ""


def build_predictor(model: Model, engine: Engine, head: str, finetuned: FinetunedTask | None) -> Predictor:
    """Return the predictor of a head, as fine-tuned or as heads of its kind are usually used."""
    own = finetuned if finetuned is not None and finetuned.config.head_name == head else None
    task = own or FinetunedTask(default_config(model, head))
    # A task.json that was edited may belong to another model.
    config, positions, mix = task.config, model.network.config.positions, task.mix.get("output.weight")
    outputs = head_outputs(model.network)[config.head_name] if mix is None else len(mix)
    what = ""
    if config.outputs != outputs:
        what = f"names {config.outputs} outputs, but the head has {outputs}"
    elif config.text.longest > positions:
        what = f"has text.longest = {config.text.longest}, but the model takes {positions} tokens"
    if what:
        raise UserError(what, where="task.json", remedy="restore the file that the run wrote")
    return Predictor(task_model_of(engine.network, task, engine), engine, own is not None)


def default_config(model: Model, head: str) -> TaskConfig:
    """Return the config of a head without a task.json: config.json's labels, windows of run_squad.py."""
    outputs, positions = head_outputs(model.network)[head], model.network.config.positions
    kind = _kind(model, head, outputs)
    longest = kind.usual_length(positions)
    usual = TextSection()
    text = TextSection(longest=longest, longest_question=min(usual.longest_question, longest // 2))
    labels = model.labels() or tuple(f"LABEL_{number}" for number in range(outputs))
    named = labels if kind.min_labels else ()
    return TaskConfig(task=head, kind=kind, metrics=(), labels=named, text=text)


def _kind(model: Model, head: str, outputs: int) -> AnyKind:
    """Return the kind of a head without a task.json: by name, number of outputs and `problem_type`."""
    usual, *others = kinds_of_head(head)
    if not others:
        return usual
    numeric = next((kind for kind in others if kind.numeric), usual)
    if outputs == 1:
        return numeric
    problem_type = str(model.extras.get("problem_type"))
    kind = next((kind for kind in others if kind.problem_type == problem_type), usual)
    if kind is numeric:
        what = f"this model gives a text {outputs} numbers"
        raise UserError(what, remedy="use one that gives a single number")
    return kind


def _others(answer: QuestionAnswer) -> list[QuestionAnswer]:
    """Return the remaining candidates as answers."""
    return [
        replace(
            answer,
            text=other.text,
            start=other.start,
            end=other.start + len(other.text),
            score=other.start_score + other.end_score,
            probability=other.probability,
        )
        for other in answer.nbest
        if other.text != answer.text
    ]


def _question(tokenized: TokenizedText, number: int) -> Question:
    """Return a question about its passage, with their tokens."""
    encoded, (asked, passage) = tokenized.encoded, tokenized.pieces()
    pairs = zip(encoded.offsets, encoded.sequence, strict=True)
    offsets_X2 = np.array([span for span, own in pairs if own == 1], np.int64).reshape(-1, 2)
    tokens = QuestionTokens(np.array(asked, np.int32), np.array(passage, np.int32), offsets_X2)
    assert isinstance(tokenized.text, tuple)
    question, text = tokenized.text
    return Question(str(number), question, text, (), labelled=False, article="", where="", tokens=tokens)


def _written(sentence: object, index: int) -> str | TokenizedText:
    """Return a sentence as one string; separate words are joined by spaces."""
    if isinstance(sentence, str | TokenizedText):
        return sentence
    if not isinstance(sentence, list | tuple):
        what = f"is {type(sentence).__name__}, not a sentence or its words"
        raise UserError(what, index=index, remedy="a sentence is a str, or a list of words")
    for number, word in enumerate(sentence):
        if not isinstance(word, str) or not word.strip():
            what = f"word {number} is {'empty' if isinstance(word, str) else type(word).__name__}"
            raise UserError(what, index=index, remedy="a word is a str that is not empty")
    return " ".join(sentence)
