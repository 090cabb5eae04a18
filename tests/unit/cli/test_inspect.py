"""`bertsmith inspect` as people and machines see it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bertsmith.cli.inspect import inspect
from bertsmith.cli.verb import App
from bertsmith.core.errors import UserError
from tests import toy_tasks

app = App()
app.command()(inspect)


def run(*arguments: object) -> str:
    answer = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})
    if isinstance(answer.exception, UserError):
        raise answer.exception
    assert answer.exit_code == 0, answer.output
    return answer.stdout


@pytest.fixture
def reviews(tmp_path: Path) -> Path:
    """200 reviews with stars; every fourth has the text of the one before and another label."""
    path = tmp_path / "my.csv"
    rows = [f"film number {n - (n % 4 == 3)},{1 + n % 2}" for n in range(200)]
    path.write_text("review,stars\n" + "\n".join(rows) + "\n")
    return path


@pytest.fixture
def schemas(tmp_path: Path) -> Path:
    """A folder as WNLI has it, where development is training with the labels turned round."""
    header = "index\tsentence1\tsentence2\tlabel\n"
    (tmp_path / "train.tsv").write_text(header + "0\tIt fell.\tThe cup fell.\t1\n1\tHe ran.\tBob ran.\t0\n")
    (tmp_path / "dev.tsv").write_text(header + "0\tIt fell.\tThe mat fell.\t0\n1\tHe ran.\tJim ran.\t1\n")
    return tmp_path


def test_help_teaches_by_example() -> None:
    assert "bertsmith inspect my.csv --text review --label stars" in run("--help")


def test_a_file_is_looked_at_in_the_parts_that_training_sees(reviews) -> None:
    found = json.loads(run(reviews, "--text", "review", "--label", "stars", "--dev-share", "0.3", "--json"))
    train, dev = found["splits"]
    assert (train["name"], dev["name"]) == ("train", "dev")
    assert train["examples"] + dev["examples"] == 200
    assert {each["label"] for each in train["labels"]} == {"1", "2"}
    assert found["overlaps"][0]["pairs_other_label"] > 0
    assert found["overlaps"][0]["pairs_same_label"] == 0


def test_people_get_balance_baseline_shift_and_overlap(reviews) -> None:
    told = run(reviews, "--text", "review", "--label", "stars", "--dev-share", "0.3")
    for line in ("contradictions", "constant answer", "train to dev", "dev whole text in train"):
        assert line in told


def test_without_a_share_the_whole_file_is_training(reviews) -> None:
    arguments = (reviews, "--text", "review", "--label", "stars", "--dev-share", "0", "--json")
    (train,) = json.loads(run(*arguments))["splits"]
    assert (train["examples"], train["contradictions"]) == (200, 100)


def test_a_development_file_is_taken_whole(reviews, tmp_path) -> None:
    (tmp_path / "held.csv").write_text("review,stars\nfilm number 0,2\n")
    arguments = (reviews, "--text", "review", "--label", "stars", "--dev", tmp_path / "held.csv", "--json")
    found = json.loads(run(*arguments))
    assert [split["examples"] for split in found["splits"]] == [200, 1]
    assert found["overlaps"][0]["only_other_label"] == 1


def test_labels_that_a_terminal_would_obey_are_pointed_out(tmp_path) -> None:
    (tmp_path / "my.csv").write_text("review,stars\n" + "good,\x1b[31mred\nbad,blue\n" * 5)
    told = run(tmp_path / "my.csv", "--text", "review", "--label", "stars")
    assert "contains control characters" in told and "\x1b" not in told


def test_a_task_shows_overlap_of_first_texts_with_opposite_labels(schemas) -> None:
    told = run("--task", "wnli", "--data", schemas)
    assert "2 examples (100.0%), 2 of them with another label only" in told
    assert "train entailment" in told
    assert "dev is adversarial: of 2 examples (100%) the first text also occurs in train" in told
    assert told.count("adversarial") == 1
    assert "65 % of WNLI's test set are not_entailment" in told
    assert f"{schemas / 'dev.tsv'}:2" in told


def test_numbers_are_reported_by_their_spread(tmp_path) -> None:
    path = tmp_path / "my.tsv"
    path.write_text("text\tscore\n" + "".join(f"text {n}\t{n}\n" for n in range(50)))
    told = run(path, "--text", "text", "--label", "score", "--kind", "regress")
    assert "deviation" in told
    assert "root mean squared error" in told


def test_many_labels_are_cut_short(tmp_path) -> None:
    path = tmp_path / "my.csv"
    path.write_text("text,label\n" + "".join(f"text {n},class {n:02}\n" for n in range(40)))
    told = run(path, "--text", "text", "--label", "label", "--dev-share", "0")
    assert "... and 28 more labels" in told


@pytest.mark.parametrize("arguments", [(), ("my.csv",), ("my.csv", "--label", "stars"), ("--task", "wnli")])
def test_half_a_question_is_answered_with_the_whole_one(arguments) -> None:
    with pytest.raises(UserError) as error:
        run(*arguments)
    assert "--data FOLDER" in error.value.remedy


def test_ids_decide_the_parts_as_they_do_in_training(tmp_path) -> None:
    def dev_texts(rows: list[int]) -> int:
        path = tmp_path / "my.csv"
        path.write_text("id,review,stars\n" + "".join(f"{n},film {n},{n % 2}\n" for n in rows))
        words = (path, "--text", "review", "--label", "stars", "--dev-share", "0.3", "--id", "id", "--json")
        return json.loads(run(*words))["splits"][1]["examples"]

    assert dev_texts(list(range(100))) == dev_texts(list(range(99, -1, -1)))
    with pytest.raises(UserError, match="lacks the column 'key'"):
        run(tmp_path / "my.csv", "--text", "review", "--label", "stars", "--id", "key")


def test_a_tiny_file_is_all_training(tmp_path) -> None:
    path = tmp_path / "my.csv"
    path.write_text("review,stars\na,1\nb,2\nc,1\n")
    (train,) = json.loads(run(path, "--text", "review", "--label", "stars", "--json"))["splits"]
    assert train["examples"] == 3


def test_a_test_file_needs_no_labels(reviews, tmp_path) -> None:
    (tmp_path / "new.csv").write_text("review\nfilm number 0\nanother film\n")
    (alone,) = json.loads(run(tmp_path / "new.csv", "--text", "review", "--json"))["splits"]
    assert (alone["name"], alone["examples"], alone["unlabelled"]) == ("test", 2, 2)
    words = (reviews, "--text", "review", "--label", "stars", "--test", tmp_path / "new.csv")
    (line,) = [line for line in run(*words, "--dev-share", "0").splitlines() if "test whole text" in line]
    assert line.split("in train")[1].strip() == "1 examples (50.0%)"
    found = json.loads(run(*words, "--json"))
    assert [split["name"] for split in found["splits"]] == ["train", "dev", "test"]
    assert found["shifts"][1]["labels"] is None
    with pytest.raises(UserError, match="a training set needs a label column"):
        run(reviews, "--text", "review", "--test", tmp_path / "new.csv")


def test_the_test_file_of_a_task_is_inspected_as_what_it_is(schemas) -> None:
    (schemas / "test.tsv").write_text("index\tsentence1\tsentence2\n0\tIt fell.\tThe cup fell.\n")
    found = json.loads(run("--task", "wnli", "--data", schemas, "--json"))
    assert [(split["name"], split["unlabelled"]) for split in found["splits"]] == [
        ("train", 0),
        ("dev", 0),
        ("test", 1),
    ]
    (line,) = [line for line in run("--task", "wnli", "--data", schemas).splitlines() if "label ent" in line]
    assert line.split()[2:] == ["1", "(50.0%)", "1", "(50.0%)"]  # nothing is known of test's
    (alone,) = json.loads(run("--task", "wnli", "--data", schemas / "test.tsv", "--json"))["splits"]
    assert (alone["name"], alone["unlabelled"]) == ("test", 1)
    (dev,) = json.loads(run("--task", "wnli", "--data", schemas / "dev.tsv", "--json"))["splits"]
    assert (dev["name"], dev["examples"]) == ("dev", 2)


@pytest.mark.parametrize(
    ("task", "write", "row"),
    [
        ("wnut17", toy_tasks.wnut17, "label B-location"),
        ("squad2", toy_tasks.squad2, "label no answer"),
        ("swag", toy_tasks.swag, "label option 0"),
    ],
)
def test_tags_questions_and_choices_are_inspected(tmp_path, task, write, row) -> None:
    write(tmp_path)
    told = run("--task", task, "--data", tmp_path)
    assert row in told and "constant answer on dev" in told and "train to dev" in told
