"""What a run guesses for masked words while it learns."""

import re

import pytest
import torch

import bertsmith
from bertsmith.data.batch_inspection import sequences_of
from bertsmith.data.data_loader import PretrainingDataset
from bertsmith.packed import pack
from bertsmith.pretraining.fixed_evaluation import fixed_recipe, fixed_set
from bertsmith.training.distributed import ALONE
from tests.tiny_runs import Listener, run_tiny, tiny_recipe

LINE = re.compile(r'  "(?P<around>.*___.*)" \((?P<right>\S+)\): (\S+ \d+%, ){2}\S+ \d+%')


def guesses_of(listener: Listener) -> list[str]:
    return [message for message in listener.notes if LINE.fullmatch(message)]


def test_each_evaluation_after_the_first_step_shows_what_the_finished_network_takes_masks_for(
    store, tmp_path
):
    listener = Listener()
    run_tiny(store, tmp_path / "run", "run.steps=4", "run.evaluate_every_steps=2", listener=listener)
    told = guesses_of(listener)
    assert len(told) == 2 and told[0] != told[1]
    recipe = fixed_recipe(tiny_recipe(), ALONE)
    data = PretrainingDataset(store, recipe, cache=tmp_path / "c", split="held-out", micro_tokens=256)
    bert, tokenizer = bertsmith.load(tmp_path / "run"), store.tokenizer()
    sequences = list(sequences_of(fixed_set(data, ALONE).batches))
    masked = [each for each in sequences if tokenizer.mask_id in each.tokens][:3]
    for line, each in zip(told[1:], masked, strict=True):
        row = each.tokens.index(tokenizer.mask_id)
        batch = pack([each.tokens], [each.segments])
        with torch.no_grad():
            scores = bert.model.network.word_scores(bert.model.network.encoder(batch), torch.tensor([row]))
        chances, tokens = scores[0].softmax(-1).topk(3)
        expected = [f"{tokenizer.token(int(t))} {c:.0%}" for t, c in zip(tokens, chances, strict=True)]
        assert line.endswith(f"({tokenizer.token(each.targets[row])}): {', '.join(expected)}")


ELECTRA = ("model.type=electra", "model.embedding_width=16", "examples.objective=replaced")
ONE_SIDED = ("examples.objective=left-to-right",)


@pytest.mark.parametrize(("settings", "lines"), [(ELECTRA, 1), (ONE_SIDED, 0)])
def test_electras_generator_guesses_and_a_one_sided_model_knows_no_masks(store, tmp_path, settings, lines):
    listener = Listener()
    run_tiny(store, tmp_path / "run", *settings, "examples.pairs=none", "run.steps=2", listener=listener)
    assert len(guesses_of(listener)) == lines
