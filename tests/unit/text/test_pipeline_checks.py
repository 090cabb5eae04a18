"""A tokenizer.json from elsewhere neither fills the memory nor takes for ever: it is refused in one line."""

import json
import random
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import bertsmith
from bertsmith.core.errors import UserError
from bertsmith.text.pipeline_checks import check_pipeline, has_nested_quantifiers, takes_for_ever
from bertsmith.text.tokenizer import Tokenizer
from tests.tokenizer_makers import MAKERS, uncased_wordpiece
from tests.toy_folder import write_toy_folder

Change = Callable[[dict[str, Any]], None]


def changed(folder: Path, change: Change) -> Path:
    """A tokenizer folder whose tokenizer.json says something else."""
    Tokenizer.load(uncased_wordpiece(folder)).save(folder)
    file = folder / "tokenizer.json"
    pipeline = json.loads(file.read_text())
    change(pipeline)
    file.write_text(json.dumps(pipeline))
    return folder


def highest_id(pipeline: dict[str, Any]) -> None:
    pipeline["model"]["vocab"]["bomb"] = 2**32 - 1


def highest_added_id(pipeline: dict[str, Any]) -> None:
    added = {flag: False for flag in ("single_word", "lstrip", "rstrip", "normalized", "special")}
    pipeline["added_tokens"].append({"id": 2**32 - 1, "content": "bomb", **added})


def chained(pipeline: dict[str, Any]) -> None:
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
    pipeline["normalizer"] = {"type": "Sequence", "normalizers": [step] * 10}


def catastrophic(pipeline: dict[str, Any]) -> None:
    pattern = {"Regex": "(a+)+$"}
    pipeline["pre_tokenizer"] = {
        "type": "Split",
        "pattern": pattern,
        "behavior": "Isolated",
        "invert": False,
    }


def without_text(pipeline: dict[str, Any]) -> None:
    single = pipeline["post_processor"]["single"]
    pipeline["post_processor"]["single"] = [part for part in single if "Sequence" not in part]


def without_second(pipeline: dict[str, Any]) -> None:
    pair = pipeline["post_processor"]["pair"]
    pipeline["post_processor"]["pair"] = [
        part for part in pair if part.get("Sequence", {}).get("id", "A") == "A"
    ]


def undefined_token(pipeline: dict[str, Any]) -> None:
    del pipeline["post_processor"]["special_tokens"]["[SEP]"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (highest_id, "the highest id is 4294967295"),
        (highest_added_id, "the highest id is 4294967295|an added token cannot have the id"),
        (chained, "its normalizer replaces text by 10000000000 times as much"),
        (catastrophic, r"the pattern '\(a\+\)\+\$' in its pre_tokenizer repeats repetitions"),
        (without_text, "its template omits a text"),
        (undefined_token, r"its template names '\[SEP\]', not one of its special_tokens"),
        (without_second, "its template omits a text"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_tokenizer_that_is_a_bomb_is_refused_at_once(change: Change, message: str, tmp_path: Path) -> None:
    folder = changed(tmp_path, change)
    begin = time.process_time()
    with pytest.raises(UserError, match=message) as told:
        Tokenizer.load(folder)
    assert str(folder) in told.value.line()
    assert time.process_time() - begin < 5


def test_no_damage_to_a_template_makes_a_trace(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = changed(tmp_path, lambda _: None)
    whole = (folder / "tokenizer.json").read_text()
    values = [None, [], {}, "x", -1, 2**32, 1.5, [1], {"id": "A"}, {"Sequence": {"id": "B", "type_id": 0}}]
    chance = random.Random(0)
    for _ in range(60):
        pipeline = json.loads(whole)
        place = pipeline["post_processor"]
        while True:
            key = chance.choice(sorted(place) if isinstance(place, dict) else range(len(place)))
            if not isinstance(place[key], (dict, list)) or not place[key] or chance.random() < 0.3:
                break
            place = place[key]
        place[key] = chance.choice(values)
        (folder / "tokenizer.json").write_text(json.dumps(pipeline))
        with suppress(UserError):
            Tokenizer.load(folder).encode_pair("a", "a")
    assert capfd.readouterr().err == ""


def test_segments_that_the_model_does_not_have_are_refused(tmp_path: Path) -> None:
    write_toy_folder(tmp_path)
    Tokenizer.load(tmp_path).save(tmp_path)
    file = tmp_path / "tokenizer.json"
    pipeline = json.loads(file.read_text())
    pipeline["post_processor"]["single"][0]["SpecialToken"]["type_id"] = 7
    file.write_text(json.dumps(pipeline))
    with pytest.raises(UserError, match="the tokenizer numbers 8 segments but the model has 2"):
        bertsmith.load(tmp_path)


@pytest.mark.parametrize(
    "regex", ["(a+)+", "(?:a*)*b", "((a+)b)+", r"([a-z]+)*\d", "(a{2,})+", "(x+x+)+y", "(.*)*"]
)
def test_repetitions_of_repetitions_are_found(regex: str) -> None:
    assert has_nested_quantifiers(regex)


@pytest.mark.parametrize(
    "regex",
    ["(a|aa)+$", "(?:a|a)*b", "(aa?)+", r"(\w|\w\w)+", "(.|a)+", "(a{1,2})+", "(ab|a|b)+", "(01|10|0){2,}"],
)
def test_repeated_alternatives_that_read_one_text_in_two_ways_are_refused(regex: str) -> None:
    pipeline = {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": regex}}}
    with pytest.raises(UserError, match="in its pre_tokenizer repeats repetitions: it may take for ever"):
        check_pipeline(json.dumps(pipeline), where="tokenizer.json")


@pytest.mark.parametrize(
    "regex",
    [
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+",
        r"(a+)?b",
        r"(ab)+",
        r"(\+\*)+",
        r"([+*])+",
        r"(a+){1,3}",
        r"(ab|ac)+",
        r"(a|aa){1,3}",
        r"(?:\p{L}|\p{N})+",
        r"(?:[a-z]|\d)+",
        r"(?:'s|'t)*",
    ],
)
def test_the_patterns_of_the_usual_tokenizers_are_none(regex: str) -> None:
    assert not takes_for_ever(regex)


@pytest.mark.parametrize("maker", MAKERS, ids=lambda maker: maker.__name__)
def test_no_usual_tokenizer_is_taken_for_a_bomb(maker: Callable[[Path], Path], tmp_path: Path) -> None:
    Tokenizer.load(maker(tmp_path)).save(tmp_path / "saved")
    assert Tokenizer.load(tmp_path / "saved").encode("a").ids
