"""The fixed held-out evaluation: the same for every recipe, and what it says."""

import math

import pytest

from bertsmith.data.batch_inspection import sequences_of
from bertsmith.data.data_loader import PretrainingDataset
from bertsmith.data.epoch_index import split_documents
from bertsmith.objectives.registry import declaration
from bertsmith.pretraining.fixed_evaluation import fixed_notes, fixed_recipe, fixed_set
from bertsmith.pretraining.held_out import HeldOutSet
from bertsmith.pretraining.pretrained_model import held_out_rows
from bertsmith.training.distributed import ALONE
from tests.tiny_runs import Listener, metrics_of, run_tiny, tiny_recipe


def dataset_of(store, cache, *overrides: str) -> PretrainingDataset:
    recipe = fixed_recipe(tiny_recipe(*overrides), ALONE)
    return PretrainingDataset(store, recipe, cache=cache, split="held-out", micro_tokens=256)


def of_recipe(store, cache, *overrides: str) -> HeldOutSet:
    return fixed_set(dataset_of(store, cache, *overrides), ALONE)


def shown(found: HeldOutSet) -> list[tuple]:
    return [(each.tokens, each.targets) for each in sequences_of(found.batches)]


@pytest.mark.parametrize(
    "other",
    [
        ("run.seed=7", "batch.sequences=3", "run.evaluation_sequences=2"),
        ("masking.rate=0.4", "masking.unit=word", "masking.as_mask=1", "masking.as_random=0"),
        ("examples.pairs=full-sentences", "examples.held_out_fraction=0.4", "masking.masks=static"),
        ("examples.stages=[{fraction=1, length=16, predictions=3}]",),
    ],
)
def test_every_recipe_is_evaluated_on_the_same_tokens(store, tmp_path, other):
    assert shown(of_recipe(store, tmp_path)) == shown(of_recipe(store, tmp_path, *other))


def test_it_predicts_fifteen_percent_of_held_out_text(store, tmp_path):
    found = of_recipe(store, tmp_path, "masking.rate=0.4")
    for tokens, targets in shown(found):
        assert len(targets) == max(1, round(0.15 * len(tokens)))
    held_out = split_documents("held-out", count=60, held_out_fraction=0.2)
    examples = dataset_of(store, tmp_path).stage_index(0).epoch(0).examples
    starts = store.sentence_starts[store.document_starts]
    assert {int((starts <= each).sum()) - 1 for each in examples.first_start.tolist()} <= set(
        held_out.tolist()
    )


def test_bits_are_those_of_the_characters_that_a_reader_sees(store, tmp_path):
    tokenizer, found = store.tokenizer(), of_recipe(store, tmp_path)
    tokens, characters = 0, 0
    for ids, targets in shown(found):
        text = [targets.get(index, each) for index, each in enumerate(ids)][1:-1]  # [CLS] and [SEP]
        tokens, characters = tokens + len(text), characters + len(tokenizer.decode(text).replace(" ", ""))
    assert found.totals["tokens_per_character"] == pytest.approx(tokens / characters) and tokens < characters


def test_a_run_tells_both_evaluations_in_its_log_its_journal_and_its_card(store, tmp_path):
    listener = Listener()
    result = run_tiny(store, tmp_path / "run", "run.steps=2", listener=listener)
    for line in metrics_of(tmp_path / "run", "held-out"):
        per_token = line["fixed_bits_per_character"] * math.log(2) / line["fixed_token_loss"]
        assert per_token == pytest.approx(of_recipe(store, tmp_path).totals["tokens_per_character"])
        assert line["fixed_token_loss"] != line["token_loss"]
    last = metrics_of(tmp_path / "run", "held-out")[-1]
    told = f"fixed evaluation: loss {last['fixed_token_loss']:.3f}, words {last['fixed_token_accuracy']:.1%}"
    assert [note for note in listener.notes if note.startswith("step 2: held-out loss") and told in note]
    assert result.held_out["fixed_token_loss"] == last["fixed_token_loss"]
    card = (tmp_path / "run" / "card.md").read_text()
    assert f"| fixed evaluation: bits per character | {last['fixed_bits_per_character']:.4f} |" in card


def test_a_model_that_sees_one_side_predicts_every_token_of_it(store, tmp_path):
    one_sided = ("examples.objective=left-to-right", "examples.pairs=none")
    found = of_recipe(store, tmp_path, *one_sided)
    for tokens, targets in shown(found):
        assert targets == dict(enumerate(tokens[1:], start=1))
    result = run_tiny(store, tmp_path / "run", "run.steps=1", *one_sided)
    fixed = result.held_out
    assert fixed["fixed_perplexity"] == pytest.approx(math.exp(fixed["fixed_token_loss"]))
    bits = fixed["fixed_token_loss"] / math.log(2) * found.totals["tokens_per_character"]
    assert fixed["fixed_bits_per_character"] == pytest.approx(bits)


def test_models_that_predict_words_share_their_metrics():
    one_sided = tiny_recipe("examples.objective=left-to-right", "examples.pairs=none")
    masked = tiny_recipe("examples.pairs=none")
    assert declaration(one_sided).reported.keys() == declaration(masked).reported.keys()
    assert not [name for name in declaration(one_sided).reported if "mlm" in name]


def test_a_run_says_where_its_figure_stands_alone():
    short, fewer = fixed_notes(tiny_recipe()), fixed_notes(tiny_recipe("examples.held_out_fraction=0.001"))
    assert "model.positions = 64" in short[0] and "held_out_fraction = 0.001" in fewer[0]
    assert fixed_notes(tiny_recipe("model.positions=128")) == []


def test_that_of_electra_is_its_generators():
    electra = tiny_recipe("model.type=electra", "examples.objective=replaced", "examples.pairs=none")
    rows = dict(held_out_rows(declaration(electra), {"token_loss": 0.4, "fixed_token_loss": 0.5}))
    assert rows["fixed evaluation: generator's token loss"] == "0.5000"
