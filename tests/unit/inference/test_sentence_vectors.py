"""Vectors as a folder of sentence-transformers asks for them: pooling, normalisation, prompts, lengths."""

import json
from pathlib import Path

import pytest
import torch
import transformers

import bertsmith
from bertsmith.core.errors import UserError
from tests.oracles import saved_oracle
from tests.sentence_folders import write, write_modules
from tests.toy_folder import toy_vocabulary, write_toy_folder

TEXTS = ["the sun is warm", "My dog runs.", "cold!"]
POOLS = {
    "cls": lambda states: states[0],
    "mean": lambda states: states.mean(0),
    "max": lambda states: states.amax(0),
    "mean_sqrt_len_tokens": lambda states: states.sum(0) / len(states) ** 0.5,
    "lasttoken": lambda states: states[-1],
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    """A bare encoder, as transformers wrote it."""
    folder = tmp_path_factory.mktemp("sentence") / "plain"
    write_toy_folder(folder)
    saved_oracle(folder, "bert", "Model", vocab_size=len(toy_vocabulary()))
    return folder


@pytest.fixture
def folder(plain, tmp_path) -> Path:
    copy = tmp_path / "folder"
    copy.mkdir()
    for file in plain.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def states_of(folder: Path, texts: list[str]) -> list[torch.Tensor]:
    """The last states of each text by itself, and the pooler's output, as transformers computes them."""
    model = transformers.AutoModel.from_pretrained(folder).eval()
    tokenizer = bertsmith.Tokenizer.load(folder)
    with torch.no_grad():
        return [model(torch.tensor([tokenizer.encode(text).ids])).last_hidden_state[0] for text in texts]


@pytest.mark.parametrize("is_normalized", [True, False])
@pytest.mark.parametrize("mode", POOLS)
def test_the_folder_says_how_states_are_pooled_and_whether_vectors_are_normalized(
    folder, mode, is_normalized
):
    write_modules(folder, mode, normalize=is_normalized)
    expected = torch.stack([POOLS[mode](states) for states in states_of(folder, TEXTS)])
    if is_normalized:
        expected = torch.nn.functional.normalize(expected)
    assert torch.allclose(bertsmith.load(folder).embed(TEXTS), expected, atol=1e-6, rtol=1e-6)


def test_what_is_given_goes_before_what_the_folder_says(folder):
    write_modules(folder, "cls", normalize=True, prompts={"query": "the cat "}, default="query")
    bert = bertsmith.load(folder)
    expected = torch.stack([states.amax(0) for states in states_of(folder, [f"my {text}" for text in TEXTS])])
    found = bert.embed(TEXTS, pooling="max", normalize=False, prompt="my ")
    assert torch.allclose(found, expected, atol=1e-5)


def test_a_plain_folder_gives_means_of_length_1_without_the_direction_of_an_empty_text(folder):
    means = torch.stack([states.mean(0) for states in states_of(folder, TEXTS)])
    nothing = torch.nn.functional.normalize(states_of(folder, [""])[0].mean(0), dim=0)
    expected = means - (means @ nothing)[:, None] * nothing
    bert = bertsmith.load(folder)
    assert torch.allclose(bert.embed(TEXTS), torch.nn.functional.normalize(expected), atol=1e-6)
    assert torch.allclose(bert.embed(TEXTS, normalize=False), expected, atol=1e-5)
    assert torch.equal(bert.embed(TEXTS, pooling="centred"), bert.embed(TEXTS))
    assert torch.allclose(bert.embed(TEXTS, pooling="mean", normalize=False), means, atol=1e-5)


def test_a_tokenizer_without_special_tokens_has_nothing_to_take_away(folder):
    write(folder / "tokenizer.json", without_template(bertsmith.Tokenizer.load(folder)))
    bert = bertsmith.load(folder)
    assert len(bert.tokenizer.encode("")) == 0
    assert torch.equal(bert.embed(TEXTS), bert.embed(TEXTS, pooling="mean"))


def without_template(tokenizer) -> dict:
    return {**json.loads(tokenizer.closed.to_str()), "post_processor": None}


def test_a_model_that_was_not_trained_for_similarity_says_so_once(folder, caplog):
    bert = bertsmith.load(folder)
    bert.embed(TEXTS, pooling="mean")  # who chooses a pooling is not told about the default one
    assert not caplog.records
    for _ in range(2):
        bert.embed(TEXTS)
    (told,) = [each.getMessage() for each in caplog.records]
    assert told.startswith(f"{folder}: ") and "probably not trained for similarity" in told


def test_a_folder_of_sentence_transformers_is_not_warned_of(folder, caplog):
    write_modules(folder, "mean")
    bertsmith.load(folder).embed(TEXTS)
    assert not caplog.records


def test_the_output_of_the_pooler_is_a_vector_too(folder):
    model = transformers.AutoModel.from_pretrained(folder).eval()
    bert = bertsmith.load(folder)
    with torch.no_grad():
        expected = [model(torch.tensor([bert.tokenizer.encode(text).ids])).pooler_output for text in TEXTS]
    found = bert.embed(TEXTS, pooling="pooler", normalize=False)
    assert torch.allclose(found, torch.cat(expected), atol=1e-5)


def test_a_prompt_stands_before_each_text_but_hides_no_empty_one(folder):
    write_modules(folder, "mean", prompts={"query": "the cat ", "passage": ""}, default="query")
    bert = bertsmith.load(folder)
    behind = [f"the cat {text}" for text in TEXTS]
    assert torch.equal(bert.embed(TEXTS), bert.embed(behind, prompt=""))
    with pytest.raises(UserError, match="text 1: is empty"):
        bert.embed(["tea", " "])


def test_the_longest_text_is_the_folders(folder):
    write_modules(folder, "mean", longest=12)
    bert = bertsmith.load(folder)
    with pytest.raises(UserError, match="text 0: has 22 tokens, but the model takes 12"):
        bert.embed(["snow " * 20])
    assert torch.equal(bert.embed(["snow " * 20], truncate=True), bert.embed(["snow " * 10]))


def test_lower_case_is_made_where_the_folder_asks_for_it(folder):
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**tokenizer, "do_lower_case": False}))
    write_modules(folder, "mean", lower=True)
    bert = bertsmith.load(folder)
    assert torch.equal(bert.embed(["The SUN"]), bert.embed(["the sun"]))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"modes": ["cls", "mean"]}, "the pooling cls with mean, which"),
        ({"modes": ["weightedmean"]}, "the pooling weightedmean, which"),
        ({"more": "sentence_transformers.models.Dense"}, "the steps Transformer, Pooling, Dense, which"),
    ],
)
def test_steps_that_are_not_done_here_are_rejected_until_others_are_chosen(folder, change, said):
    write_modules(folder, "mean", **change)
    bert = bertsmith.load(folder)
    with pytest.raises(
        UserError, match=f"modules.json: this folder makes vectors by {said} bertsmith does not"
    ):
        bert.embed(TEXTS)
    assert bert.embed(TEXTS, pooling="mean", normalize=True).shape == (3, 32)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("modules.json", "{}", "modules.json: is not a list of modules with their types"),
        ("modules.json", "[", "modules.json: is not valid JSON"),
        ("modules.json", '[{"type": "a.Transformer", "path": "../x"}]', "outside of the folder"),
        ("modules.json", '[{"type": "a.Pooling", "path": ""}]', "Pooling module without a separate folder"),
        ("modules.json", '[{"type": "a.Pooling", "path": "./"}]', "Pooling module without a separate folder"),
        ("sentence_bert_config.json", '{"max_seq_length": "x"}', "max_seq_length is 'x'; write a whole"),
        ("config_sentence_transformers.json", '{"default_prompt_name": "q"}', "not one of its prompts"),
        ("config_sentence_transformers.json", '{"default_prompt_name": ["q"]}', "not one of its prompts"),
        ("config_sentence_transformers.json", '{"prompts": ["q"]}', r"prompts is \['q'\]; write it as"),
    ],
)
def test_a_broken_file_is_named(folder, name, text, said):
    write_modules(folder, "mean")
    (folder / name).write_text(text)
    with pytest.raises(UserError, match=said):
        bertsmith.load(folder)


@pytest.mark.parametrize("is_old", [False, True])
def test_saving_keeps_the_modules(folder, tmp_path, is_old):
    write_modules(folder, "cls", prompts={"query": "the cat "}, default="query", longest=20)
    if is_old:  # until 2021 the model had a folder of its own
        inner = folder / "0_Transformer"
        inner.mkdir()
        for file in [each for each in folder.iterdir() if each.is_file() and each.name != "modules.json"]:
            if file.name != "config_sentence_transformers.json":
                file.rename(inner / file.name)
        modules = json.loads((folder / "modules.json").read_text())
        modules[0]["path"] = "0_Transformer"
        (folder / "modules.json").write_text(json.dumps(modules))
    bert = bertsmith.load(folder)
    bert.save(tmp_path / "copy")
    again = bertsmith.load(tmp_path / "copy")
    assert torch.equal(again.embed(TEXTS), bert.embed(TEXTS))
    assert again.model.sentence == bert.model.sentence
    pooling = json.loads((tmp_path / "copy" / "1_Pooling" / "config.json").read_text())
    assert pooling["pooling_mode_cls_token"] is True
    (tmp_path / "copy" / "1_Pooling" / "notes.txt").write_text("mine")
    again.save(tmp_path / "copy")  # into the folder that it came from
    assert (tmp_path / "copy" / "1_Pooling" / "notes.txt").read_text() == "mine"
    assert torch.equal(bertsmith.load(tmp_path / "copy").embed(TEXTS), bert.embed(TEXTS))
