"""The models that come with the project, beside transformers."""

import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

import bertsmith
from bertsmith.inference.embedded_models import default_model, embedded_models

MAX_BYTES = 64_000_000


def test_the_default_model_opens_as_a_masked_language_model_and_says_the_same():
    theirs = AutoModelForMaskedLM.from_pretrained(default_model(), dtype=torch.float32).eval()
    assert type(theirs).__name__ == "ModernBertForMaskedLM"
    tokenizer = AutoTokenizer.from_pretrained(default_model())
    text = "Paris is the [MASK] of France."
    inputs = tokenizer(text, return_tensors="pt")
    with torch.no_grad():
        scores = theirs(**inputs).logits[0]
    place = inputs["input_ids"][0].tolist().index(tokenizer.mask_token_id)
    probability, number = scores[place].softmax(-1).max(-1)
    (guess,) = bertsmith.load(device="cpu").fill(text, top=1)[0]
    assert guess.token == tokenizer.convert_ids_to_tokens(int(number)) == "capital"
    assert abs(guess.probability - float(probability)) < 1e-4


def test_the_default_model_knows_masked_words_and_following_sentences():
    bert = bertsmith.load(device="cpu")
    assert bert.heads == ("mlm", "nsp")
    assert bert.next_sentence("We got some time.", "Should we get some coffee?").follows
    assert not bert.next_sentence("The battle was lost.", "Add two spoons of sugar and stir.").follows


@pytest.mark.parametrize(
    ("text", "label"),
    [("A stunning film with a great cast.", "positive"), ("A dull and tedious waste of time.", "negative")],
)
def test_the_model_for_sentiment_tells_praise_from_blame(text, label):
    (said,) = bertsmith.load("bertsmith-small-sentiment", device="cpu").classify([text])
    assert said.label == label


def test_the_model_for_entities_finds_persons_and_places():
    (words,) = bertsmith.load("bertsmith-small-entities", device="cpu").tag(["Angela Merkel flew to Berlin."])
    found = {word.word: word.tag for word in words if word.tag != "O"}
    assert found == {"Angela": "B-person", "Merkel": "I-person", "Berlin": "B-location"}


def test_the_model_for_questions_finds_a_year_in_a_passage():
    passage = "The university was founded in 1737 and is named after King George II."
    answer = bertsmith.load("bertsmith-small-questions", device="cpu").answer(
        "When was the university founded?", passage
    )
    assert answer.text == "1737"


def test_the_embedded_models_are_small_enough_to_travel_with_the_code():
    folders = embedded_models().values()
    assert sum(file.stat().st_size for folder in folders for file in folder.iterdir()) <= MAX_BYTES
