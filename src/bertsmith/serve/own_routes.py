"""Our own routes: what a model can say of texts, and a look inside it."""

import re
from collections.abc import Sequence

import numpy as np
from fastapi import APIRouter

from bertsmith.inference.facts import class_facts
from bertsmith.inference.similarity import cosines
from bertsmith.serve.batching import Kind
from bertsmith.serve.fields import TEXTS, Fields, each_of, one, two
from bertsmith.serve.models import ServedModel
from bertsmith.serve.refusals import Refusal
from bertsmith.serve.service import Answered, Question, Service
from bertsmith.serve.shapes import (
    AnswerAsk,
    AnswerReply,
    AttentionReply,
    ClassifyAsk,
    ClassifyReply,
    CompareAsk,
    CompareReply,
    FillAsk,
    FillReply,
    LookAsk,
    NextAsk,
    NextReply,
    PointReply,
    SensesAsk,
    SensesReply,
    TagAsk,
    TagReply,
    TextOrPair,
    TokenReply,
    TokensAsk,
    TokensReply,
)

MOST_SHOWN_TOKENS = 64
"""Attention grows with the square of the length, times layers, times heads."""
MOST_OCCURRENCES = 64
"""Of a word: all are compared with each other, and a map of more is a cloud."""
WEIGHT_DIGITS = 4


def own_routes(service: Service) -> APIRouter:
    """Routes that ask the models."""
    router = APIRouter()

    @router.post("/fill")
    async def fill(ask: FillAsk) -> FillReply:
        """The most probable tokens for each mask of a text."""
        texts = [ask.text]
        question = Question(Kind("fill", (ask.top,)), texts, texts, ask.model, fields=one("text"))
        found = await service.ask(question)
        return FillReply(model=found.model, masks=found.answers[0])

    @router.post("/next")
    async def next_sentence(ask: NextAsk) -> NextReply:
        """Whether the second text follows the first."""
        pairs = [(ask.first, ask.second)]
        fields = two("first", "second")
        found = await service.ask(Question(Kind("next"), pairs, pairs, ask.model, fields=fields))
        (answer,) = found.answers
        return NextReply(model=found.model, follows=answer.follows, probability=answer.probability)

    @router.post("/classify")
    async def classify(ask: ClassifyAsk) -> ClassifyReply:
        """The class of each text, its classes, or its number, by the kind of model."""
        found = await classified(service, [as_text(each) for each in ask.texts], model=ask.model)
        results = [class_facts(each) for each in found.answers]
        return ClassifyReply.model_validate({"model": found.model, "results": results})

    @router.post("/tag")
    async def tag(ask: TagAsk) -> TagReply:
        """The tag of each word, and the stretches that tags mark, such as names."""
        found = await service.ask(Question(Kind("tag"), ask.texts, ask.texts, ask.model))
        return TagReply(model=found.model, results=found.answers)

    @router.post("/answer")
    async def answer(ask: AnswerAsk) -> AnswerReply:
        """What the passage answers, to the letter; a long passage is read in windows."""
        pairs = [(ask.question, ask.passage)]
        fields = two("question", "passage")
        found = await service.ask(
            Question(Kind("answer", (ask.best,)), pairs, pairs, ask.model, fields=fields)
        )
        return AnswerReply(model=found.model, **found.answers[0])

    @router.post("/compare")
    async def compare(ask: CompareAsk) -> CompareReply:
        """How alike texts are, each with each."""
        found = await service.ask(Question(Kind("embed", (False,)), ask.texts, ask.texts, ask.model))
        return CompareReply(model=found.model, similarity=cosines(found.answers).tolist())

    return router


def look_routes(service: Service) -> APIRouter:
    """Routes that show the inside of a model."""
    router = APIRouter(prefix="/look")

    @router.post("/tokens")
    async def look_at_tokens(ask: TokensAsk) -> TokensReply:
        """What the model sees of a text or pair, and a random masking of it."""
        found = await service.ask(_look(Kind("look/tokens", (ask.seed,)), ask))
        tokens = [TokenReply.model_validate(each, from_attributes=True) for each in found.answers[0].tokens]
        return TokensReply(model=found.model, tokens=tokens)

    @router.post("/attention")
    async def look_at_attention(ask: LookAsk) -> AttentionReply:
        """What each token attends to, in every layer and head."""
        found = await service.ask(_look(Kind("look/attention"), ask, most_tokens=MOST_SHOWN_TOKENS))
        seen = found.answers[0]
        weights = np.asarray(seen.weights, dtype=np.float64).round(WEIGHT_DIGITS)
        shape = {"layers": weights.shape[0], "heads": weights.shape[1]}
        return AttentionReply(model=found.model, tokens=list(seen.tokens), weights=weights.tolist(), **shape)

    @router.post("/senses")
    async def look_at_senses(ask: SensesAsk) -> SensesReply:
        """Where the vectors of a word's occurrences lie, and how alike they are."""
        refuse_many_occurrences(ask)
        inputs = [(ask.word, ask.sentences)]
        fields = each_of("sentences")
        found = await service.ask(
            Question(Kind("look/senses"), inputs, ask.sentences, ask.model, fields=fields)
        )
        seen = found.answers[0]
        points = [PointReply.model_validate(each, from_attributes=True) for each in seen.points]
        similarity = np.asarray(seen.similarity, dtype=np.float64).tolist()
        return SensesReply(model=found.model, points=points, similarity=similarity)

    return router


async def classified(
    service: Service,
    texts: Sequence[str | tuple[str, str]],
    *,
    model: str | None,
    cut_long: bool = False,
    fields: Fields = TEXTS,
) -> Answered:
    """The class of each text, or its number where the model gives numbers."""
    able = _judge(service, texts[0], model)
    refuse_other_form(texts, able, fields)
    ability = "classify" if "classify" in able.facts.abilities else "score"
    # Single texts and pairs are not asked together: the models take one form at a time.
    kind = Kind(ability, (cut_long, isinstance(texts[0], str)))
    return await service.ask(Question(kind, texts, texts, able.name, cut_long, fields=fields))


def _judge(service: Service, text: str | tuple[str, str], name: str | None) -> ServedModel:
    """The model of this name, or without one the first, that gives classes or numbers to such texts."""
    named = service.models.able(name, "classify", "score")  # refuses where there is none at all
    if name is not None:
        return named
    is_single = isinstance(text, str)
    for model in service.models:
        takes_it = model.facts.takes_single if is_single else model.facts.takes_pairs
        if takes_it and {"classify", "score"} & set(model.facts.abilities):
            return model
    wanted = "single texts" if is_single else "pairs of texts"
    makes = "sst2" if is_single else "mrpc"
    remedy = f"bertsmith finetune {makes} makes one, and --model FOLDER adds it"
    raise Refusal(422, f"no model here classifies {wanted}; {remedy}")


def refuse_other_form(texts: Sequence[str | tuple[str, str]], model: ServedModel, fields: Fields) -> None:
    """Stop at a pair or a single text where the model was fine-tuned on the other."""
    for number, text in enumerate(texts):
        if isinstance(text, str) and not model.facts.takes_single:
            takes = "pairs; send [first, second]"
        elif not isinstance(text, str) and not model.facts.takes_pairs:
            takes = "single texts; send one string"
        else:
            continue
        raise Refusal(422, f"{fields(number)[0]}: the model {model.name} takes {takes}")


def refuse_many_occurrences(ask: SensesAsk) -> None:
    """Stop at no word, and at one that stands in the sentences too often."""
    word = ask.word.strip()
    if not word:
        raise Refusal(422, "word: is empty; give the word whose senses are wanted")
    found = sum(len(re.findall(re.escape(word), text, re.IGNORECASE)) for text in ask.sentences)
    if found > MOST_OCCURRENCES:
        message = f"the word stands {found} times in the sentences; at most {MOST_OCCURRENCES} are shown"
        raise Refusal(422, message)


def as_text(sent: TextOrPair) -> str | tuple[str, str]:
    """A text or a pair, as the models take it."""
    return sent if isinstance(sent, str) else (sent[0], sent[1])


def _look(kind: Kind, ask: LookAsk, *, most_tokens: int | None = None) -> Question:
    text = ask.first if ask.second is None else (ask.first, ask.second)
    fields = one("first") if ask.second is None else two("first", "second")
    inputs = [(ask.first, ask.second)]
    return Question(kind, inputs, [text], ask.model, most_tokens=most_tokens, fields=fields)
