"""The routes of bertsmith's own API: what a model predicts for texts."""

from collections.abc import Sequence

import numpy as np
from fastapi import APIRouter

from bertsmith.inference.outputs import choice_to_json, classification_to_json
from bertsmith.inference.text_reader import TextInput, as_written
from bertsmith.inference.vectors import cosines
from bertsmith.serve import schemas
from bertsmith.serve.api_errors import ApiError
from bertsmith.serve.batching import BatchKey
from bertsmith.serve.model_registry import ServedModel
from bertsmith.serve.service import (
    TEXTS,
    FieldNames,
    PredictionRequest,
    Predictions,
    Service,
    pair_of_fields,
    single_field,
)


def prediction_routes(service: Service) -> APIRouter:
    """Return the routes for predictions."""
    router = APIRouter()

    @router.post("/fill")
    async def fill(request: schemas.FillRequest) -> schemas.FillResponse:
        """Return the most probable tokens for each mask of a text."""
        texts, key = [request.text], BatchKey("fill", (request.top,))
        found = await service.predict(
            PredictionRequest(key, texts, request.model, fields=single_field("text"))
        )
        return schemas.FillResponse.model_construct(model=found.model, masks=found.results[0])

    @router.post("/next")
    async def next_sentence(request: schemas.NextRequest) -> schemas.NextResponse:
        """Predict if the second text follows the first."""
        pairs, fields = [(request.first, request.second)], pair_of_fields("first", "second")
        found = await service.predict(
            PredictionRequest(BatchKey("next"), pairs, request.model, fields=fields)
        )
        (result,) = found.results
        return schemas.NextResponse(model=found.model, follows=result.follows, probability=result.probability)

    @router.post("/classify")
    async def classify(request: schemas.ClassifyRequest) -> schemas.ClassifyResponse:
        """Return the class of each text, its classes, or its number, by the kind of model."""
        service.check_count(request.texts)
        found = await classify_texts(service, [as_text(each) for each in request.texts], model=request.model)
        results = [classification_to_json(each) for each in found.results]
        return schemas.ClassifyResponse.model_construct(model=found.model, results=results)

    @router.post("/tag")
    async def tag(request: schemas.TagRequest) -> schemas.TagResponse:
        """Return the tag of each word, and the entities that the tags mark, for example names."""
        found = await service.predict(PredictionRequest(BatchKey("tag"), request.texts, request.model))
        return schemas.TagResponse.model_construct(model=found.model, results=found.results)

    @router.post("/answer")
    async def answer(request: schemas.AnswerRequest) -> schemas.AnswerResponse:
        """Return answers that are parts of the passage; a long passage is read in windows."""
        pairs, fields = [(request.question, request.passage)], pair_of_fields("question", "passage")
        key = BatchKey("answer", (request.best,))
        found = await service.predict(PredictionRequest(key, pairs, request.model, fields=fields))
        return schemas.AnswerResponse(model=found.model, **found.results[0])

    @router.post("/choose")
    async def choose(request: schemas.ChooseRequest) -> schemas.ChooseResponse:
        """Choose the option that fits the context best."""
        service.check_count(request.options)
        wanted = PredictionRequest(
            BatchKey("choose"),
            [request.context, *request.options],
            request.model,
            fields=context_and_options,
            pairs_with_first=True,
        )
        found = await service.predict(wanted)
        return schemas.ChooseResponse(model=found.model, **choice_to_json(found.results[0], request.options))

    @router.post("/compare")
    async def compare(request: schemas.CompareRequest) -> schemas.CompareResponse:
        """Return the cosine similarity of every two texts."""
        service.check_count(request.texts)
        model = service.models.with_ability(request.model, "embed")
        found = await service.predict(embedding_request(model, request.texts))
        similarity = cosines(np.stack(found.results))
        return schemas.CompareResponse.model_construct(model=found.model, similarity=similarity)

    return router


async def classify_texts(
    service: Service,
    texts: Sequence[TextInput],
    *,
    model: str | None,
    truncate: bool = False,
    fields: FieldNames = TEXTS,
) -> Predictions:
    """Return the class of each text, or its number if the model gives numbers."""
    written = [as_written(each) for each in texts]
    chosen = _text_classifier(service, written[0], model)
    check_forms(written, chosen, fields)
    ability = "classify" if "classify" in chosen.info.abilities else "score"
    # Single texts and pairs do not share a batch: the models take one form at a time.
    key = BatchKey(ability, (isinstance(written[0], str),))
    return await service.predict(PredictionRequest(key, texts, chosen.name, truncate, fields=fields))


def embedding_request(
    model: ServedModel,
    texts: Sequence[TextInput],
    *,
    prompt_name: str | None = None,
    truncate: bool = False,
    fields: FieldNames = TEXTS,
) -> PredictionRequest:
    """Return a request for the vectors of texts, with the named prompt or the model's default one."""
    sentence = model.info.sentence
    if prompt_name is not None and prompt_name not in sentence.prompts:
        known = f"it has {', '.join(sentence.prompts) or 'none'}"
        raise ApiError(422, f"prompt_name: the model {model.name} does not have this prompt; {known}")
    prompt = None if prompt_name is None else sentence.prompts[prompt_name]
    if sentence.prepares(prompt):
        texts = [sentence.prepared(text, prompt) if isinstance(text, str) else text for text in texts]
    return PredictionRequest(BatchKey("embed"), texts, model.name, truncate, fields=fields)


def _text_classifier(service: Service, text: str | tuple[str, str], name: str | None) -> ServedModel:
    """Return the model of this name, or by default the first one, that classifies or scores such texts."""
    named = service.models.with_ability(name, "classify", "score")  # raises if none does
    if name is not None:
        return named
    is_single = isinstance(text, str)
    for model in service.models:
        takes_it = model.info.takes_single if is_single else model.info.takes_pairs
        if takes_it and {"classify", "score"} & set(model.info.abilities):
            return model
    wanted, task = ("single texts", "sst2") if is_single else ("pairs of texts", "mrpc")
    remedy = f"bertsmith finetune {task} makes one, and --model FOLDER adds it"
    raise ApiError(422, f"no model of this server classifies {wanted}; {remedy}")


def check_forms(texts: Sequence[str | tuple[str, str]], model: ServedModel, fields: FieldNames) -> None:
    """Reject a pair or a single text if the model was fine-tuned on the other form."""
    for index, text in enumerate(texts):
        if isinstance(text, str) and not model.info.takes_single:
            takes = "pairs; send [first, second]"
        elif not isinstance(text, str) and not model.info.takes_pairs:
            takes = "single texts; send one string"
        else:
            continue
        raise ApiError(422, f"{fields(index)[0]}: the model {model.name} supports only {takes}")


def context_and_options(index: int) -> tuple[str, ...]:
    """Return the field of an input: the context, then the options."""
    return (f"options[{index - 1}]" if index else "context",)


def as_text(sent: schemas.SentTextOrPair) -> str | tuple[str, str]:
    """Return a text or pair as the models take it."""
    return sent if isinstance(sent, str) else (sent[0], sent[1])
