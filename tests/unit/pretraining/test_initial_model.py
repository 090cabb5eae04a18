"""What a run begins with: fresh weights, or a model folder with what it lacks and with new words."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import bertsmith
from bertsmith.core.errors import UserError
from bertsmith.corpus.token_store import TokenStore
from bertsmith.model.folder.model_folder import Model, read_model, write_model
from bertsmith.model.kernels.activations import ACTIVATIONS
from bertsmith.model.network import Network, new_network
from bertsmith.objectives.pretraining_objective import PretrainingObjective
from bertsmith.pretraining.initial_model import (
    build_initial_model,
    encoder_config_of,
    grow_for_words,
    with_true_model,
)
from bertsmith.recipe.load import load_recipe
from bertsmith.text.extend_vocabulary import with_words
from bertsmith.text.tokenizer import Tokenizer
from tests.tiny import tiny_encoder_config
from tests.tiny_runs import (
    BeforeSteps,
    Listener,
    differing,
    last_state,
    metrics_of,
    run_tiny,
    stop_at,
    tiny_recipe,
    tiny_store,
    tiny_tokenizer,
)


def model_folder(
    folder: Path, tokenizer: Tokenizer, *, heads: dict[str, int], model_type: str = "bert", **changes
) -> Path:
    """A model of 3 layers of width 48, with lively weights, for this tokenizer."""
    sizes = {"layers": 3, "width": 48, "positions": 64, "vocabulary": tokenizer.vocabulary_size}
    config = tiny_encoder_config(model_type, **sizes | changes)
    network = new_network(replace(config, initial_std=0.2), heads, torch.Generator().manual_seed(5))
    write_model(folder, Model(network))
    tokenizer.save(folder)
    return folder


def first_weights(store: TokenStore, out: Path, *overrides: str, listener: Listener | None = None) -> Network:
    """A run's network in front of its first step."""
    seen: list[Network] = []

    def act(objective: PretrainingObjective, step: int) -> None:
        if step == 0:
            seen.append(objective.network)

    with BeforeSteps(act):
        run_tiny(store, out, "run.steps=1", "optim.warmup_fraction=1", *overrides, listener=listener)
    return seen[0]  # the first learning rate of a warm-up is 0: nothing has moved yet


# ---- from scratch


def test_a_new_network_has_the_recipes_sizes_and_the_stores_vocabulary(store):
    network = build_initial_model(tiny_recipe("model.dropout=0.25", "model.norm_eps=1e-7"), store).network
    config = network.config
    assert (config.layers, config.width, config.heads, config.inner, config.positions) == (2, 32, 2, 64, 64)
    assert (config.dropout, config.norm_eps, config.vocabulary) == (0.25, 1e-7, store.vocabulary)
    assert list(network.heads) == ["pooler", "mlm", "nsp"]


@pytest.mark.parametrize(
    ("model_type", "pairs", "heads"),
    [
        ("roberta", "full-sentences", ["mlm"]),
        ("albert", "sop", ["pooler", "mlm", "sop"]),
        ("distilbert", "none", ["mlm"]),
        ("ernie", "nsp", ["pooler", "mlm", "nsp"]),
    ],
)
def test_a_new_network_has_the_heads_that_it_trains(store, model_type, pairs, heads):
    segments = 0 if model_type == "distilbert" else 2
    settings = (f"model.type={model_type}", f"examples.pairs={pairs}", f"model.segments={segments}")
    recipe = tiny_recipe(*settings)
    assert list(build_initial_model(recipe, store).network.heads) == heads


def test_albert_has_no_next_sentence_head(store):
    with pytest.raises(UserError, match="albert does not have a nsp head"):
        build_initial_model(tiny_recipe("model.type=albert"), store)


def test_positions_mean_the_longest_sequence_for_every_member(store):
    for model_type in ("bert", "roberta", "albert", "distilbert", "ernie"):
        segments = 0 if model_type == "distilbert" else 2
        settings = (f"model.type={model_type}", "examples.pairs=none", f"model.segments={segments}")
        model = tiny_recipe(*settings, "model.positions=40").model
        assert encoder_config_of(model, store.tokenizer()).positions == 40


def test_initial_weights_follow_from_the_seed(store):
    weights = [
        build_initial_model(tiny_recipe(f"run.seed={seed}"), store).network.encoder.embeddings.words.weight
        for seed in (3, 3, 4)
    ]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


# ---- from a model folder


def test_a_folder_without_heads_gets_fresh_ones_that_are_named(store, tmp_path):
    folder = model_folder(tmp_path / "model", store.tokenizer(), heads={})
    listener = Listener()
    network = first_weights(store, tmp_path / "run", f"start.model={folder}", listener=listener)
    for head in ("pooler", "mlm", "nsp"):
        assert f"the head {head} is not in the folder: it starts from fresh weights" in listener.notes
        assert f"- the head {head} is not in the folder" in (tmp_path / "run" / "card.md").read_text()
    encoder = read_model(folder).network.encoder.state_dict()
    assert differing(encoder, network.encoder.state_dict()) == []


def test_heads_that_the_folder_has_go_on_and_others_are_left_behind(store, tmp_path):
    heads = {"pooler": 0, "mlm": 0, "nsp": 2, "classify": 3}
    folder = model_folder(tmp_path / "model", store.tokenizer(), heads=heads)
    listener = Listener()
    network = first_weights(store, tmp_path / "run", f"start.model={folder}", listener=listener)
    assert not [note for note in listener.notes if "fresh" in note]
    before = read_model(folder).network.heads
    assert set(network.heads) == {"pooler", "mlm", "nsp"}
    for head in network.heads:
        assert differing(before[head].state_dict(), network.heads[head].state_dict()) == []
    assert set(read_model(tmp_path / "run" / "model").network.heads) == {"pooler", "mlm", "nsp"}


def test_the_recipe_of_the_run_tells_the_folders_architecture(store, tmp_path):
    folder = model_folder(
        tmp_path / "model", store.tokenizer(), heads={}, dropout=0.2, activation="gelu_new", norm_eps=1e-6
    )
    first_weights(store, tmp_path / "run", f"start.model={folder}", "model.layers=2")
    model = load_recipe(tmp_path / "run" / "recipe.toml").model
    assert (model.type, model.layers, model.width, model.inner, model.heads) == ("bert", 3, 48, 64, 4)
    assert (model.positions, model.dropout, model.activation, model.norm_eps) == (64, 0.2, "gelu_new", 1e-6)
    assert "3 layers, width 48" in (tmp_path / "run" / "card.md").read_text()
    assert "from another model folder" in (tmp_path / "run" / "card.md").read_text()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_recipe_of_the_run_tells_the_folders_activation(store, tmp_path, activation):
    folder = model_folder(tmp_path / "model", store.tokenizer(), heads={}, activation=activation)
    recipe = with_true_model(tiny_recipe(f"start.model={folder}"))
    assert recipe.model.activation == activation
    assert build_initial_model(recipe, store).network.config.activation == activation


def test_training_continues_from_what_was_learned(finished, store, tmp_path):
    run_tiny(store, tmp_path / "run", "run.steps=1", f"start.model={finished / 'model'}")
    assert (
        metrics_of(tmp_path / "run")[0]["token_loss"]
        < metrics_of(finished, "held-out")[0]["token_loss"] - 0.2
    )


def test_the_end_tells_what_the_model_got_before(finished, store, tmp_path):
    settings = ("run.steps=4", f"start.model={finished / 'model'}")
    with stop_at(0):
        stopped = run_tiny(store, tmp_path / "run", *settings)
    result = run_tiny(store, tmp_path / "run", *settings)
    first = {line["stage"]: line for line in metrics_of(tmp_path / "run", "held-out") if line["step"] == 0}
    # On the sequences that the run ends with, which are longer than those it begins with.
    for end, before in ((stopped, first[0]), (result, first[1])):
        assert end.held_out_before == {
            name: each for name, each in before.items() if name in end.declared.reported
        }
    assert result.held_out_before["token_loss"] == metrics_of(finished, "held-out")[-1]["token_loss"]
    assert run_tiny(store, tmp_path / "run", *settings).held_out_before == result.held_out_before
    card = (tmp_path / "run" / "model" / "card.md").read_text(encoding="utf-8")
    for name, words, form in (
        ("token_loss", "token loss", ".4f"),
        ("token_accuracy", "token accuracy", ".1%"),
    ):
        was, now = (format(values[name], form) for values in (before, result.held_out))
        assert was == now or f"| {words} | {was} → {now} |" in card
    assert f"| sequences | {result.held_out['sequences']} |" in card


def test_a_run_from_scratch_has_nothing_to_be_compared_with(finished, store):
    assert run_tiny(store, finished).held_out_before == {}
    assert "→" not in (finished / "model" / "card.md").read_text(encoding="utf-8")


def test_an_adapted_run_resumes_to_the_bit(store, tmp_path):
    folder = model_folder(tmp_path / "model", store.tokenizer(), heads={})
    settings = (f"start.model={folder}", "run.steps=4")
    run_tiny(store, tmp_path / "straight", *settings)
    with stop_at(1):
        run_tiny(store, tmp_path / "run", *settings)
    run_tiny(store, tmp_path / "run", *settings)
    assert differing(last_state(tmp_path / "run"), last_state(tmp_path / "straight")) == []


def test_a_store_of_another_vocabulary_is_rejected(store, tmp_path):
    other = tiny_tokenizer(tmp_path / "vocabulary", unused=3)
    folder = model_folder(tmp_path / "model", other, heads={})
    with pytest.raises(UserError) as caught:
        run_tiny(store, tmp_path / "run", f"start.model={folder}")
    assert f"{store.folder}: the store was tokenised with another vocabulary than {folder}'s" in str(
        caught.value.line()
    )
    assert not (tmp_path / "run").exists()


def test_a_folder_with_too_few_positions_is_a_clear_error(store, tmp_path):
    folder = model_folder(tmp_path / "model", store.tokenizer(), heads={}, positions=30)
    with pytest.raises(
        UserError, match="examples.stages ask for 32 tokens but model.positions = 30"
    ) as caught:
        run_tiny(store, tmp_path / "run", f"start.model={folder}")
    assert str(folder) in caught.value.line()


def test_a_folder_of_a_member_without_pairs_is_a_clear_error(store, tmp_path):
    folder = model_folder(tmp_path / "model", store.tokenizer(), heads={}, model_type="roberta")
    with pytest.raises(
        UserError, match="model.type = roberta does not have a head for examples.pairs = nsp or sop"
    ):
        run_tiny(store, tmp_path / "run", f"start.model={folder}")


def test_a_folder_that_is_not_there_is_a_clear_error(store, tmp_path):
    with pytest.raises(UserError, match="nowhere: this folder does not exist"):
        run_tiny(store, tmp_path / "run", f"start.model={tmp_path / 'nowhere'}")


@pytest.mark.parametrize("model_type", ["electra", "modernbert", "roberta", "distilbert", "albert"])
def test_every_other_member_can_be_adapted(store, tmp_path, model_type):
    folder = model_folder(tmp_path / "model", store.tokenizer(), heads={}, model_type=model_type)
    pairs = "sop" if model_type == "albert" else "full-sentences"
    settings = (f"start.model={folder}", f"examples.pairs={pairs}", "run.steps=2")
    result = run_tiny(store, tmp_path / "run", *settings)
    assert result.state == "finished"
    assert load_recipe(tmp_path / "run" / "recipe.toml").model.type == model_type
    assert "mlm" in read_model(tmp_path / "run" / "model").network.heads


# ---- new words


WORDS = ["blacksmith", "Anvil", "smith", "forgery", "blacksmith", "炉"]
"""Two of them are new, one is written in capitals, one known, one twice, and one has a strange letter."""
HEADS = {"pooler": 0, "mlm": 0, "nsp": 2}


@pytest.fixture
def adapted(tmp_path: Path) -> tuple[Path, Path, TokenStore]:
    """A model folder with three [unused] slots, a file of words, and a store with these words."""
    tokenizer = tiny_tokenizer(tmp_path / "vocabulary", unused=3)
    folder = model_folder(tmp_path / "model", tokenizer, heads=HEADS)
    file = tmp_path / "words.txt"
    file.write_text("\n".join([*WORDS, "", ""]), encoding="utf-8")
    return folder, file, tiny_store(tmp_path, tokenizer=with_words(tokenizer, WORDS))


def test_new_words_fill_unused_slots_then_the_table_grows(adapted, tmp_path):
    folder, file, store = adapted
    listener = Listener()
    settings = (f"start.model={folder}", f"start.add_words={file}")
    network = first_weights(store, tmp_path / "run", *settings, listener=listener)
    assert "4 words added, 3 of them in [unused] slots, 1 after the end" in listener.notes
    before, tokenizer = read_model(folder).network, Tokenizer.load(folder)
    assert network.config.vocabulary == before.config.vocabulary + 1 == store.vocabulary
    known = [number for number in range(tokenizer.vocabulary_size) if number not in (1, 2, 3)]
    old, new = (each.encoder.embeddings.words.weight for each in (before, network))
    assert torch.equal(old[known], new[known])
    extended = store.tokenizer()
    assert [extended.id(word) for word in ("blacksmith", "anvil", "forgery")] == [1, 2, 3]
    assert extended.id("炉") == tokenizer.vocabulary_size
    for word in ("blacksmith", "anvil", "forgery"):
        pieces = tokenizer.encode(word).ids[1:-1]
        assert len(pieces) > 1
        assert torch.allclose(new[extended.id(word)], old[pieces].mean(0), atol=1e-7)
        bias = before.heads["mlm"].bias[pieces].mean()
        assert torch.allclose(network.heads["mlm"].bias[extended.id(word)], bias, atol=1e-7)
    assert torch.equal(new[extended.id("炉")], old[tokenizer.unknown_id])


def test_the_finished_folder_has_the_extended_tokenizer(adapted, tmp_path):
    folder, file, store = adapted
    run_tiny(store, tmp_path / "run", "run.steps=2", f"start.model={folder}", f"start.add_words={file}")
    bert = bertsmith.load(tmp_path / "run" / "model", device="cpu")
    assert bert.tokenizer.vocabulary_size == bert.model.network.config.vocabulary == store.vocabulary
    assert [bert.tokenizer.token(number) for number in bert.tokenizer.encode("Anvil").ids[1:-1]] == ["anvil"]
    recipe = load_recipe(tmp_path / "run" / "recipe.toml")
    assert (recipe.start.model, recipe.start.add_words) == (str(folder), str(file))


def test_a_store_without_the_new_words_is_rejected(adapted, store, tmp_path):
    folder, file, _ = adapted
    plain = tiny_store(tmp_path / "plain", tokenizer=Tokenizer.load(folder))
    with pytest.raises(UserError, match="another vocabulary"):
        run_tiny(plain, tmp_path / "run", f"start.model={folder}", f"start.add_words={file}")


def test_words_go_into_spare_rows_before_the_table_grows(tmp_path):
    tokenizer = tiny_tokenizer(tmp_path)
    config = tiny_encoder_config(vocabulary=tokenizer.vocabulary_size + 10)
    network = new_network(config, HEADS, torch.Generator().manual_seed(0))
    note = grow_for_words(network, tokenizer, with_words(tokenizer, ["anvil"]), ["anvil"])
    assert network.config.vocabulary == config.vocabulary == len(network.encoder.embeddings.words.weight)
    assert note == "1 words added, 0 of them in [unused] slots, 1 after the end"


def test_a_decoder_of_its_own_grows_with_the_embeddings(tmp_path):
    tokenizer = tiny_tokenizer(tmp_path)
    config = tiny_encoder_config(vocabulary=tokenizer.vocabulary_size, tied=False)
    network = new_network(config, HEADS, torch.Generator().manual_seed(0))
    before = network.heads["mlm"].decoder.detach().clone()
    grow_for_words(network, tokenizer, with_words(tokenizer, ["anvil"]), ["anvil"])
    after = network.heads["mlm"].decoder
    pieces = [number for number in tokenizer.encode("anvil").ids if number not in tokenizer.special_ids]
    assert torch.equal(after[:-1], before)
    assert torch.allclose(after[-1], before[pieces].mean(0))
    assert not torch.allclose(after[-1], network.encoder.embeddings.words.weight[-1])


def test_a_network_without_a_masked_head_grows_too(tmp_path):
    tokenizer = tiny_tokenizer(tmp_path)
    network = new_network(
        tiny_encoder_config(vocabulary=tokenizer.vocabulary_size), {}, torch.Generator().manual_seed(0)
    )
    grow_for_words(network, tokenizer, with_words(tokenizer, ["anvil"]), ["anvil"])
    assert len(network.encoder.embeddings.words.weight) == tokenizer.vocabulary_size + 1


def test_words_to_add_without_a_model_to_add_them_to_are_rejected(store, tmp_path):
    with pytest.raises(UserError, match=r"start.add_words=.*starts from scratch; give `start.model`"):
        run_tiny(store, tmp_path / "run", f"start.add_words={tmp_path / 'words.txt'}")
    assert not (tmp_path / "run").exists()


def test_a_run_continues_from_a_fetched_model_by_its_name(store, tmp_path, monkeypatch):
    snapshot = tmp_path / "hub" / "models--org--tiny" / "snapshots" / "abc"
    snapshot.parent.mkdir(parents=True)
    model_folder(snapshot, store.tokenizer(), heads={"mlm": 0})
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    recipe = tiny_recipe("start.model=org/tiny", "examples.pairs=none")
    assert with_true_model(recipe).model.layers == 3
    initial = build_initial_model(with_true_model(recipe), store).network
    known = read_model(snapshot).network
    assert differing(initial.state_dict(), known.state_dict()) == []
    with pytest.raises(UserError, match="hf download org/other"):
        with_true_model(tiny_recipe("start.model=org/other"))


def test_a_run_continues_from_the_old_layout_of_sentence_transformers(store, tmp_path):
    model_folder(tmp_path / "old" / "0_Transformer", store.tokenizer(), heads={"mlm": 0})
    kind = "sentence_transformers.models.Transformer"
    modules = [{"idx": 0, "name": "0", "path": "0_Transformer", "type": kind}]
    (tmp_path / "old" / "modules.json").write_text(json.dumps(modules))
    recipe = with_true_model(tiny_recipe(f"start.model={tmp_path / 'old'}", "examples.pairs=none"))
    assert recipe.model.width == 48
    assert build_initial_model(recipe, store).network.config.layers == 3
