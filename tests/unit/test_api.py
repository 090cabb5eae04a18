"""Training from Python: what the commands do, with frames and lists in and tables out."""

import ast
import json
import random
import shutil
import subprocess
import sys
from types import ModuleType

import numpy as np
import pyarrow
import pytest

import bertsmith
from bertsmith.api import _study_run
from bertsmith.cli.finetune import FinetuneRequest
from bertsmith.cli.terminal import LogProgress, progress_display
from bertsmith.finetuning.finetune import FinetuningResult
from tests import command_line
from tests.tiny_runs import tiny_store
from tests.toy_tasks import warm_or_cold
from tests.tuning import quickly, toy_model

__all__ = ["quickly", "toy_model"]

SETTINGS = {
    "optim.peak_lr": 2e-3,
    "run.examples": 16,
    "run.evaluations": 1,
    "text.longest": 32,
    "run.device": "cpu",
}
OWN = {"text": "review", "label": "class", "settings": SETTINGS}


class PandasLike:
    """What a pandas.DataFrame has that is used."""

    def __init__(self, rows):
        self.rows, self.columns = rows, list(rows[0])

    def to_dict(self, orient):
        assert orient == "records"
        return self.rows


class PolarsLike:
    def __init__(self, rows):
        self.rows, self.columns = rows, list(rows[0])

    def to_dicts(self):
        return self.rows

    def to_dict(self):
        raise AssertionError("columns are not what is wanted")


@pytest.fixture(scope="module")
def rows():
    chance = random.Random(0)
    pairs = [warm_or_cold(chance) for _ in range(60)]
    return [
        {"review": text, "class": "hot" if warm else "icy", "n": np.int64(n)}
        for n, (text, warm) in enumerate(pairs)
    ]


@pytest.fixture(scope="module")
def run(model, rows, tmp_path_factory):
    out = tmp_path_factory.mktemp("api") / "run"
    return bertsmith.finetune(rows, model=model, out=out, epochs=1, **OWN)


def test_a_run_from_rows_is_that_of_the_command(run, rows, model, tmp_path, capsys):
    assert run.finished and set(run.metrics["dev"]) >= {"accuracy", "macro_f1"}
    assert {"split": "dev", "metric": "accuracy", "value": run.metrics["dev"]["accuracy"]} in run.table()
    kept = run.folder.with_name("run-data.jsonl").read_text().splitlines()
    assert [json.loads(line)["review"] for line in kept] == [row["review"] for row in rows]
    words = ["--set=" + f"{key}={value}" for key, value in SETTINGS.items()]
    file = run.folder.with_name("run-data.jsonl")
    command = ["finetune", "custom", "--data", file, "--text", "review", "--label", "class", "--model", model]
    told = command_line.bertsmith(
        capsys, *command, "--out", tmp_path / "run", "--epochs", "1", "--json", *words
    )
    assert json.loads(told.out.splitlines()[-1])["measures"] == run.metrics, told.err


@pytest.mark.parametrize("frame", [PandasLike, PolarsLike, pyarrow.Table.from_pylist, tuple], ids=str)
def test_frames_of_all_kinds_are_the_same_run(run, rows, model, frame):
    plain = [{**row, "n": int(row["n"])} for row in rows]
    again = bertsmith.finetune(frame(plain), model=model, out=run.folder, epochs=1, **OWN)
    assert again.metrics == run.metrics  # a finished run is told, not done again
    assert again.steps == run.steps


def test_rows_that_lie_beside_a_run_are_not_overwritten(run, rows, model):
    kept = run.folder.with_name("run-data.jsonl")
    before = kept.read_bytes()
    with pytest.raises(bertsmith.UserError, match=r"run-data\.jsonl: already exists and contains other rows"):
        bertsmith.finetune(rows[:30], model=model, out=run.folder, epochs=1, **OWN)
    assert kept.read_bytes() == before


def test_warnings_of_a_run_name_arguments(rows, model, tmp_path, capsys):
    bertsmith.finetune(rows[:20], model=model, out=tmp_path / "run", epochs=0.5, **OWN)
    told = capsys.readouterr().out
    assert "for your own table see folds= and dev_share=" in told and "--" not in told


def test_the_model_of_a_run_is_loaded(run):
    (found,) = run.load(device="cpu").classify(["the sun is warm"])
    assert found.label in ("hot", "icy")


def test_a_dict_of_splits_brings_its_own_development_set(rows, model, tmp_path):
    data = {"train": rows[:40], "dev": PandasLike(rows[40:])}
    found = bertsmith.finetune(data, model=model, out=tmp_path / "run", epochs=0.5, **OWN)
    assert found.finished and "dev" in found.metrics
    assert len((tmp_path / "run-data" / "dev.jsonl").read_text().splitlines()) == 20


def test_evaluate_gives_metrics_and_a_table_with_texts(run, rows):
    some = rows[:40]
    found = bertsmith.evaluate(run.folder, some, device="cpu")
    table = found.table()
    right = sum(row["class"] == line["prediction"] for row, line in zip(some, table, strict=True))
    assert found.metrics["accuracy"] == pytest.approx(right / len(some))
    assert list(table[0]) == ["id", "text", "prediction", "hot", "icy"]
    assert [line["text"] for line in table] == [row["review"] for row in some]


def test_of_the_rows_that_a_run_was_trained_from_only_those_held_back_are_evaluated(run, rows):
    found = bertsmith.evaluate(run.folder, rows, device="cpu")
    assert len(found.table()) == 6 and found.metrics == pytest.approx(run.metrics["dev"])
    (told,) = found.warnings
    assert "only the held-back part is evaluated" in told


@pytest.mark.parametrize("named", ["runs", "runs/run", "runs/run/model"])
def test_the_training_file_is_known_however_the_model_is_named(run, tmp_path, named):
    shutil.copytree(run.folder, tmp_path / "runs" / "run")
    (tmp_path / "runs" / "spread.json").write_text('{"best": "run"}')
    file = run.folder.with_name("run-data.jsonl")
    assert len(bertsmith.evaluate(tmp_path / named, file, device="cpu").table()) == 6


def test_predict_needs_no_labels_and_saves_what_the_name_says(run, tmp_path):
    new = [{"review": "the sun"}, {"review": "snow"}]
    found = bertsmith.predict([run.folder], new, device="cpu")
    assert found.metrics == {} and [row["text"] for row in found.table()] == ["the sun", "snow"]
    assert found.save(tmp_path / "out.jsonl") == [tmp_path / "out.jsonl"]
    saved = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["prediction"] for row in saved] == [row["prediction"] for row in found.table()]
    (tmp_path / "new.csv").write_text("review\nthe sun\nsnow\n")
    assert bertsmith.predict(run.folder, tmp_path / "new.csv", device="cpu").table() == found.table()


def test_bad_rows_are_counted_on_request(run, rows):
    spoiled = [*rows[:3], {"review": "", "class": "hot"}]
    with pytest.raises(bertsmith.UserError, match="lacks a text in review"):
        bertsmith.evaluate(run.folder, spoiled, device="cpu")
    assert bertsmith.evaluate(run.folder, spoiled, skip_bad=True, device="cpu").skipped == 1


def test_a_dict_of_columns_is_a_frame_too(run, rows, model):
    columns = {"review": [row["review"] for row in rows], "class": tuple(row["class"] for row in rows)}
    columns["n"] = np.array([row["n"] for row in rows])
    again = bertsmith.finetune(columns, model=model, out=run.folder, epochs=1, **OWN)
    assert again.metrics == run.metrics
    new = {"review": ["the sun", "snow"]}
    assert [row["text"] for row in bertsmith.predict(run.folder, new, device="cpu").table()] == new["review"]


def test_a_split_of_an_earlier_call_is_not_read_by_stealth(rows, model, tmp_path):
    kept = tmp_path / "run-data"
    kept.mkdir()
    (kept / "dev.jsonl").write_text('{"review": "old", "class": "hot"}\n')
    with pytest.raises(bertsmith.UserError, match=r"dev\.jsonl: is left from an earlier call"):
        bertsmith.finetune({"train": rows}, model=model, out=tmp_path / "run", epochs=1, **OWN)
    assert [file.name for file in kept.iterdir()] == ["dev.jsonl"]


def test_a_table_that_is_written_otherwise_is_read_as_it_is_told(run, model, tmp_path):
    file = tmp_path / "my.dat.csv"
    file.write_bytes("the sun ä;hot\nsnow;icy\n".encode("cp1252") * 30)
    form = {"delimiter": ";", "encoding": "cp1252", "columns": ["review", "class"]}
    made = bertsmith.finetune(file, model=model, out=tmp_path / "run", epochs=0.5, patience=1, **form, **OWN)
    assert made.finished and "patience = 1" in (made.folder / "recipe.toml").read_text()
    found = bertsmith.evaluate(run.folder, file, device="cpu", **form)
    assert found.table()[0]["text"] == "the sun ä"
    assert bertsmith.predict(run.folder, file, device="cpu", **form).table() == found.table()
    with pytest.raises(bertsmith.UserError, match="^delimiter: '::' cannot separate cells"):
        bertsmith.predict(run.folder, file, delimiter="::")


def test_folds_give_means_and_a_run_each(rows, model, tmp_path):
    found = bertsmith.finetune(
        rows, model=model, out=tmp_path / "run", epochs=0.5, folds=3, test_share=0.1, **OWN
    )
    assert found.finished and [each.folder.name for each in found.folds] == ["fold-0", "fold-1", "fold-2"]
    scores = [each.metrics["dev"]["accuracy"] for each in found.folds]
    assert found.metrics["dev"]["accuracy"] == pytest.approx(sum(scores) / 3)
    assert "test-part" in found.metrics
    (row,) = [row for row in found.table() if (row["split"], row["metric"]) == ("dev", "accuracy")]
    assert row["deviation"] == pytest.approx(np.std(scores, ddof=1))
    assert found.load(device="cpu").classify(["snow"])


def test_a_failed_seed_is_left_out_of_means_and_is_not_finished(tmp_path):
    def result(seed, **found):
        return FinetuningResult(tmp_path / seed, True, seconds=1, steps=9, examples=9, **found)

    results = {
        "seed-0": result("seed-0", metrics={}, failure="the run diverged"),
        "seed-1": result("seed-1", metrics={"dev": {"accuracy": 0.5}}),
    }
    request = FinetuneRequest(data="d", out=tmp_path, seeds=2)
    found = _study_run(tmp_path, results, request)
    assert found.table() == [{"split": "dev", "metric": "accuracy", "value": 0.5, "deviation": None}]
    assert "0.5000" in found._repr_html_()
    failed, good = found.folds
    assert good.finished and not failed.finished and "the run diverged" in failed.title()


def test_several_models_are_evaluated_together(run, rows):
    alone = bertsmith.evaluate(run.folder, rows[:20], device="cpu", precision="fp32")
    twice = bertsmith.evaluate([run.folder, run.folder], rows[:20], device="cpu", precision="fp32")
    assert twice.metrics == alone.metrics
    assert f"accuracy {100 * alone.metrics['accuracy']:.2f}" in alone._repr_html_()


def test_a_notebook_shows_runs_and_predictions_as_tables(run, rows):
    shown = run._repr_html_()
    assert shown.count("<tr>") == 1 + len(run.table()) and "<td>accuracy</td>" in shown
    spoiled = [{**row, "review": f"<script>{row['review']}"} for row in rows[:30]]
    shown = bertsmith.predict(run.folder, spoiled, device="cpu")._repr_html_()
    assert shown.count("<tr>") == 21 and "30 examples (the first 20)" in shown
    assert "<script>" not in shown and "&lt;script&gt;" in shown


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (
            lambda out: bertsmith.finetune([{"a": 1}], out=out),
            r"needs the names of its columns; give text=... and label=...",
        ),
        (lambda out: bertsmith.finetune(["a"], out=out, text="a", label="b"), "not rows with named columns"),
        (lambda out: bertsmith.finetune([], out=out, text="a", label="b"), "data are empty"),
        (lambda out: bertsmith.finetune(7, out=out, text="a", label="b"), "data are int"),
        (
            lambda out: bertsmith.finetune({"../x": [{"a": 1}]}, out=out, text="a", label="b"),
            "is not a split",
        ),
        (
            lambda out: bertsmith.finetune([{"a": 1}], out=out, task="sst2", text="a"),
            "sst2 defines its own columns",
        ),
        (
            lambda out: bertsmith.finetune([{"a": 1}], out=out, text="a", label="b", kind="rank"),
            "kind: unknown kind 'rank'",
        ),
        (
            lambda out: bertsmith.finetune({"a": ["x", "y"], "b": ["z"]}, out=out, text="a", label="b"),
            "the columns of data differ in length: a has 2, b has 1",
        ),
        (
            lambda out: bertsmith.finetune([{"a": "x", "b": "y"}], out=out, text="a", label="c"),
            r"^row 1 of data: lacks the column 'c'",
        ),
        (
            lambda out: bertsmith.finetune(
                [{"a": "x", "b": "y"}, {"a": "", "b": "z"}], out=out, text="a", label="b"
            ),
            r"^row 2 of data: lacks a text in a; .*, or leave such lines out with skip_bad=True$",
        ),
        (
            lambda out: bertsmith.finetune(
                {"train": [{"a": "x", "b": "y"}], "dev": [{"a": "", "b": "y"}]}, out=out, text="a", label="b"
            ),
            r'^row 1 of data\["dev"\]: lacks a text in a',
        ),
        (
            lambda out: bertsmith.finetune(
                [{"a": str(n), "b": str(n / 7)} for n in range(60)], out=out, text="a", label="b"
            ),
            r'row 1 of data: .* all of them numbers; add kind="regress" to learn numbers',
        ),
        (
            lambda out: bertsmith.finetune(
                [{"a": "x", "b": "y"}], out=out, text="a", label="b", folds=3, dev_share=0.2
            ),
            "^dev_share: each fold is the development set of a run",
        ),
        (
            lambda out: bertsmith.finetune(
                [{"a": "x", "b": "y"}], out=out, text="a", label="b", separator=";"
            ),
            r'^separator: .*, or add kind="multilabel"',
        ),
        (
            lambda out: bertsmith.pretrain("bert-tiny", store=out, out=out, steps=1, minutes=1),
            "a run has one budget",
        ),
        (lambda out: bertsmith.pretrain("bert-tiny", store=out, out=out, steps=-1), "^steps: run.steps = -1"),
        (
            lambda out: bertsmith.pretrain("bert-tiny", store=out, out=out, settings={"run.seed": "x"}),
            '^settings: run.seed = "x" is invalid',
        ),
        (
            lambda out: bertsmith.pretrain("bert-tiny", store=out, out=out, sweep={"run.seed": [1, "x"]}),
            '^sweep: run.seed = "x" is invalid',
        ),
        (
            lambda out: bertsmith.pretrain("bert-tiny", store=out, out=out, sweep={"run.seed": "12"}),
            '^sweep: run.seed lacks a list of values; give a list: sweep={"run.seed": ',
        ),
        (
            lambda out: bertsmith.pretrain("bert-tiny", store=out, out=out, sweep={"run.seed": [1, 1]}),
            "^sweep: run.seed has a value twice",
        ),
        (
            lambda out: bertsmith.pretrain("bert-tiny", store=out, out=out, sweep={}),
            "^sweep: it is empty",
        ),
        (
            lambda out: bertsmith.pretrain("bert-tiny", store=out, out=out, size="tiny"),
            "^size: is an option of auto, not of bert-tiny",
        ),
        (
            lambda out: bertsmith.pretrain("auto", store=out, out=out, sweep={"run.seed": [1, 2]}),
            "^sweep: auto chooses one recipe",
        ),
        (
            lambda out: bertsmith.pretrain("auto", store=out, out=out, objective="sop"),
            "^objective: 'sop' is not a valid choice",
        ),
    ],
)
def test_mistakes_are_told_as_python_says_them(tmp_path, call, what):
    with pytest.raises(bertsmith.UserError, match=what):
        call(tmp_path / "run")
    assert not list(tmp_path.iterdir())


PRETRAINING = {
    "batch.sequences": 4,
    "examples.held_out_fraction": 0.2,
    "examples.stages": [{"fraction": 1.0, "length": 32, "predictions": 5}],
    "run.device": "cpu",
    "run.evaluation_sequences": 8,
}


def test_pre_training_gives_the_held_out_metrics(tmp_path):
    store = tiny_store(tmp_path / "tiny").folder
    run = bertsmith.pretrain("bert-tiny", store=store, out=tmp_path / "run", steps=2, settings=PRETRAINING)
    assert run.finished and run.steps == 2
    assert run.metrics["held-out"]["token_loss"] > 0
    assert (tmp_path / "run" / "model" / "config.json").is_file()


def test_auto_chooses_a_recipe_and_tells_it(tmp_path, capsys):
    place = {"store": tiny_store(tmp_path / "tiny").folder, "out": tmp_path / "run", "size": "tiny"}
    run = bertsmith.pretrain("auto", **place, tokens=500, settings=PRETRAINING | {"batch.tokens": 300})
    assert run.finished and run.steps == 2
    assert "auto: 2 x 128, " in capsys.readouterr().out
    assert run.load().model.network.config.width == 128


def test_a_sweep_gives_all_runs_the_best_first(tmp_path):
    store, values = tiny_store(tmp_path / "tiny").folder, {"optim.peak_lr": [1e-6, 3e-3]}
    place = {"store": store, "out": tmp_path / "out", "steps": 3}
    best = bertsmith.pretrain("bert-tiny", **place, settings=PRETRAINING, sweep=values)
    losses = [trial.metrics["held-out"]["fixed_token_loss"] for trial in best.trials]
    assert best.finished and len(losses) == 2 and losses == sorted(losses)
    assert best.folder == best.trials[0].folder and best.metrics == best.trials[0].metrics
    assert {row["run"] for row in best.table()} == {"peak_lr-0.003", "peak_lr-1e-6"}
    assert best.load().model.network.config.width == 128


def test_a_run_that_stays_flat_can_end_early(tmp_path):
    store = tiny_store(tmp_path / "tiny").folder
    flat = PRETRAINING | {"optim.peak_lr": 3.0, "run.log_every_steps": 2, "run.evaluate_every_steps": 60}
    place = {"store": store, "out": tmp_path / "run", "steps": 60}
    run = bertsmith.pretrain("bert-tiny", **place, settings=flat, stop_if_flat=True)
    assert not run.finished and run.steps < 60
    assert run.early_end and run.early_end in run._repr_html_()


def test_importing_the_package_imports_neither_torch_nor_the_commands():
    code = (
        "import bertsmith, sys; dir(bertsmith); print([name in sys.modules for name in ('torch', 'typer')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[False, False]\n", done.stderr


# ---- in a notebook


class Handle:
    """A place in a cell's output whose content can be replaced."""

    def __init__(self, shown):
        self.drawings = [shown]

    def update(self, shown):
        self.drawings.append(shown)


class Kernel:
    """What a notebook's kernel does that is used: cells are run, and what the last line gives is shown."""

    def __init__(self, monkeypatch):
        self.names, self.places = {}, []
        shell = type("ZMQInteractiveShell", (), {})()
        notebook, display = ModuleType("IPython"), ModuleType("IPython.display")
        display.HTML, display.display = str, self.display
        notebook.get_ipython, notebook.display = lambda: shell, display
        monkeypatch.setitem(sys.modules, "IPython", notebook)
        monkeypatch.setitem(sys.modules, "IPython.display", display)
        monkeypatch.setattr("builtins.get_ipython", lambda: shell, raising=False)

    def display(self, shown, *, display_id):
        assert display_id is True
        self.places.append(Handle(shown))
        return self.places[-1]

    def run(self, cell):
        *before, last = ast.parse(cell).body
        exec(compile(ast.Module(before, []), "cell", "exec"), self.names)
        found = eval(compile(ast.Expression(last.value), "cell", "eval"), self.names)
        return found._repr_html_() if hasattr(found, "_repr_html_") else repr(found)


def test_a_notebook_has_a_bar_that_moves_and_tables(monkeypatch, capsys, rows, model, tmp_path):
    kernel = Kernel(monkeypatch)
    monkeypatch.setattr("bertsmith.cli.terminal.SECONDS_BETWEEN_DRAWINGS", 0.0)
    kernel.names |= {"rows": rows, "model": model, "out": tmp_path / "run", "settings": SETTINGS}
    table = kernel.run(
        "import bertsmith\n"
        "bertsmith.finetune(rows, text='review', label='class', model=model, out=out, epochs=1, "
        "settings=settings)"
    )
    assert table.startswith("<table>") and "<td>accuracy</td>" in table
    (bar,) = kernel.places
    values = [float(drawing.split('value="')[1].split('"')[0]) for drawing in bar.drawings]
    assert values == sorted(values) and (values[0], values[-1]) == (0, 1) and len(set(values)) > 2
    assert "step 4" in bar.drawings[-1] and "loss" in bar.drawings[-1]
    assert "step 4" not in capsys.readouterr().out  # the line is drawn, not printed as well
    assert "<td>the" in kernel.run("bertsmith.predict(out, rows, device='cpu')")


def test_a_bar_by_the_clock_shows_the_time_that_is_spent(monkeypatch):
    kernel = Kernel(monkeypatch)
    with progress_display(lambda values: "<b>", as_json=False) as callback:
        callback.on_deadline(30.0, 60.0)
        callback.on_step(0.01, {})
        callback.draw()
    (bar,) = kernel.places
    assert 'value="0.50' in bar.drawings[-1] and "&lt;b&gt;" in bar.drawings[-1]


def test_without_a_notebook_or_a_terminal_lines_are_logged():
    with progress_display(str, as_json=False) as callback:
        assert type(callback) is LogProgress


def test_a_wrong_value_is_blamed_on_the_argument_that_it_was_given_as(tmp_path):
    rows = [{"review": "a", "class": "x"}, {"review": "b", "class": "y"}]
    for name in ("epochs", "patience"):
        with pytest.raises(bertsmith.UserError, match=rf"^{name}: \w+\.\w+ = 0 is invalid"):
            bertsmith.finetune(rows, out=tmp_path / "run", **OWN, **{name: 0})
    with pytest.raises(bertsmith.UserError, match="^dev_share: is nan; give 0 or more"):
        bertsmith.finetune(rows, out=tmp_path / "run", dev_share=np.nan, **OWN)
