"""A trained BERT becomes an ALBERT: exactly where nothing is shared, by the mean where something is."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

import bertsmith
from bertsmith.core.errors import UserError
from bertsmith.core.files import read_json
from bertsmith.inference.loaded_model import Bert
from bertsmith.model.architectures.albert import AlbertConfig
from bertsmith.model.folder.model_folder import read_model
from bertsmith.packed import pack
from bertsmith.recipe.load import encoder_parameters, load_recipe
from bertsmith.shrink.sharing import SharedShape, shared_model, shared_network
from tests.command_line import bertsmith as command
from tests.command_line import mistake
from tests.lively_networks import lively_network
from tests.toy_folder import write_toy_folder

TEXTS = [[2, 5, 6, 4, 7, 8, 3], [2, 9, 4, 10, 3]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy") / "toy"
    write_toy_folder(folder)
    return folder


@pytest.fixture(scope="module")
def bert(folder: Path) -> Bert:
    loaded = bertsmith.load(folder)
    with torch.no_grad():
        for parameter in loaded.model.network.parameters():
            parameter.mul_(3 if parameter.dim() > 1 else 1)
    return loaded


def layer(bert: Bert, number: int) -> dict[str, torch.Tensor]:
    return bert.model.network.encoder.blocks[number].state_dict()


def test_unshared_layers_and_a_whole_table_compute_the_same(bert, tmp_path):
    shared = shared_model(bert, SharedShape("none"))
    batch, network = pack(TEXTS), bert.model.network
    expected = network(batch)
    torch.testing.assert_close(shared.model.network(batch), expected, rtol=1e-5, atol=1e-5)
    words = network.scores_of_words(expected)
    torch.testing.assert_close(shared.model.network.scores_of_words(expected), words, rtol=1e-4, atol=1e-4)
    shared.save(tmp_path / "albert")
    theirs = transformers.AlbertModel.from_pretrained(tmp_path / "albert").eval()
    for text, ours in zip(TEXTS, expected.split([len(text) for text in TEXTS]), strict=True):
        found = theirs(torch.tensor([text])).last_hidden_state[0]
        torch.testing.assert_close(found, ours, rtol=0, atol=1e-4)


def test_a_group_shares_the_mean_of_its_layers_or_its_first(bert):
    mean, first = (shared_model(bert, SharedShape(take=take)) for take in ("average", "first"))
    assert len(mean.model.network.encoder.blocks) == 1
    for name, weights in layer(mean, 0).items():
        torch.testing.assert_close(weights, (layer(bert, 0)[name] + layer(bert, 1)[name]) / 2)
        assert torch.equal(layer(first, 0)[name], layer(bert, 0)[name])
    assert sorted(mean.model.network.heads) == ["mlm", "pooler"]  # an ALBERT has no next-sentence head


@pytest.mark.parametrize(("part", "shares"), [("attention", "attention"), ("ffn", "feed_forward")])
def test_only_a_part_is_shared_and_others_open_it_whole(bert, tmp_path, part, shares):
    shared = shared_model(bert, SharedShape(part))
    for number in (0, 1):
        for name, weights in layer(shared, number).items():
            of_group = (layer(bert, 0)[name] + layer(bert, 1)[name]) / 2
            own = layer(bert, number)[name]
            torch.testing.assert_close(weights, of_group if name.startswith(shares) else own)
    blocks = shared.model.network.encoder.blocks
    assert getattr(blocks[0], shares) is getattr(blocks[1], shares)
    shared.save(tmp_path / "albert")
    assert read_json(tmp_path / "albert" / "config.json", remedy="")["num_hidden_groups"] == 2
    theirs = transformers.AlbertModel.from_pretrained(tmp_path / "albert").eval()
    expected = read_model(tmp_path / "albert").network(pack(TEXTS[:1]))
    found = theirs(torch.tensor(TEXTS[:1])).last_hidden_state[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_a_narrower_table_keeps_the_principal_directions(bert):
    batch, network = pack(TEXTS), bert.model.network
    expected = network.encoder.embeddings(batch)
    errors = []
    for width in (4, 16, 32, 63):
        shared = shared_model(bert, SharedShape("none", embedding_width=width)).model.network
        found = shared.encoder.embeddings(batch)
        errors.append(((found - expected).square().mean() / expected.square().mean()).item())
        assert shared.encoder.embeddings.words.weight.shape[1] == width
        assert "mlm" not in shared.heads
    assert errors == sorted(errors, reverse=True) and errors[-1] < 0.05


def test_what_lies_in_few_directions_is_the_same_in_a_narrow_table():
    network = lively_network("bert", {"pooler": 0})
    with torch.no_grad():
        for table in (network.encoder.embeddings.words, *network.encoder.embeddings.added.values()):
            table.weight[:, 5:] = table.weight[:, :1]  # five directions of 32, and a mean
    own = {"model_type": "albert", "embedding_width": 8, "groups": network.config.layers}
    shared = shared_network(network, AlbertConfig(**vars(network.config) | own))
    torch.testing.assert_close(shared(pack(TEXTS)), network(pack(TEXTS)), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("width", "unshared", "shared"), [(64, 87, 10), (128, 89, 12), (256, 93, 16), (768, 108, 31)]
)
def test_the_parameters_of_the_papers_table(width, unshared, shared):
    # ALBERT, table 3: millions of ALBERT-Base by embedding width; those that share count the pooler, others
    # do not. At 768 the paper has no product between table and layers; transformers, and we, always have it.
    dense = 768 * 768 + 768
    product = dense if width == 768 else 0
    for sharing, millions in (("none", unshared), ("all", shared)):
        model = load_recipe(
            "albert-base", [f"model.sharing={sharing}", f"model.embedding_width={width}"]
        ).model
        beside = product + (dense if sharing == "none" else 0)
        assert round((encoder_parameters(model, 30_000) - beside) / 1e6) == millions


def test_the_command_writes_a_folder_and_tells_its_size(capsys, folder, tmp_path):
    told = command(capsys, "share", "--model", folder, "--out", tmp_path / "shared", "--sharing", "ffn")
    assert (
        told.code == 0
        and "left out: nsp" in told.out
        and "transformers does not support this sharing" in told.out
    )
    assert bertsmith.load(tmp_path / "shared").fill("the [MASK] sits .")
    told = command(capsys, "share", "--model", folder, "--out", tmp_path / "all", "--json")
    assert '"heads": ["mlm", "pooler"]' in told.out


@pytest.mark.parametrize(
    ("words", "word"),
    [
        (("--sharing", "some"), "'--sharing': 'some' is not one of 'all'"),
        (("--take", "last"), "'--take': 'last' is not one of 'average'"),
        (("--groups", "3"), "3 is not a possible value"),
        (("--embedding-width", "65"), "65 is not a possible value"),
        (("--out", "."), "."),
    ],
)
def test_mistakes_are_one_line(capsys, folder, tmp_path, words, word):
    assert word in mistake(capsys, "share", "--model", folder, "--out", tmp_path / "shared", *words)
    assert not (tmp_path / "shared").exists()


def test_only_a_bert_becomes_an_albert(bert):
    network = lively_network("modernbert", {})
    with pytest.raises(UserError, match="only a BERT"):
        shared_model(Bert(replace(bert.model, network=network), bert.tokenizer, device="cpu"), SharedShape())
