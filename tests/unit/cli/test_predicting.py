"""The verbs that ask a model, as people use them."""

import gzip
import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import bertsmith as package
from bertsmith.cli.answer import excerpt
from bertsmith.cli.presenting import BAR_WIDTH, bar
from bertsmith.model.folder.model_folder import Model, read_model, write_model
from bertsmith.model.network import new_network
from bertsmith.recipe.finetuning_schema import AnswersSection, TextSection
from bertsmith.tasks.task_config import TaskConfig
from tests.command_line import bertsmith, mistake
from tests.sentence_folders import write_modules
from tests.toy_folder import write_toy_folder
from tests.unit.serve.serving import application_of, post
from tests.untrained_heads import numbered_labels, untrained

TEXT = TextSection(longest=48, longest_question=16)
GUIDE = Path(__file__).parents[3] / "docs" / "using.md"
PASSAGE = "the cat sits in \N{SLIGHTLY SMILING FACE} paris, and the dog in london"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder for each ability."""
    place = tmp_path_factory.mktemp("folders")
    write_toy_folder(place / "plain")
    note = TaskConfig(task="stsb", kind="regress", metrics=(), pairs=True, text=TEXT)
    never = TaskConfig(
        task="squad2", kind="span", metrics=(), text=TEXT, answers=AnswersSection(null_threshold=-1e9)
    )
    always = never.model_copy(update={"answers": AnswersSection(null_threshold=1e9)})
    untrained(place / "classes", {"classify": 3}, **numbered_labels("bad", "fair", "good"))
    kind = "multi_label_classification"
    untrained(place / "several", {"classify": 6}, problem_type=kind, **numbered_labels(*"abcdef"))
    untrained(place / "numbers", {"classify": 1}, note=note)
    untrained(place / "single", {"classify": 1}, note=note.model_copy(update={"pairs": False}))
    untrained(place / "names", {"tag": 3}, **numbered_labels("O", "B-city", "I-city"))
    untrained(place / "words", {"tag": 2}, **numbered_labels("NOUN", "VERB"))
    untrained(place / "answers", {"span": 2}, note=always)
    untrained(place / "no-answers", {"span": 2}, note=never)
    return place


def said(capsys, *words):
    """The JSON that a command prints."""
    told = bertsmith(capsys, *words, "--json")
    assert told.code == 0, told
    return json.loads(told.out)


def shown(capsys, *words):
    """The lines that a command prints."""
    told = bertsmith(capsys, *words)
    assert told.code == 0, told
    return told.out.splitlines()


# ---- fill


def test_the_own_model_fills_a_mask_and_draws_how_sure_it_is(capsys):
    text, first, *rest = shown(capsys, "fill", "Paris is the [MASK] of France.", "--top", 3)
    assert text == "Paris is the [MASK] of France."
    assert first.split()[0].endswith("%") and first.split()[-1] == "capital"
    assert first.count("█") > rest[0].count("█") and len(rest) == 2


def test_each_of_several_masks_has_its_guesses_and_its_place(capsys, folders):
    text = "The [MASK] sits under the [MASK]."
    found = said(capsys, "fill", text, "--top", 2, "--model", folders / "plain")
    assert [text[mask["start"] : mask["end"]] for mask in found["masks"]] == ["[MASK]", "[MASK]"]
    expected = package.load(folders / "plain").fill(text, top=2)
    for mask, guesses in zip(found["masks"], expected, strict=True):
        assert [each["token"] for each in mask["guesses"]] == [guess.token for guess in guesses]
    assert len(shown(capsys, "fill", text, "--top", 2, "--model", folders / "plain")) == 6


def test_masks_that_are_filled_together_give_whole_texts(capsys, folders):
    words = ("fill", "The [MASK] sits [MASK].", "--together", "--top", 2, "--model", folders / "plain")
    found = said(capsys, *words)["fillings"]
    expected = package.load(folders / "plain").fill_jointly("The [MASK] sits [MASK].", top=2, beam=10)
    assert [each["text"] for each in found] == [each.text for each in expected]
    lines = shown(capsys, *words)
    assert [line.split("  ")[-1].strip() for line in lines] == [each.text for each in expected]


def test_an_extended_text_says_what_each_token_cost_and_why(capsys, folders):
    words = ("fill", "The boy", "--extend", 3, "--model", folders / "plain")
    found = said(capsys, *words)
    assert found["text"].startswith("The boy") and len(found["added"]) == 3
    assert [each["tokens_read"] for each in found["added"]] == [7, 8, 9]
    assert found["ms_per_token"] == sorted(each["ms"] for each in found["added"])[1] > 0
    longer, _, cost, why = shown(capsys, *words)
    assert longer == found["text"]
    assert "ms per token: 7 tokens were read for the first one, 9 for the last" in cost
    assert "Nothing can be kept from one token to the next" in why


def test_a_model_of_one_side_is_not_said_to_look_at_both(capsys, tmp_path):
    write_toy_folder(tmp_path / "left")
    config = replace(read_model(tmp_path / "left").network.config, direction="left-to-right")
    network = new_network(config, {"mlm": 0}, torch.Generator().manual_seed(0))
    write_model(tmp_path / "left", Model(network))
    *_, why = shown(capsys, "fill", "The boy", "--extend", 1, "--model", tmp_path / "left")
    assert "This model only looks to the left" in why and "to its right" not in why


# ---- next


def test_what_follows_is_reported(capsys):
    pair = ("We got some time.", "Should we get some coffee?")
    found = said(capsys, "next", *pair)
    assert found["follows"] and found["probability"] > 0.5
    first, second = shown(capsys, "next", *pair)
    assert first.endswith("B follows A") and second.endswith("B does not follow A")


def test_what_does_not_follow_comes_first_too(capsys):
    first, _ = shown(capsys, "next", "The battle was lost.", "Add two spoons of sugar and stir.")
    assert first.endswith("B does not follow A")


# ---- answer


def test_a_passage_comes_from_a_file_the_standard_input_or_the_line_itself(
    capsys, folders, tmp_path, monkeypatch
):
    (tmp_path / "story.txt").write_text(PASSAGE, encoding="utf-8")
    asked = ("answer", "where is the cat?", "--model", folders / "answers")
    found = said(capsys, *asked, "--passage-text", PASSAGE)
    assert said(capsys, *asked, "--passage", tmp_path / "story.txt") == found
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(PASSAGE.encode())))
    assert said(capsys, *asked, "--passage", "-") == found
    assert len(found["answers"]) == 3 and not found["no_answer"]
    assert 0 < found["no_answer_probability"] < 1
    best = found["answers"][0]
    assert PASSAGE[best["start"] : best["end"]] == best["text"] != ""


def test_that_there_is_no_answer_is_an_answer(capsys, folders):
    asked = ("answer", "where?", "--passage-text", PASSAGE, "--model", folders / "no-answers", "--best", 2)
    found = said(capsys, *asked)
    assert found["no_answer"] and found["answers"][0]["start"] == -1
    assert found["answers"][0]["probability"] == found["no_answer_probability"]
    passage, first, second, *_ = shown(capsys, *asked)
    assert passage == PASSAGE
    assert first.endswith("no answer in the passage") and second.split("  ")[-1].strip() in PASSAGE


@pytest.mark.parametrize(
    ("folder", "told"), [("no-answers", "No answer, though"), ("answers", "An answer, ")]
)
def test_that_the_threshold_decided_against_the_most_probable_is_reported(capsys, folders, folder, told):
    decided = 0
    for passage in ("my dog", PASSAGE, "the cat sleeps", "snow and rain, sun and tea"):
        asked = ("answer", "where?", "--passage-text", passage, "--model", folders / folder, "--best", 20)
        found = said(capsys, *asked)
        best = max(found["answers"], key=lambda each: each["probability"])
        assert found["decided_by_threshold"] == (found["answers"][0]["probability"] < best["probability"])
        *_, last = shown(capsys, *asked[:-1], 1)  # where the more probable one is not printed
        is_told = last.startswith(told) and last.endswith("no-answer threshold decided.")
        assert is_told == found["decided_by_threshold"]
        other = f"“{best['text']}”" if best["text"] else "no answer"
        assert (f"though {other} is more probable ({best['probability']:.1%})" in last) == is_told
        decided += is_told
    assert decided


def test_the_answer_is_highlighted_among_its_neighbours():
    passage = "a" * 1000 + " paris " + "b" * 1000
    drawn = excerpt(passage, SimpleNamespace(text="paris", start=1001, end=1006))
    assert drawn.plain.startswith("…a") and drawn.plain.endswith("b…") and len(drawn.plain) == 607
    (span,) = drawn.spans
    assert drawn.plain[span.start : span.end] == "paris"
    whole = excerpt("paris", SimpleNamespace(text="paris", start=0, end=5))
    assert whole.plain == "paris"


# ---- classify


def test_one_text_gets_a_picture_of_all_classes(capsys, folders):
    lines = shown(capsys, "classify", "my dog runs", "--model", folders / "classes")
    found = said(capsys, "classify", "my dog runs", "--model", folders / "classes")
    best_first = sorted(found["probabilities"], key=lambda label: -found["probabilities"][label])
    assert [line.split()[-1] for line in lines] == best_first
    assert found["label"] == best_first[0]


def test_a_pair_gets_a_number_from_a_model_for_numbers(capsys, folders):
    words = ("classify", "the sun", "--second", "the snow is cold", "--model", folders / "numbers")
    (expected,) = package.load(folders / "numbers").score([("the sun", "the snow is cold")])
    assert said(capsys, *words)["score"] == pytest.approx(expected, abs=1e-6)
    assert float(shown(capsys, *words)[0]) == pytest.approx(expected, abs=1e-4)


def test_a_text_of_several_classes_names_them_all_the_most_probable_first(capsys, folders, tmp_path):
    (tmp_path / "texts.txt").write_text("the sun is warm\n")
    (line,) = shown(capsys, "classify", "--input", tmp_path / "texts.txt", "--model", folders / "several")
    (found,) = package.load(folders / "several").classify(["the sun is warm"])
    labels, probability, _ = line.split("\t")
    shares = [found.probabilities[label] for label in labels.split(",")]
    assert sorted(labels.split(",")) == sorted(found.labels)
    assert shares == sorted(shares, reverse=True) != [found.probabilities[label] for label in found.labels]
    assert float(probability) == pytest.approx(shares[0], abs=1e-5)


# ---- tag


def test_words_stand_in_columns_and_entities_are_named_in_place(capsys, folders):
    text = "my dog runs \N{FIRE} in london, the cat sleeps"
    found = said(capsys, "tag", text, "--model", folders / "names")
    assert [text[word["start"] : word["end"]] for word in found["words"]] == [
        word["text"] for word in found["words"]
    ]
    entities = package.load(folders / "names").entities(text)
    assert [each["text"] for each in found["entities"]] == [each.text for each in entities]
    assert entities
    *lines, empty, marked = shown(capsys, "tag", text, "--model", folders / "names")
    assert [line.split()[0] for line in lines] == [word["text"] for word in found["words"]]
    assert [line.split()[1] for line in lines] == [word["tag"] for word in found["words"]]
    plain = [line.replace("\N{FIRE}", "xx") for line in lines]  # two columns wide
    assert len({line.index("%") for line in plain}) == 1
    assert empty == "" and marked.count("[city]") == len(entities)
    assert marked.replace(" [city]", "") == text


def test_tags_that_mark_no_stretches_are_words_alone(capsys, folders):
    lines = shown(capsys, "tag", "my dog runs", "--model", folders / "words")
    assert len(lines) == 3
    assert said(capsys, "tag", "my dog runs", "--model", folders / "words")["entities"] == []


# ---- one shape


@pytest.mark.parametrize(
    ("folder", "words", "path", "body"),
    [
        ("plain", ("fill", "the [MASK] \N{FIRE} [MASK]"), "/fill", {"text": "the [MASK] \N{FIRE} [MASK]"}),
        ("plain", ("next", "a cat", "a dog"), "/next", {"first": "a cat", "second": "a dog"}),
        ("classes", ("classify", "my dog"), "/classify", {"texts": ["my dog"]}),
        ("several", ("classify", "my dog"), "/classify", {"texts": ["my dog"]}),
        ("numbers", ("classify", "a", "--second", "b"), "/classify", {"texts": [["a", "b"]]}),
        ("names", ("tag", "my dog in london"), "/tag", {"texts": ["my dog in london"]}),
        (
            "answers",
            ("answer", "?", "--passage-text", PASSAGE),
            "/answer",
            {"question": "?", "passage": PASSAGE},
        ),
        ("plain", ("compare", "a cat", "a dog"), "/compare", {"texts": ["a cat", "a dog"]}),
    ],
)  # fmt: skip
def test_json_is_that_of_the_server(capsys, folders, folder, words, path, body):
    here = said(capsys, *words, "--model", folders / folder, "--precision", "fp32", "--device", "cpu")
    application = application_of({"it": folders / folder})
    reply = post(application, path, body).json()
    assert reply.pop("model") == "it"
    there = reply["results"][0] if "results" in reply else reply
    assert here == approximately(there)


@pytest.mark.parametrize(
    ("folder", "name", "words"),
    [
        ("plain", "fill --together", ("fill", "The [MASK] sits [MASK].", "--together")),
        ("plain", "fill --extend", ("fill", "The cat", "--extend", 1)),
        ("classes", "classify --input", ("classify", "--input", "texts.txt")),
        ("plain", "embed", ("embed", "--input", "texts.txt", "--out", "vectors.npy")),
    ],
)
def test_json_of_its_own_is_as_the_guide_shows_it(
    capsys, folders, tmp_path, monkeypatch, folder, name, words
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.txt").write_text("my dog runs\n")
    (row,) = [line for line in GUIDE.read_text().splitlines() if line.startswith(f"| `{name}` | `{{")]
    shown_there = json.loads(row.split("`")[3])
    assert shape(said(capsys, *words, "--model", folders / folder)) == shape(shown_there)


def shape(value):
    """A JSON value without its numbers and texts; of a list the first stands for all."""
    if isinstance(value, dict):
        return {key: shape(each) for key, each in value.items()}
    return [shape(value[0])] if isinstance(value, list) else type(value)


def approximately(value):
    """A JSON value whose numbers need not agree to the last digit."""
    if isinstance(value, dict):
        return {key: approximately(each) for key, each in value.items()}
    if isinstance(value, list):
        return [approximately(each) for each in value]
    return pytest.approx(value, abs=1e-5) if isinstance(value, float) else value


# ---- compare


def test_two_texts_have_one_cosine_and_three_a_matrix(capsys, folders):
    texts = ("my dog runs", "the cat sleeps", "snow")
    vectors = torch.nn.functional.normalize(package.load(folders / "plain").embed(texts))
    expected = vectors @ vectors.T
    found = said(capsys, "compare", *texts, "--model", folders / "plain")["similarity"]
    assert torch.allclose(torch.tensor(found), expected, atol=1e-5)
    (line,) = shown(capsys, "compare", *texts[:2], "--model", folders / "plain")
    assert line.split()[0] == f"{expected[0, 1]:.3f}"
    header, *rows = shown(capsys, "compare", *texts, "--model", folders / "plain")
    assert header.split() == ["1", "2", "3"]
    assert [row.split()[1] for row in rows] == [f"{value:.3f}" for value in expected[:, 0]]
    assert [row.split("  ")[-1] for row in rows] == list(texts)


def test_texts_are_compared_as_a_folder_of_sentence_transformers_says(capsys, folders, tmp_path):
    shutil.copytree(folders / "plain", tmp_path / "embedder")
    write_modules(tmp_path / "embedder", "cls", prompts={"query": "the cat "}, default="query")
    texts = ("my dog runs", "the cat sleeps", "snow")
    plain = package.load(folders / "plain")
    for words, prompt in (((), "the cat "), (("--prompt", "it is "), "it is ")):
        vectors = plain.embed(texts, pooling="cls", prompt=prompt)
        found = said(capsys, "compare", *texts, "--model", tmp_path / "embedder", *words)["similarity"]
        assert torch.allclose(torch.tensor(found), vectors @ vectors.T, atol=1e-5)


def test_a_bar_is_as_long_as_the_share():
    assert bar(0).strip() == "" and bar(1) == "█" * BAR_WIDTH
    assert bar(0.5).strip() == "█" * (BAR_WIDTH // 2)
    assert bar(-0.3) == bar(0) and bar(1.2) == bar(1)
    assert all(len(bar(share / 97)) == BAR_WIDTH for share in range(98))
    assert bar(1 / (8 * BAR_WIDTH)).strip() == "▏"


# ---- mistakes


WHAT_IT_CAN = "it can predict words, judge whether one sentence follows another, embed texts, show its inside"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("answer", "why?", "--passage-text", "so"), "cannot answer questions"),
        (("classify", "so"), "cannot classify texts"),
        (("tag", "so"), "cannot tag words"),
    ],
)
def test_what_the_own_encoder_cannot_do_another_of_the_package_can(capsys, words, complaint):
    line = mistake(capsys, *words, "--model", "bertsmith-small")
    assert f"{complaint}; {WHAT_IT_CAN}; remove --model" in line


def test_what_no_model_of_the_package_can_do_says_how_to_make_one(capsys):
    line = mistake(capsys, "choose", "so", "one", "another")
    assert f"cannot choose among texts; {WHAT_IT_CAN}; make one with bertsmith finetune swag" in line


@pytest.mark.parametrize("verb", [("fill", "a [MASK]"), ("next", "a", "b")])
def test_a_model_of_another_kind_points_to_the_own_one(capsys, folders, verb):
    line = mistake(capsys, *verb, "--model", folders / "classes")
    assert "it can classify texts, embed texts, show its inside; remove --model" in line


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("fill", "none"), "bertsmith: the text: lacks a [MASK]; write [MASK] in place of a token"),
        (("fill", "snow " * 200 + "[MASK]"), "the text: has 203 tokens, but the model takes 128; "),
        (("fill", "snow " * 200 + "[MASK]"), "or pass --truncate"),
        (("fill", "a [MASK]", "--extend", 2, "--together"), "--extend and --together exclude each other"),
        (("fill", "a", "--extend", 2, "--top", 5), "--extend and --top exclude each other; remove one"),
        (
            ("fill", "snow " * 200 + "[MASK]", "--truncate"),
            "the text: was cut to the model's 128 tokens, and the [MASK] was lost; shorten the",
        ),
        (("fill", "a [MASK]", "--extend", 2), "already has a [MASK]"),
        (("next", "a", " "), "bertsmith: the pair: its second text is empty; write some words"),
        (("next", "", "b"), "bertsmith: the pair: its first text is empty; write some words"),
        (("fill", "a [mask]."), "the text: lacks a [MASK]; write [MASK] in place of [mask]"),
        (("fill", "a <mask>."), "the text: lacks a [MASK]; write [MASK] in place of <mask>"),
        (("fill", "a ____."), "the text: lacks a [MASK]; write [MASK] in place of ____"),
        (("compare", "a"), "one text cannot be compared"),
        (("compare", "a", " "), "text 2: is empty"),
        (("fill", "a [MASK]", "--model", "nowhere"), "nowhere: this folder does not exist"),
    ],
)
def test_mistakes_are_one_line_in_words_of_the_command_line(capsys, folders, words, complaint):
    model = () if "--model" in words else ("--model", folders / "plain")
    assert complaint in mistake(capsys, *words, *model)


@pytest.mark.parametrize(
    ("folder", "words", "remedy"),
    [
        ("single", ("a", "--second", "b"), "remove --second, or the tab"),
        ("numbers", ("a",), "give the second text with --second, or after a tab"),
    ],
)
def test_a_text_of_another_form_is_reported_by_the_option(capsys, folders, folder, words, remedy):
    assert mistake(capsys, "classify", *words, "--model", folders / folder).strip().endswith(remedy)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("why?",), "give exactly one passage; --passage FILE"),
        (("why?", "--passage-text", "so", "--passage", "x"), "give exactly one passage"),
        (("why?", "--passage", "gone.txt"), "gone.txt: cannot be read"),
        ((" ", "--passage-text", "so"), "the question: is empty"),
        (("why?", "--passage-text", " \n"), "the passage: is empty"),
        (("why?", "--passage-text", ""), "the passage: is empty; write some words"),
        (("why?", "--passage-text", "", "--passage", "x"), "give exactly one passage"),
    ],
)
def test_a_question_needs_one_passage(capsys, folders, words, complaint):
    assert complaint in mistake(capsys, "answer", *words, "--model", folders / "answers")


@pytest.mark.parametrize(
    ("stream", "complaint"),
    [
        (None, "standard input: is closed; pipe the text in, or give a file"),
        (gzip.compress(b"so", mtime=0), "standard input: is compressed; unpack it: zcat FILE.gz | bertsmith"),
        (b"so \xff", "standard input: is not UTF-8 text (byte 3); convert"),
    ],
)
def test_a_passage_that_cannot_be_read_is_reported_in_one_line(
    capsys, folders, monkeypatch, stream, complaint
):
    given = None if stream is None else SimpleNamespace(buffer=io.BytesIO(stream))
    monkeypatch.setattr("sys.stdin", given)
    words = ("answer", "why?", "--passage", "-", "--model", folders / "answers")
    assert complaint in mistake(capsys, *words)


def test_a_long_text_is_cut_where_that_is_asked_for(capsys, folders):
    words = ("fill", "[MASK] " + "snow " * 200 + "[MASK]", "--model", folders / "plain", "--truncate")
    assert len(said(capsys, *words)["masks"]) == 1
