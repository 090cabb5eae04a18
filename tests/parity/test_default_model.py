"""The model that comes with the project, beside transformers."""

import torch
from transformers import AutoModelForPreTraining, AutoTokenizer

import bertsmith
from bertsmith.inference.embedded_models import default_model, embedded_models

MAX_BYTES = 64_000_000


def test_the_default_model_opens_as_a_pre_training_bert_and_says_the_same():
    theirs = AutoModelForPreTraining.from_pretrained(default_model(), dtype=torch.float32).eval()
    assert type(theirs).__name__ == "BertForPreTraining"
    tokenizer = AutoTokenizer.from_pretrained(default_model())
    text = "Paris is the [MASK] of France."
    inputs = tokenizer(text, return_tensors="pt")
    with torch.no_grad():
        scores = theirs(**inputs).prediction_logits[0]
    place = inputs["input_ids"][0].tolist().index(tokenizer.mask_token_id)
    probability, number = scores[place].softmax(-1).max(-1)
    (guess,) = bertsmith.load(device="cpu").fill(text, top=1)[0]
    assert guess.token == tokenizer.convert_ids_to_tokens(int(number)) == "capital"
    assert abs(guess.probability - float(probability)) < 1e-4


def test_the_default_model_knows_masked_words_and_following_sentences():
    bert = bertsmith.load(device="cpu")
    assert bert.heads == ("pooler", "mlm", "nsp")
    assert bert.next_sentence("We got some time.", "Should we get some coffee?").follows
    assert not bert.next_sentence("The battle was lost.", "Add two spoons of sugar and stir.").follows


def test_the_embedded_models_are_small_enough_to_travel_with_the_code():
    folders = embedded_models().values()
    assert sum(file.stat().st_size for folder in folders for file in folder.iterdir()) <= MAX_BYTES
