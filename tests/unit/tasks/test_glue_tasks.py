"""GLUE, SNLI and SICK in the layouts people have; the rows are made here."""

from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from bertsmith.core.errors import UserError
from bertsmith.recipe.finetuning_schema import FinetuningRecipe
from bertsmith.tasks.example_types import TextExample
from bertsmith.tasks.glue_tasks import TASKS
from bertsmith.tasks.task import ReadSplit, read_split

BY_NAME = {task.name: task for task in TASKS}


def read(name: str, data: Path, split: str, *, skip_bad: bool = False) -> ReadSplit:
    return read_split(BY_NAME[name], data, split, skip_bad=skip_bad)


def contents(name: str, data: Path, split: str) -> list[tuple[str, object, object]]:
    examples = read(name, data, split).examples
    return [(each.key, each.texts, each.label) for each in examples if isinstance(each, TextExample)]


def write(folder: Path, name: str, *lines: str) -> None:
    (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


def hub(folder: Path, name: str, columns: dict[str, list[object]]) -> None:
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / f"{name}-00000-of-00001.parquet")


def test_cola_has_no_header_but_in_its_test_set(tmp_path) -> None:
    write(tmp_path, "train.tsv", "gj04\t1\t\tThey drank.", "gj04\t0\t*\tThey drank the.")
    write(tmp_path, "test.tsv", "index\tsentence", "7\tBill coughed.")
    assert contents("cola", tmp_path, "train") == [
        ("0", "They drank.", "acceptable"),
        ("1", "They drank the.", "unacceptable"),
    ]
    assert contents("cola", tmp_path, "test") == [("7", "Bill coughed.", None)]


def test_sst2_is_a_sentence_and_a_label(tmp_path) -> None:
    write(tmp_path, "dev.tsv", "sentence\tlabel", "a charm . \t1", "unflinchingly bleak \t0")
    assert contents("sst2", tmp_path, "dev") == [
        ("0", "a charm . ", "positive"),
        ("1", "unflinchingly bleak ", "negative"),
    ]


def test_mrpc_has_a_mark_at_its_start_and_literal_quotes(tmp_path) -> None:
    header = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String"
    write(tmp_path, "train.tsv", header, '1\t10\t11\t" I am here .\tHe is " here .')
    assert contents("mrpc", tmp_path, "train") == [("0", ('" I am here .', 'He is " here .'), "equivalent")]


def test_microsofts_own_mrpc_gives_every_tenth_line_to_development(tmp_path) -> None:
    header = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String"
    write(tmp_path, "msr_paraphrase_train.txt", header, *(f"0\t1\t2\ta{n}\tb{n}" for n in range(25)))
    write(tmp_path, "msr_paraphrase_test.txt", header, "1\t1\t2\tc\td")
    dev, train = contents("mrpc", tmp_path, "dev"), contents("mrpc", tmp_path, "train")
    assert [key for key, _, _ in dev] == ["9", "19"]
    assert sorted(int(key) for key, _, _ in dev + train) == list(range(25))
    assert contents("mrpc", tmp_path, "test") == [("0", ("c", "d"), "equivalent")]


def test_stsb_is_found_by_the_names_of_its_columns(tmp_path) -> None:
    names = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2"
    write(tmp_path, "dev.tsv", f"{names}\tscore", "0\tg\tf\t2012\t1\tn\tn\tA man.\tA boy.\t3.250")
    write(tmp_path, "test.tsv", names, "0\tg\tf\t2012\t1\tn\tn\tA man.\tA boy.")
    assert contents("stsb", tmp_path, "dev") == [("0", ("A man.", "A boy."), 3.25)]
    assert contents("stsb", tmp_path, "test") == [("0", ("A man.", "A boy."), None)]


@pytest.mark.parametrize("header", [["id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate"], []])
def test_qqp_may_have_a_header(tmp_path, header) -> None:
    write(tmp_path, "train.tsv", *header, "133\t1\t2\tWhy?\tHow come?\t1")
    assert contents("qqp", tmp_path, "train") == [("133", ("Why?", "How come?"), "duplicate")]


def test_a_sample_of_qqp_gives_every_tenth_line_to_development(tmp_path) -> None:
    write(tmp_path, "train_part.tsv", *(f"{n}\t1\t2\ta\tb\t0" for n in range(20)))
    assert [key for key, _, _ in contents("qqp", tmp_path, "dev")] == ["9", "19"]
    assert len(contents("qqp", tmp_path, "train")) == 18


def test_a_development_file_of_qqp_is_preferred_to_the_rule(tmp_path) -> None:
    write(tmp_path, "train_part.tsv", *(f"{n}\t1\t2\ta\tb\t0" for n in range(20)))
    write(tmp_path, "dev.tsv", "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate", "99\t1\t2\tc\td\t1")
    assert [key for key, _, _ in contents("qqp", tmp_path, "dev")] == ["99"]


MANY = (
    "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\t"
    "sentence2_parse\tsentence1\tsentence2\tlabel1\tgold_label"
)


def test_mnli_is_read_with_all_its_columns_or_four(tmp_path) -> None:
    write(tmp_path, "train.tsv", MANY, "0\t1\t1n\tg\t(a)\t(b)\t(a)\t(b)\tA.\tB.\tneutral\tneutral")
    write(tmp_path, "dev_matched.tsv", "index\tsentence1\tsentence2\tgold_label", "5\tC.\tD.\tcontradiction")
    assert contents("mnli", tmp_path, "train") == [("0", ("A.", "B."), "neutral")]
    assert contents("mnli", tmp_path, "dev") == [("5", ("C.", "D."), "contradiction")]


def test_mnli_has_two_development_and_two_test_sets(tmp_path) -> None:
    for kind in ("matched", "mismatched"):
        write(
            tmp_path, f"dev_{kind}.tsv", "index\tsentence1\tsentence2\tgold_label", f"0\t{kind}\tB\tneutral"
        )
        write(tmp_path, f"test_{kind}.tsv", "index\tsentence1\tsentence2", f"0\t{kind}\tB")
    for split, kind in (
        ("dev", "matched"),
        ("dev-mismatched", "mismatched"),
        ("test-mismatched", "mismatched"),
    ):
        assert contents("mnli", tmp_path, split)[0][1] == (kind, "B")


def test_the_diagnostic_set_tells_labels_only_in_its_full_file(tmp_path) -> None:
    write(tmp_path, "diagnostic.tsv", "index\tsentence1\tsentence2", "0\tA cat.\tA dog.")
    write(tmp_path, "diagnostic-full.tsv", "Logic\tPremise\tHypothesis\tLabel", "x\tA cat.\tA dog.\tneutral")
    assert contents("diagnostic", tmp_path, "test") == [("0", ("A cat.", "A dog."), None)]
    assert contents("diagnostic", tmp_path, "dev") == [("0", ("A cat.", "A dog."), "neutral")]


@pytest.mark.parametrize(
    ("name", "texts", "label", "named"),
    [
        ("cola", ["sentence"], 1, "acceptable"),
        ("sst2", ["sentence"], 0, "negative"),
        ("mrpc", ["sentence1", "sentence2"], 1, "equivalent"),
        ("stsb", ["sentence1", "sentence2"], 2.5, 2.5),
        ("qqp", ["question1", "question2"], 1, "duplicate"),
        ("qnli", ["question", "sentence"], 0, "entailment"),
        ("rte", ["sentence1", "sentence2"], 1, "not_entailment"),
        ("wnli", ["sentence1", "sentence2"], 1, "entailment"),
    ],
)
def test_the_hubs_parquet_has_numbers_for_labels_and_minus_one_for_secrets(
    tmp_path, name, texts, label, named
) -> None:
    words = ["A.", "B."][: len(texts)]
    columns = {column: [word] for column, word in zip(texts, words, strict=True)}
    hub(tmp_path, "train", {**columns, "label": [label], "idx": [4]})
    hub(tmp_path, "validation", {**columns, "label": [label], "idx": [5]})
    hub(tmp_path, "test", {**columns, "label": [type(label)(-1)], "idx": [6]})
    shown = words[0] if len(words) == 1 else tuple(words)
    assert contents(name, tmp_path, "train") == [("4", shown, named)]
    assert contents(name, tmp_path, "dev") == [("5", shown, named)]
    assert contents(name, tmp_path, "test") == [("6", shown, None)]


def test_the_hubs_mnli_has_two_validation_files(tmp_path) -> None:
    for number, kind in enumerate(("matched", "mismatched")):
        columns = {"premise": ["A."], "hypothesis": ["B."], "label": [number], "idx": [0]}
        hub(tmp_path, f"validation_{kind}", columns)
    assert contents("mnli", tmp_path, "dev")[0][2] == "entailment"
    assert contents("mnli", tmp_path, "dev-mismatched")[0][2] == "neutral"


def test_snli_leaves_out_what_its_annotators_could_not_decide_and_counts_it(tmp_path) -> None:
    write(tmp_path, "validation.tsv", "premise\thypothesis\tlabel", "A.\tB.\t2", "A.\tC.\t-1", "A.\tD.\t0")
    found = read("snli", tmp_path, "dev")
    assert [example.label for example in found.examples] == ["contradiction", "entailment"]
    assert [bad.where for bad in found.skipped] == [f"{tmp_path / 'validation.tsv'}:3"]


@pytest.mark.parametrize("name", ["snli_1.0_dev.txt", "snli_1.0_dev.jsonl"])
def test_stanfords_own_snli_files_are_read(tmp_path, name) -> None:
    if name.endswith("txt"):
        write(tmp_path, name, "gold_label\tsentence1\tsentence2", "neutral\tA.\tB.", "-\tA.\tC.")
    else:
        rows = (("neutral", "B."), ("-", "C."))
        lines = [
            f'{{"gold_label": "{named}", "sentence1": "A.", "sentence2": "{text}"}}' for named, text in rows
        ]
        write(tmp_path, name, *lines)
    assert contents("snli", tmp_path, "dev") == [("0", ("A.", "B."), "neutral")]


def test_sick_poses_two_tasks(tmp_path) -> None:
    header = "pair_ID\tsentence_A\tsentence_B\trelatedness_score\tentailment_judgment"
    write(tmp_path, "SICK_trial.txt", header, "4\tA boy.\tA kid.\t4.5\tENTAILMENT")
    assert contents("sick-e", tmp_path, "dev") == [("4", ("A boy.", "A kid."), "entailment")]
    assert contents("sick-r", tmp_path, "dev") == [("4", ("A boy.", "A kid."), 4.5)]


def test_the_one_file_of_sick_is_parted_as_its_last_column_says(tmp_path) -> None:
    header = "pair_ID\tsentence_A\tsentence_B\tentailment_label\trelatedness_score\tSemEval_set"
    rows = [f"{n}\tA.\tB.\tNEUTRAL\t3\t{part}" for n, part in enumerate(("TRAIN", "TRIAL", "TEST", "TRAIN"))]
    write(tmp_path, "SICK.txt", header, *rows)
    keys = {
        split: [key for key, _, _ in contents("sick-e", tmp_path, split)]
        for split in ("train", "dev", "test")
    }
    assert keys == {"train": ["0", "3"], "dev": ["1"], "test": ["2"]}


def test_an_unknown_label_is_reported_with_file_line_and_labels(tmp_path) -> None:
    write(tmp_path, "dev.tsv", "index\tsentence1\tsentence2\tlabel", "0\tA\tB\tentailment", "1\tA\tC\tmaybe")
    with pytest.raises(UserError) as error:
        read("rte", tmp_path, "dev")
    assert error.value.where == f"{tmp_path / 'dev.tsv'}:3"
    assert "unknown label 'maybe'" in error.value.what
    assert "not_entailment" in error.value.what


def test_a_training_set_without_labels_is_rejected(tmp_path) -> None:
    write(tmp_path, "train.tsv", "index\tsentence", "0\tA")
    with pytest.raises(UserError, match=r"train\.tsv:1: .* column 'label'"):
        read("sst2", tmp_path, "train")


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_published_settings_make_a_recipe(task) -> None:
    sections: dict[str, dict[str, object]] = {}
    for key, value in task.settings.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    recipe = FinetuningRecipe.model_validate({"task": task.name, **sections})
    assert all(
        getattr(getattr(recipe, s), n) == v for s, values in sections.items() for n, v in values.items()
    )
