"""ELECTRA from scratch: a discriminator and its generator, trained, saved, resumed and continued from."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

import bertsmith
from bertsmith.cli.pretrain import show
from bertsmith.core.errors import UserError
from bertsmith.corpus.token_store import TokenStore
from bertsmith.data.collate import Multiples
from bertsmith.data.data_loader import PretrainingDataset, StepIndex
from bertsmith.data.masking import SAMPLING_BITS
from bertsmith.model.folder.model_folder import read_model
from bertsmith.objectives.registry import declaration
from bertsmith.packed import pack
from bertsmith.pretraining.checkpoint_export import export_checkpoints
from bertsmith.pretraining.hardware import choices
from bertsmith.recipe.load import load_recipe
from bertsmith.text.extend_vocabulary import with_words
from tests.tiny_runs import (
    TINY,
    Listener,
    differing,
    last_state,
    metrics_of,
    run_tiny,
    sentence_ids,
    stop_at,
    tiny_recipe,
    tiny_store,
    without_pictures,
)
from tests.tuning import SHORT, tune

ELECTRA = ("model.type=electra", "model.embedding_width=16", "examples.objective=replaced")
ELECTRA += (
    "examples.pairs=none",
    "replaced.generator_size=0.5",
    "masking.as_mask=0.85",
    "masking.as_random=0",
)
CLOSE = 1e-5


@pytest.fixture(scope="module")
def run(store: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; not to be changed."""
    out = tmp_path_factory.mktemp("electra") / "run"
    with without_pictures():
        assert run_tiny(store, out, *ELECTRA).state == "finished"
    return out


def test_a_run_measures_generator_and_discriminator(run):
    before, *_, after = metrics_of(run, "held-out")
    assert after["token_loss"] < before["token_loss"] and after["replaced_loss"] < before["replaced_loss"]
    for line in metrics_of(run):
        assert line["loss"] == pytest.approx(line["token_loss"] + 50 * line["replaced_loss"])
        assert 0 <= line["replaced_precision"] <= 1 and 0 <= line["replaced_recall"] <= 1
        assert (
            0.75 < line["replaced_majority"] <= 1
        )  # at most 15 % are replaced, less where sequences are short
        assert "pair_loss" not in line
    assert after["fixed_token_loss"] < before["fixed_token_loss"]  # the generator's


def test_the_end_tells_the_same_of_a_run_that_is_finished_already(run, store):
    result = run_tiny(store, run, *ELECTRA)
    last = metrics_of(run, "held-out")[-1]
    assert result.held_out == {name: each for name, each in last.items() if name in result.declared.reported}
    assert "replaced_recall" in result.held_out


def test_the_end_line_names_both_folders(run, store, capsys):
    show(run_tiny(store, run, *ELECTRA), as_json=False)
    told = capsys.readouterr().out
    assert f"model: {run / 'model'}\ngenerator: {run / 'model' / 'generator'}\n" in told


def test_the_card_and_the_log_name_the_choices(run):
    card = (run / "model" / "card.md").read_text(encoding="utf-8")
    assert "\nAn electra encoder" in card
    assert "generator of 0.5 of its width" in card and "loss = generator + 50 x discriminator" in card
    assert "| generator's token loss |" in card and "| replaced recall |" in card
    notes = "\n".join(choices(load_recipe("electra-small")))
    assert "sees 85% of the chosen tokens as the mask, 0% as random ones, 15% as they are" in notes


def test_the_model_opens_in_transformers_as_electra_for_pretraining(run, store):
    theirs, found = transformers.ElectraForPreTraining.from_pretrained(
        run / "model", output_loading_info=True
    )
    assert not (found["missing_keys"] or found["unexpected_keys"])
    network = read_model(run / "model").network
    batch = pack(sentence_ids(store).tolist())
    ours = network.scores("replaced", network(batch), batch.layout)[:, 0]
    assert (theirs.eval()(sentence_ids(store)).logits[0] - ours).abs().max() <= CLOSE


def test_the_generator_opens_in_transformers_as_electra_for_masked_lm(run, store):
    folder = run / "model" / "generator"
    theirs, found = transformers.ElectraForMaskedLM.from_pretrained(folder, output_loading_info=True)
    assert not (found["missing_keys"] or found["unexpected_keys"])
    assert theirs.config.hidden_size == 16 and theirs.config.embedding_size == 16
    network = read_model(folder).network
    batch = pack(sentence_ids(store).tolist())
    ours = network.scores_of_words(network(batch))
    assert (theirs.eval()(sentence_ids(store)).logits[0] - ours).abs().max() <= CLOSE


def test_the_generator_fills_masks(run):
    (answer,) = bertsmith.load(run / "model" / "generator").fill("the [MASK] heats the iron .", top=3)
    assert len(answer) == 3


def test_the_model_is_fine_tuned(run, tmp_path):
    result = tune("sst2", run / "model", tmp_path, *SHORT)
    assert list(read_model(result.folder / "model").network.heads) == ["classify"]


def test_both_folders_hold_the_same_embeddings(run):
    discriminator, generator = (
        load_file(folder / "model.safetensors") for folder in (run / "model", run / "model" / "generator")
    )
    tables = [name for name in generator if ".embeddings." in name]
    assert len(tables) == 5 and all(torch.equal(discriminator[name], generator[name]) for name in tables)


def test_a_checkpoint_is_exported_with_its_generator(run, store, tmp_path):
    export_checkpoints(run, {8: tmp_path / "exported"})
    for folder in ("", "generator"):
        ours, theirs = (
            load_file(place / folder / "model.safetensors")
            for place in (tmp_path / "exported", run / "model")
        )
        assert differing(ours, theirs) == []


def test_an_interrupted_run_ends_as_one_that_was_not_to_the_bit(run, store, tmp_path):
    for _ in range(2):
        with stop_at(2):
            assert run_tiny(store, tmp_path / "run", *ELECTRA).state == "stopped"
    assert run_tiny(store, tmp_path / "run", *ELECTRA, "run.loader_workers=1").state == "finished"
    assert metrics_of(tmp_path / "run") == metrics_of(run)
    assert differing(last_state(tmp_path / "run"), last_state(run)) == []


def test_several_micro_batches_learn_what_one_does(store, tmp_path):
    # Without dropout, whose draws depend on the shapes; the samples do not.
    settings = (
        *ELECTRA,
        "model.dropout=0",
        "model.attention_dropout=0",
        "run.steps=3",
        "run.log_every_steps=1",
    )
    run_tiny(store, tmp_path / "one", *settings)
    run_tiny(store, tmp_path / "several", *settings, "batch.micro_tokens=48")
    for one, several in zip(metrics_of(tmp_path / "one"), metrics_of(tmp_path / "several"), strict=True):
        assert one.keys() == several.keys()
        for name in ("token_loss", "replaced_loss", "replaced_majority", "replaced_accuracy"):
            assert several[name] == pytest.approx(one[name], abs=1e-4), (one["step"], name)


def test_draws_follow_from_the_seed_and_the_step_alone(store, tmp_path):
    def draws(*overrides: str, step: int = 1, **sizes: int) -> np.ndarray:
        recipe = tiny_recipe(*ELECTRA, *overrides)
        wanted = {"micro_tokens": 256, "fields": declaration(recipe).fields, **sizes}
        data = PretrainingDataset(store, recipe, cache=tmp_path, **wanted)
        micros = [micro for micro in data[StepIndex(0, step)].micros]
        return np.concatenate([micro["draws_P"][micro["masked_weights_P"] > 0].numpy() for micro in micros])

    first = draws(multiples=Multiples(8, 8))
    assert first.min() >= 0 and first.max() < 2**SAMPLING_BITS and len(np.unique(first)) == len(first)
    assert np.array_equal(first, draws(multiples=Multiples(8, 8), micro_tokens=48))
    assert not np.array_equal(first, draws("run.seed=1", multiples=Multiples(8, 8))[: len(first)])
    assert not np.array_equal(first, draws(multiples=Multiples(8, 8), step=0)[: len(first)])
    ranks = [draws(multiples=Multiples(8, 8), rank=rank, world=2) for rank in range(2)]
    assert np.array_equal(first, np.concatenate(ranks))


def test_a_run_goes_on_from_both_folders(run, store, tmp_path):
    listener = Listener()
    from_run = (*ELECTRA, f"start.model={run / 'model'}", "run.steps=1")
    run_tiny(store, tmp_path / "run", *from_run, listener=listener)
    assert not any("fresh" in note for note in listener.notes)
    last, first = metrics_of(run, "held-out")[-1], metrics_of(tmp_path / "run", "held-out")[0]
    # Of the first stage, whose sequences are shorter than those the run ended with.
    assert first["token_loss"] < metrics_of(run, "held-out")[0]["token_loss"] - 0.1
    assert abs(first["replaced_loss"] - last["replaced_loss"]) < 0.2


def test_without_a_generator_a_fresh_one_is_trained(run, store, tmp_path):
    listener = Listener()
    folder = tmp_path / "discriminator"
    bertsmith.load(run / "model").save(folder)
    run_tiny(store, tmp_path / "run", *ELECTRA, f"start.model={folder}", "run.steps=1", listener=listener)
    assert "the folder lacks a generator: it starts from fresh weights" in listener.notes


def test_a_generator_of_another_size_is_a_clear_error(run, store, tmp_path):
    settings = (*ELECTRA, f"start.model={run / 'model'}", "replaced.generator_size=1.0")
    with pytest.raises(
        UserError, match="is a generator of width 16, but the recipe and the model require 32"
    ):
        run_tiny(store, tmp_path / "run", *settings)


def test_words_are_added_to_both(run, store, tmp_path):
    (tmp_path / "words.txt").write_text("anvil\n", encoding="utf-8")
    extended = with_words(store.tokenizer(), ["anvil"])
    larger = tiny_store(tmp_path, tokenizer=extended)
    words = f"start.add_words={tmp_path / 'words.txt'}"
    run_tiny(larger, tmp_path / "run", *ELECTRA, f"start.model={run / 'model'}", words, "run.steps=1")
    for folder in (tmp_path / "run" / "model", tmp_path / "run" / "model" / "generator"):
        assert read_model(folder).network.config.vocabulary == extended.vocabulary_size


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("examples.objective=replaced",),
            "model.type = bert does not have a head for examples.objective = replaced",
        ),
        ((*ELECTRA, "model.heads=8", "replaced.generator_size=0.4"), "generator of 3 heads and width 13"),
        ((*ELECTRA, "examples.pairs=nsp"), "model.type = electra does not have a head for examples.pairs"),
    ],
)
def test_what_cannot_be_is_rejected(overrides, message):
    with pytest.raises(UserError, match=message):
        load_recipe("bert-tiny", [*TINY, *overrides])
