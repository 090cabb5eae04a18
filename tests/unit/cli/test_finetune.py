"""`bertsmith finetune` as people use it: one's own tables, seeds, grids, and every mistake in one line."""

import json
import random
import subprocess
import sys
import tomllib

import pytest

from bertsmith.cli.finetune import show, show_many
from bertsmith.finetuning.finetune import FinetuningResult
from bertsmith.studies import sweep
from tests.command_line import bertsmith, mistake
from tests.toy_tasks import sentence, sst2, warm_or_cold
from tests.tuning import QUICK, quickly, stop_at, toy_model

__all__ = ["quickly", "toy_model"]

FLAGS = ("run.epochs", "optim.peak_lr")
SETTINGS = [part for line in QUICK if not line.startswith(FLAGS) for part in ("--set", line)]
RATE = ("--lr", "2e-3")
SHORTLY = [*SETTINGS, *RATE, "--epochs", "0.5"]
OWN = ("--text", "review", "--label", "class")


@pytest.fixture
def give(capsys, model, tmp_path):
    """Gives a `finetune` command for the toy model, with everything in one folder."""

    def command(task, *words):
        return bertsmith(capsys, "finetune", task, "--model", model, "--out", tmp_path / "run", *words)

    return command


def table(path, header, rows):
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return path


@pytest.fixture
def reviews(tmp_path):
    """A table of 240 reviews: a number, a pair, classes, stars."""
    chance = random.Random(0)
    rows = []
    for number in range(240):
        text, warm = warm_or_cold(chance)
        tags = '"sunny,warm"' if warm else "cold"
        rows.append([number, text, sentence(chance), "hot" if warm else "icy", tags, 5 * warm])
    return table(tmp_path / "my.csv", "number,review,second,class,tags,stars", rows)


def unlabelled(tmp_path, header="review,second"):
    return table(
        tmp_path / "new.csv", header, [["the sun and a cat", "a dog"], ["snow under the tree", "a dog"]]
    )


def predicted(capsys, tmp_path, file):
    told = bertsmith(
        capsys, "predict", "--model", tmp_path / "run", "--input", file, "--out", tmp_path / "out.tsv"
    )
    assert told.code == 0, told
    return [line.split("\t") for line in (tmp_path / "out.tsv").read_text().splitlines()]


KINDS = {
    "classify": ("class", ("--epochs", "6"), "accuracy"),
    "multilabel": ("tags", ("--kind", "multilabel", "--epochs", "5"), "micro f1"),
    # The last weights: on a dozen held-out rows an untrained encoder's probe may look as good by chance.
    "regress": ("stars", ("--kind", "regress", "--epochs", "6", "--set", "run.keep=last"), "spearman"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_ones_own_table_is_learned_and_new_texts_are_predicted(give, capsys, reviews, tmp_path, kind):
    label, words, measure = KINDS[kind]
    told = give("custom", "--data", reviews, "--text", "review", "--label", label, *SETTINGS, *RATE, *words)
    assert told.code == 0, told
    (line,) = [line for line in told.out.splitlines() if line.strip().startswith(f"dev {measure}")]
    assert float(line.split(": ")[1]) > (70 if kind == "regress" else 90)
    assert "dev: " in told.out  # a tenth was kept for it
    header, *lines = predicted(capsys, tmp_path, unlabelled(tmp_path))
    expected = {
        "classify": (["id", "prediction", "hot", "icy"], ["hot", "icy"]),
        "multilabel": (["id", "prediction", "cold", "sunny", "warm"], ["sunny,warm", "cold"]),
        "regress": (["id", "prediction"], None),
    }[kind]
    assert header == expected[0]
    guesses = [line[1] for line in lines]
    if expected[1]:
        assert guesses == expected[1]
    else:
        assert float(guesses[0]) > float(guesses[1])


def test_pairs_are_two_columns(give, capsys, reviews, tmp_path):
    columns = ("--text", "review", "--text2", "second", "--label", "class")
    assert give("custom", "--data", reviews, *columns, *SHORTLY).code == 0
    assert json.loads((tmp_path / "run" / "model" / "task.json").read_text())["pairs"] is True
    assert len(predicted(capsys, tmp_path, unlabelled(tmp_path))) == 3
    line = mistake(
        capsys,
        "predict",
        "--model",
        tmp_path / "run",
        "--input",
        unlabelled(tmp_path, "review,other"),
        "--out",
        tmp_path / "o.csv",
    )
    assert "new.csv:1: lacks the column 'second'" in line


def test_every_line_of_a_file_is_predicted_whatever_its_name(give, capsys, reviews, tmp_path):
    give("custom", "--data", reviews, "--text", "review", "--label", "class", *SHORTLY)
    for name in ("train-new.csv", "devices.csv", "train.csv", "dev.csv"):
        (tmp_path / name).write_text(reviews.read_text())
        assert len(predicted(capsys, tmp_path, tmp_path / name)) == 241


def test_a_folder_with_its_own_development_set_is_taken_whole(give, reviews, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for name, lines in (("train", slice(0, 200)), ("dev", slice(200, 240))):
        header, *rows = reviews.read_text().splitlines()
        (folder / f"{name}.csv").write_text("\n".join([header, *rows[lines]]) + "\n")
    told = give("custom", "--data", folder, "--text", "review", "--label", "class", *SHORTLY)
    assert "train: 200 examples" in told.out and "dev: 40 examples" in told.out


def test_seeds_are_reported_with_mean_median_and_deviation(give, tmp_path):
    told = give("sst2", "--data", sst2(tmp_path / "data"), "--seeds", "2", *SHORTLY)
    lines = told.out.splitlines()
    assert [line.split(":")[0] for line in lines if line.startswith("seed-")] == ["seed-0", "seed-1"]
    assert any(line.startswith("dev accuracy: mean ") and line.endswith("over 2 runs") for line in lines)
    assert lines[-1].startswith("best: seed-")


def test_the_grid_is_reported_with_its_best_run(give, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "GRID", {"run.examples": (80, 160)})
    words = [word for line in QUICK if "examples" not in line for word in ("--set", line)]
    told = give("sst2", "--data", sst2(tmp_path / "data"), "--grid", "--json", *words, "--epochs", "0.5")
    summary = json.loads(told.out.splitlines()[-1])
    assert list(summary["runs"]) == ["examples-80", "examples-160"]
    assert summary["best"] in summary["runs"]
    assert summary["spreads"]["dev"]["accuracy"]["runs"] == 2


def test_a_stopped_run_exits_with_130_and_resumes(give, tmp_path):
    words = ("sst2", "--data", sst2(tmp_path / "data"), *SHORTLY)
    with stop_at(1):
        told = give(*words)
    assert told.code == 130
    assert "stopped after 2 steps; run the same command again to resume" in told.out
    again = give(*words)
    assert again.code == 0
    assert "resumes from step 2" in again.out
    assert "160 examples, 5 steps" in again.out


def test_stopped_seeds_say_where(give, tmp_path):
    words = ("sst2", "--data", sst2(tmp_path / "data"), "--seeds", "2", *SHORTLY)
    with stop_at(6):
        told = give(*words)
    assert (told.code, "stopped in seed-1; run the same command again" in told.out) == (130, True)
    with stop_at(1):
        told = give(*words, "--json")
    assert json.loads(told.out.splitlines()[-1]) == {"finished": False, "stopped_in": "seed-1"}


def test_the_seeds_begin_with_the_one_that_is_named(give, tmp_path):
    data = sst2(tmp_path / "data")
    told = give("sst2", "--data", data, "--seed", "12345678", "--seeds", "2", *SHORTLY)
    assert [line.split(":")[0] for line in told.out.splitlines() if line.startswith("seed-")] == [
        "seed-12345678",
        "seed-12345679",
    ]
    assert "seed = 12_345_679" in (tmp_path / "run" / "seed-12345679" / "recipe.toml").read_text()


def test_a_development_file_of_ones_own_is_evaluated_on(give, reviews, tmp_path):
    rows = [["the sun", "hot"], ["snow", "icy"], ["my tea", "hot"]]
    held = table(tmp_path / "held.csv", "review,class", rows)
    told = give("custom", "--data", reviews, *OWN, "--dev", held, *SHORTLY)
    assert told.code == 0, told
    assert "train: 240 examples\ndev: 3 examples\n" in told.out


def test_shares_decide_how_much_is_held_back(give, reviews):
    shares = ("--dev-share", "0.4", "--test-share", "0.1")
    told = give("custom", "--data", reviews, *OWN, "--id", "number", *shares, *SHORTLY)
    assert "train: 120 examples\ndev: 96 examples\ntest-part: 24 examples\n" in told.out
    assert "  dev constant answer: accuracy " in told.out and "  test-part constant answer: " in told.out
    assert "  dev 'hot': precision " in told.out


def test_folds_and_searches_are_told_with_their_spread_and_best_run(give, reviews):
    told = give("custom", "--data", reviews, *OWN, "--folds", "2", *SHORTLY)
    assert "[2/2] fold-1" in told.out and "best: fold-" in told.out
    assert "over 2 runs" in told.out and "  dev constant answer: accuracy " in told.out


def test_short_names_reach_the_settings(give, reviews, tmp_path):
    words = ("--batch", "8", "--max-length", "32", "--patience", "3", "--limit", "40", "--device", "cpu")
    told = give(
        *("custom", "--data", reviews, *OWN, *words, "--precision", "fp32"),
        *("--tune-thresholds", "--epochs", "0.5", "--minutes", "30"),
    )
    assert told.code == 0, told
    recipe = tomllib.loads((tmp_path / "run" / "recipe.toml").read_text())
    run = recipe["run"]
    found = (run["examples"], recipe["text"]["longest"], run["patience"], run["keep"], run["limit"])
    assert found == (8, 32, 3, "best", 40)
    assert (run["device"], run["precision"]) == ("cpu", "fp32")
    assert recipe["answers"]["label_thresholds"] == "tuned"
    assert run["minutes"] == 30 and "(3 steps) or 30 minutes, whichever ends first" in told.out


@pytest.mark.parametrize(
    ("task", "words", "told"),
    [
        ("squad", (), "--quick: SQuAD 1.1 does not have a linear head to solve; remove it"),
        (
            "sst2",
            ("--minutes", "1"),
            "--quick --minutes: a head that is solved takes no steps; remove one of them",
        ),
        (
            "sst2",
            ("--patience", "2"),
            "--quick --patience: a head that is solved takes no steps; remove one of them",
        ),
        ("sst2", ("--seeds", "2"), "--quick --seeds: a solved head is the same in every run; remove --seeds"),
        ("sst2", ("--random", "3"), "--quick --random: a solved head is the same in every run"),
    ],
)
def test_quick_is_refused_where_there_is_nothing_to_solve_or_to_try(capsys, tmp_path, task, words, told):
    line = mistake(capsys, "finetune", task, "--data", tmp_path, "--out", tmp_path / "run", "--quick", *words)
    assert told in line
    assert not (tmp_path / "run").exists()


def test_a_column_of_numbers_is_not_taken_for_classes(give, capsys, tmp_path):
    own = table(tmp_path / "own.csv", "review,price", [[f"text {n}", f"{n}.5"] for n in range(60)])
    words = ("--data", own, "--text", "review", "--label", "price", "--out", tmp_path / "out")
    line = mistake(capsys, "finetune", "custom", *words)
    assert (
        "'price' has 60 different labels in 60 training rows, all of them numbers; add --kind regress" in line
    )
    assert not (tmp_path / "out").exists()


def test_that_the_constant_answer_is_not_beaten_is_said_once(give, tmp_path):
    own = table(
        tmp_path / "own.csv", "review,class", [["the sun", "hot" if n % 3 else "icy"] for n in range(90)]
    )
    told = give("custom", "--data", own, *OWN, *SHORTLY)  # one text for all: nobody can tell them apart
    assert told.out.count("dev: the model does not beat the constant answer (accuracy 66.67, ") == 1


def test_without_a_share_nothing_is_held_back(give, reviews):
    told = give("custom", "--data", reviews, *OWN, "--dev-share", "0", *SHORTLY)
    assert "train: 240 examples" in told.out
    assert "dev: " not in told.out


def test_labels_may_be_parted_by_something_else(give, tmp_path):
    rows = [["the sun and tea" if n % 2 else "snow", "warm;sunny" if n % 2 else "cold"] for n in range(40)]
    data = table(tmp_path / "my.csv", "review,tags", rows)
    words = ("--text", "review", "--label", "tags", "--kind", "multilabel", "--separator", ";")
    assert give("custom", "--data", data, *words, *SHORTLY).code == 0
    note = json.loads((tmp_path / "run" / "model" / "task.json").read_text())
    assert note["labels"] == ["cold", "sunny", "warm"]


def test_a_cache_that_cannot_be_written_does_not_stop_a_run(give, tmp_path, monkeypatch, caplog):
    (tmp_path / "cache").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert give("sst2", "--data", sst2(tmp_path / "data"), *SHORTLY).code == 0
    assert sum("every run encodes its texts again" in line for line in caplog.messages) == 1


def test_for_machines_every_line_is_an_object(give, tmp_path):
    told = give("sst2", "--data", sst2(tmp_path / "data"), "--json", *SHORTLY)
    *_, last = [json.loads(line) for line in told.out.splitlines()]
    assert last["finished"] is True
    assert set(last["measures"]["dev"]) == {"accuracy"}


def test_epochs_rate_and_seed_are_settings(give, tmp_path):
    data = sst2(tmp_path / "data")
    give("sst2", "--data", data, *SETTINGS, "--epochs", "0.1", "--lr", "1e-3", "--seed", "7")
    recipe = (tmp_path / "run" / "recipe.toml").read_text()
    for line in ("epochs = 0.1", "peak_lr = 0.001", "seed = 7"):
        assert line in recipe


def test_bad_lines_that_are_skipped_are_counted(give, reviews):
    with reviews.open("a") as file:
        file.write("1,2\n")
    told = give("custom", "--data", reviews, "--text", "review", "--label", "class", "--skip-bad", *SHORTLY)
    assert f"skipped 1 bad line, the first at {reviews}:242" in told.out


MISTAKES = {
    "unknown task": (("sst", "--data", "DATA"), "unknown task 'sst'; did you mean sst2?"),
    "wrong column": (
        ("custom", "--data", "DATA", "--text", "reviews", "--label", "class"),
        "my.csv:1: lacks the column 'reviews'; its columns are 'number', 'review'",
    ),
    "no columns": (
        ("custom", "--data", "DATA"),
        "your own task needs the names of its columns; give --text COLUMN and --label COLUMN; "
        "for tagged words fine-tune tags, for answers in passages squad",
    ),
    "columns of a known task": (("sst2", "--data", "DATA", *OWN), "sst2 defines its own columns"),
    "unknown kind": (("custom", "--data", "DATA", *OWN, "--kind", "rank"), "--kind: unknown kind 'rank'"),
    "words for numbers": (
        ("custom", "--data", "DATA", *OWN, "--kind", "regress"),
        "my.csv:2: has 'icy' instead of a number",
    ),
    "no data": (("custom", "--data", "nowhere.csv", *OWN), "nowhere.csv: does not exist"),
    "no model": (
        ("custom", "--data", "DATA", *OWN, "--model", "nowhere"),
        "nowhere: this folder does not exist",
    ),
    "unknown setting": (
        ("custom", "--data", "DATA", *OWN, "--set", "optim.lr=1e-3"),
        "optim.lr",
    ),
    "no value": (("custom", "--data", "DATA", *OWN, "--set", "optim.peak_lr"), "is not key=value"),
    "no patience": (
        ("custom", "--data", "DATA", *OWN, "--patience", "0"),
        "bertsmith: --patience: run.patience = 0 is invalid; it should be greater than or equal to 1",
    ),
    "no rate": (("custom", "--data", "DATA", *OWN, "--lr", "0"), "--lr: optim.peak_lr = 0.0 is invalid"),
    "no batch": (("custom", "--data", "DATA", *OWN, "--batch", "0"), "--batch: run.examples = 0 is invalid"),
    "a setting after its option": (
        ("custom", "--data", "DATA", *OWN, "--batch", "8", "--set", "run.examples=0"),
        "--set: run.examples = 0 is invalid",
    ),
    "grid and seeds": (
        ("custom", "--data", "DATA", *OWN, "--grid", "--seeds", "3"),
        "give --grid or --seeds",
    ),
    "search and folds": (
        ("custom", "--data", "DATA", *OWN, "--random", "3", "--folds", "3"),
        "give --folds or --random",
    ),
    "search and rate": (
        ("custom", "--data", "DATA", *OWN, "--random", "3", "--lr", "1e-3"),
        "--random: the search has its own values of optim.peak_lr",
    ),
    "folds and a part": (
        ("custom", "--data", "DATA", *OWN, "--folds", "3", "--dev-share", "0.2"),
        "--dev-share: each fold is the development set of a run",
    ),
    "test without development": (
        ("custom", "--data", "DATA", *OWN, "--test-share", "0.2", "--dev-share", "0"),
        "--test-share: without a development set, the test set would select the model",
    ),
    "grid and rate": (
        ("custom", "--data", "DATA", *OWN, "--grid", "--lr", "1e-3"),
        "--grid: the grid has its own values of optim.peak_lr",
    ),
    "grid and a setting of it": (
        ("custom", "--data", "DATA", *OWN, "--grid", "--set", "run.examples=8"),
        "--grid: the grid has its own values of run.examples",
    ),
    "kind of a known task": (("sst2", "--data", "DATA", "--kind", "regress"), "--kind: sst2 defines its own"),
    "share of a known task": (
        ("sst2", "--data", "DATA", "--dev-share", "0", "--id", "number"),
        "--id, --dev-share: sst2 defines its own columns and parts",
    ),
    "separator of one label": (
        ("custom", "--data", "DATA", *OWN, "--separator", ";"),
        "--separator: is for several labels",
    ),
    "two development sets": (
        ("custom", "--data", "DATA", *OWN, "--dev", "DATA", "--dev-share", "0.2"),
        "--dev-share: --dev names the development file",
    ),
    "no development file": (
        ("custom", "--data", "DATA", *OWN, "--dev", "gone.csv"),
        "--dev gone.csv: no such file",
    ),
    "no such ids": (
        ("custom", "--data", "DATA", *OWN, "--id", "key"),
        "lacks the column 'key'; its columns are 'number'",
    ),
    "one label": (
        ("custom", "--data", "DATA", "--text", "review", "--label", "same"),
        "there is nothing to learn: the examples have only the label 'x'",
    ),
    "too long": (("custom", "--data", "DATA", *OWN, "--set", "text.longest=500"), "use --max-length 128"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing(capsys, model, tmp_path, name):
    words, said = MISTAKES[name]
    rows = [[n, f"the cat {n}", "hot" if n % 2 else "icy", "x"] for n in range(40)]
    data = table(tmp_path / "my.csv", "number,review,class,same", rows)
    given = [data if word == "DATA" else word for word in words]
    start = () if "--model" in words else ("--model", model)
    assert said in mistake(capsys, "finetune", *given, *start, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_folds_that_a_table_cannot_fill_are_refused_before_anything_is_said(give, reviews):
    told = give("custom", "--data", reviews, *OWN, "--folds", "500")
    assert told.code == 2 and "--folds: 240 rows are too few for 500 folds" in told.err
    assert told.out == ""


def test_one_of_a_thing_is_told_in_the_singular(give, reviews):
    told = give("custom", "--data", reviews, *OWN, *SETTINGS, "--limit", "1", "--epochs", "1")
    assert "train: 1 example\n" in told.out and "\n1 example, 1 step, 0:00:" in told.out
    assert "dev has only 1 example, so its figures may be chance" in told.out


def test_an_unknown_label_is_reported_with_its_line(capsys, model, tmp_path):
    data = sst2(tmp_path / "data")
    (data / "train.tsv").write_text("sentence\tlabel\nthe sun\t1\nthe snow\tcold\n")
    line = mistake(capsys, "finetune", "sst2", "--model", model, "--data", data, "--out", tmp_path / "run")
    assert "train.tsv:3: has the unknown label 'cold'; the labels are 0, 1, negative, positive" in line


def test_runs_without_a_development_set_are_reported_too(capsys, tmp_path):
    result = FinetuningResult(tmp_path, True, {}, 1.0, 5, 160)
    show(result, as_json=False)
    show_many({"seed-0": result, "seed-1": result}, as_json=False)
    assert "seed-0: finished, without a development set" in capsys.readouterr().out


def test_errors_of_numbers_are_reported_in_their_own_unit(capsys, tmp_path):
    measures = {"dev": {"pearson": 0.5, "mean_absolute_error": 1250.5}}
    result = FinetuningResult(tmp_path, True, measures, 1.0, 5, 160)
    show(result, as_json=False)
    show_many({"seed-0": result, "seed-1": result}, as_json=False)
    told = capsys.readouterr().out
    assert "  dev pearson: 50.00\n  dev mean absolute error: 1250.5\n" in told
    assert "seed-0: dev pearson 50.00, mean_absolute_error 1250.5\n" in told
    assert "dev mean absolute error: mean 1250.5, median 1250.5, deviation 0 over 2 runs" in told


def test_help_does_not_load_torch():
    program = "import sys; import bertsmith.cli.app; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
