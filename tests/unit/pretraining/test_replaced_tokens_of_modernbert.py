"""A ModernBERT that finds replaced tokens and tells pairs apart: trained, saved, opened and tuned."""

from pathlib import Path

import pytest
import transformers

import bertsmith
from bertsmith.core.errors import UserError
from bertsmith.corpus.token_store import TokenStore
from bertsmith.model.folder.model_folder import read_model
from bertsmith.objectives.replaced_token_detection import heads_of
from bertsmith.packed import pack
from bertsmith.pretraining.hardware import choices
from bertsmith.recipe.load import load_recipe
from tests.command_line import mistake
from tests.tiny_runs import (
    TINY,
    differing,
    last_state,
    metrics_of,
    run_tiny,
    sentence_ids,
    stop_at,
    tiny_recipe,
    without_pictures,
)
from tests.tuning import SHORT, tune

REPLACED = ("model.type=modernbert", "model.segments=0", "model.layers=4", "model.global_layers=3")
REPLACED += ("examples.objective=replaced", "examples.pairs=nsp", "replaced.generator_size=0.5")
REPLACED += ("examples.single_fraction=0.3", "examples.pair_weight=5")
CLOSE = 1e-5


@pytest.fixture(scope="module")
def run(store: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; not to be changed."""
    out = tmp_path_factory.mktemp("modernbert") / "run"
    with without_pictures():
        assert run_tiny(store, out, *REPLACED).state == "finished"
    return out


def test_a_run_measures_pairs_beside_both_models(run):
    before, *_, after = metrics_of(run, "held-out")
    for name in ("token_loss", "replaced_loss", "fixed_token_loss"):
        assert after[name] < before[name]
    for line in metrics_of(run):
        expected = line["token_loss"] + 50 * line["replaced_loss"] + 5 * line["pair_loss"]
        assert line["loss"] == pytest.approx(expected)
        assert 0 <= line["pair_accuracy"] <= 1


def test_who_asks_it_for_masked_words_is_sent_to_the_generator(run, capsys):
    line = mistake(capsys, "fill", "a [MASK]", "--model", run)
    assert "cannot predict words" in line
    assert f"--model {run / 'model' / 'generator'}, which made up the tokens" in line


def test_the_generator_is_as_wide_and_has_half_of_the_layers(run):
    network, generator = (read_model(run / "model" / folder).network for folder in ("", "generator"))
    assert sorted(network.heads) == ["nsp", "replaced"] and list(generator.heads) == ["mlm"]
    assert (network.config.layers, generator.config.layers) == (4, 2)
    assert generator.config.width == network.config.width
    assert (network.config.global_layers, generator.config.global_layers) == ((0, 3), (0,))
    ours, theirs = (each.encoder.embeddings.state_dict() for each in (network, generator))
    assert differing(ours, theirs) == []


def test_transformers_opens_the_encoder_and_the_generator(run, store):
    ids, batch = sentence_ids(store), pack(sentence_ids(store).tolist())
    theirs, found = transformers.AutoModel.from_pretrained(run / "model", output_loading_info=True)
    assert type(theirs).__name__ == "ModernBertModel" and not found["missing_keys"]
    ours = read_model(run / "model").network
    assert (theirs.eval()(ids).last_hidden_state[0] - ours(batch)).abs().max() <= CLOSE
    folder = run / "model" / "generator"
    theirs, found = transformers.AutoModelForMaskedLM.from_pretrained(folder, output_loading_info=True)
    assert not (found["missing_keys"] or found["unexpected_keys"])
    ours = read_model(folder).network
    assert (theirs.eval()(ids).logits[0] - ours.scores_of_words(ours(batch))).abs().max() <= CLOSE


def test_the_model_judges_pairs_and_its_generator_fills_masks(run):
    judged = bertsmith.load(run / "model").next_sentence(
        "the smith heats the iron .", "the king buys bread ."
    )
    assert 0 <= judged.follows <= 1
    with pytest.raises(UserError, match="load the folder `generator` inside of this model's"):
        bertsmith.load(run / "model").fill("the [MASK] heats the iron .")
    (answer,) = bertsmith.load(run / "model" / "generator").fill("the [MASK] heats the iron .", top=3)
    assert len(answer) == 3


def test_the_model_is_fine_tuned(run, tmp_path):
    result = tune("sst2", run / "model", tmp_path, *SHORT)
    assert list(read_model(result.folder / "model").network.heads) == ["classify"]


def test_the_card_and_the_log_name_the_choices(run):
    card = (run / "model" / "card.md").read_text(encoding="utf-8")
    loss = "loss = generator + 50 x discriminator + 5 x pairs"
    assert "a generator of 0.5 of its layers made up" in card and loss in card
    assert "| pair accuracy |" in card and "| replaced recall |" in card
    notes = "\n".join(choices(tiny_recipe(*REPLACED)))
    assert "a generator of 0.5 of its layers sees 80% of the chosen tokens as the mask" in notes
    assert loss in notes and "the loss of pairs is multiplied by 5: BERT does not do this" in notes


def test_it_is_continued_with_its_generator(run, store, tmp_path):
    with stop_at(1):
        stopped = run_tiny(store, tmp_path / "run", *REPLACED, f"start.model={run / 'model'}")
    assert stopped.state == "stopped" and last_state(tmp_path / "run")
    before, *_ = metrics_of(tmp_path / "run", "held-out")
    after = metrics_of(run, "held-out")[-1]
    assert before["replaced_loss"] == pytest.approx(after["replaced_loss"], rel=1e-4)
    assert before["pair_loss"] == pytest.approx(after["pair_loss"], rel=1e-4)


def test_settings_that_do_not_fit_each_other_are_refused():
    electra = ("model.type=electra", "examples.objective=replaced", "replaced.generator_size=0.5")
    with pytest.raises(UserError, match="electra does not have a head for examples.pairs"):
        tiny_recipe(*electra, "examples.pairs=nsp")
    with pytest.raises(
        UserError, match="modernbert does not have a sop head; choose nsp, full-sentences or another"
    ):
        heads_of(tiny_recipe(*REPLACED, "examples.pairs=sop"))
    with pytest.raises(UserError, match=r"examples.pair_weight applies only to examples.pairs = nsp"):
        tiny_recipe("examples.pairs=none", "examples.pair_weight=0.1")
    with pytest.raises(UserError, match="set model.type to electra or modernbert"):
        load_recipe("bert-base", [*TINY, "examples.objective=replaced"])
