import subprocess
import sys

import pytest

from bertsmith.core.errors import UserError
from bertsmith.recipe.data_sections import Level, Stage
from bertsmith.recipe.load import (
    load_recipe,
    load_recipe_with_origins,
    settings_of,
)
from bertsmith.recipe.schema import Recipe


@pytest.fixture
def file(tmp_path):
    """Writes a recipe file and gives its path."""

    def write(text, name="mine.toml"):
        (tmp_path / name).write_bytes(text.encode())
        return tmp_path / name

    return write


def refusal(*arguments):
    """The one line that loading these is rejected with."""
    with pytest.raises(UserError) as refused:
        load_recipe(*arguments)
    line = refused.value.line()
    assert "\n" not in line
    return line


# ---- presets, files and what they stand on


def test_the_defaults_are_bert_base():
    assert load_recipe("bert-base") == Recipe()


def test_a_file_without_a_base_starts_from_the_defaults(file):
    assert load_recipe(file("[run]\nseed = 7\n")).run.seed == 7
    assert load_recipe(file("")) == Recipe()


def test_a_file_says_only_what_differs_from_its_base(file):
    mine = load_recipe(file('base = "bert-tiny"\nname = "mine"\n[optim]\npeak_lr = 5e-4\n'))
    tiny = load_recipe("bert-tiny")
    assert mine.name == "mine" and mine.optim.peak_lr == 5e-4
    assert mine.model == tiny.model
    assert mine.optim.model_copy(update={"peak_lr": tiny.optim.peak_lr}) == tiny.optim


def test_a_files_base_may_stand_on_a_preset_itself(file):
    mine = load_recipe(file('base = "roberta-large"\n[run]\nsteps = 10\n'))
    assert (mine.run.steps, mine.model.layers, mine.optim.beta2) == (10, 24, 0.98)


def test_a_string_and_a_path_name_the_same_file(file, monkeypatch, tmp_path):
    path = file("[run]\nseed = 7\n")
    monkeypatch.chdir(tmp_path)
    assert load_recipe(str(path)) == load_recipe(path) == load_recipe("mine.toml")


def test_a_mark_at_the_start_of_a_file_and_windows_line_ends_do_not_matter(file):
    assert load_recipe(file("\ufeff[run]\r\nseed = 7\r\n")).run.seed == 7


def test_a_list_in_a_file_replaces_the_bases_list(file):
    mine = load_recipe(
        file('base = "bert-base"\n[[examples.stages]]\nfraction = 1\nlength = 64\npredictions = 10\n')
    )
    assert mine.examples.stages == (Stage(fraction=1, length=64, predictions=10),)


def test_a_file_cannot_stand_on_another_file(file):
    file("", name="other.toml")
    line = refusal(file('base = "other.toml"\n'))
    assert "mine.toml: base = 'other.toml' is not a preset" in line and "presets are albert-base" in line


def test_a_base_that_is_no_text_is_rejected(file):
    assert "base = ['bert-base'] is not a preset" in refusal(file('base = ["bert-base"]\n'))


def test_a_misspelt_preset_is_answered_with_the_nearest():
    assert refusal("bert-bse") == "bert-bse: is not a preset or a file; did you mean bert-base?"
    assert "presets are albert-base, " in refusal("nowhere/x.toml")


def test_a_file_that_is_no_toml_is_rejected_with_its_line(file):
    line = refusal(file("[run]\nseed = \n"))
    assert "mine.toml: is not valid TOML" in line and "line 2" in line


def test_a_file_that_is_no_text_is_rejected(tmp_path):
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe")
    assert "is not UTF-8 text" in refusal(tmp_path / "x.toml")


def test_endless_nesting_in_a_file_is_rejected(file):
    assert "is not valid TOML" in refusal(file("name = " + "[" * 100_000))


def test_loading_a_preset_imports_no_torch():
    program = (
        "import sys, bertsmith.recipe.load as l, bertsmith.recipe.load as d\n"
        "l.load_recipe('bert-base'); d.preset_summaries(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# ---- --set


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("optim.peak_lr=3e-5", lambda recipe: recipe.optim.peak_lr, 3e-5),
        (" run.steps = 1_000 ", lambda recipe: recipe.run.steps, 1000),
        ("run.steps=1e6", lambda recipe: recipe.run.steps, 1_000_000),
        ("run.recompute=true", lambda recipe: recipe.run.recompute, True),
        ("examples.pairs=none", lambda recipe: recipe.examples.pairs, "none"),
        ('examples.pairs="none"', lambda recipe: recipe.examples.pairs, "none"),
        ("optim.clip_norm=off", lambda recipe: recipe.optim.clip_norm, "off"),
        ("name=a b=c", lambda recipe: recipe.name, "a b=c"),
        ("name=", lambda recipe: recipe.name, ""),
        ("name=1\nname2 = 2", lambda recipe: recipe.name, "1\nname2 = 2"),
        ("run.keep_at=[10, 20]", lambda recipe: recipe.run.keep_at, (10, 20)),
        ("optim={ peak_lr = 1, beta1 = 0.8 }", lambda recipe: recipe.optim.beta1, 0.8),
        (
            "examples.stages=[{fraction=1, length=64, predictions=10}]",
            lambda recipe: recipe.examples.stages,
            (Stage(fraction=1, length=64, predictions=10),),
        ),
        (
            "masking.levels=[{unit='word', fraction=0.5}, {unit='phrase', fraction=0.5}]",
            lambda recipe: recipe.masking.levels,
            (Level(unit="word", fraction=0.5), Level(unit="phrase", fraction=0.5)),
        ),
    ],
)
def test_set_takes_toml_values_and_bare_words(override, read, value):
    assert read(load_recipe("bert-base", [override])) == value


def test_the_last_of_several_overrides_wins(file):
    path = file("[run]\nseed = 1\nsteps = 9\n")
    assert load_recipe(path, ["run.seed=2", "run.seed=3"]).run.seed == 3


def test_a_table_given_by_set_keeps_the_other_keys_of_its_section():
    assert load_recipe("roberta-base", ["optim={ beta1 = 0.8 }"]).optim.beta2 == 0.98


@pytest.mark.parametrize("override", ["run.steps", "=3", ""])
def test_set_without_a_key_or_a_value_is_rejected(override):
    assert f"settings: {override!r} is not key=value" in refusal("bert-base", [override])


def test_a_list_that_is_not_closed_is_not_taken_for_a_word():
    assert "[{fraction=1 is not valid TOML" in refusal("bert-base", ["examples.stages=[{fraction=1"])


# ---- origins


def test_every_value_has_its_origin(file):
    path = file('base = "roberta-large"\n[optim]\nbeta1 = 0.8\npeak_lr = 1e-4\n')
    loaded = load_recipe_with_origins(path, ["optim.peak_lr=2e-4", "examples.pairs=none"])
    wanted = {
        "optim.peak_lr": "`settings`",
        "examples.pairs": "`settings`",
        "optim.beta1": str(path),
        "model.layers": "preset roberta-large",
        "optim.beta2": "preset roberta-base",
        "optim.weight_decay": "default",
    }
    assert {key: loaded.origin(key) for key in wanted} == wanted


def test_settings_list_every_key_with_value_and_description():
    settings = {setting.key: setting for setting in settings_of(load_recipe_with_origins("bert-tiny"))}
    assert settings["model.layers"].value == 2
    assert settings["model.layers"].description == "Number of layers."
    assert settings["examples.stages"].value[0] == {"fraction": 0.9, "length": 128, "predictions": 20}
    assert settings["name"].origin == "preset bert-tiny"
    assert all(setting.description and "\n" not in setting.description for setting in settings.values())


# ---- what is rejected, and how


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("optim.peek_lr=1", "unknown key optim.peek_lr; did you mean optim.peak_lr?"),
        ("peak_lr=1", "unknown key peak_lr; did you mean optim.peak_lr?"),
        ("peek_lr=1", "unknown key peek_lr; did you mean optim.peak_lr?"),
        ("optimizer.peak_lr=1", "unknown key optimizer; did you mean optim?"),
        ("run.peak_lr=1", "unknown key run.peak_lr; did you mean optim.peak_lr?"),
        ("optim.beta2=1.5", "optim.beta2 = 1.5 is invalid; it should be less than 1"),
        ("optim.clip_norm=-1", "optim.clip_norm = -1 is invalid; it should be greater than 0 or 'off'"),
        ("optim.clip_norm=of", "optim.clip_norm = \"of\" is invalid; it should be a number or 'off'"),
        ("run.steps=1.5", "run.steps = 1.5 is invalid; it should be a whole number"),
        ("run.steps=many", 'run.steps = "many" is invalid; it should be a whole number'),
        ("run.recompute=maybe", 'run.recompute = "maybe" is invalid; it should be true or false'),
        ("name=3", "name = 3 is invalid; it should be text"),
        ("optim.eps=2020-01-01", 'optim.eps = "2020-01-01" is invalid; it should be a number'),
        ("model=3", "model = 3 is invalid; it should be a table"),
        ("model.layers.x=3", 'model.layers = {"x": 3} is invalid; it should be a whole number'),
        ("masking.masks=fresh", "masking.masks = \"fresh\" is invalid; it should be 'dynamic' or 'static'"),
        ("run.keep_at=[0]", "run.keep_at[0] = 0 is invalid; it should be greater than or equal to 1"),
        ("run.keep_at=1", "run.keep_at = 1 is invalid; it should be a list"),
        (
            "masking.levels=['token', 'entity']",
            'masking.levels[0] = "token" is invalid; '
            'it should be a table, for example { unit = "token", fraction = 0.5 }',
        ),
        (
            "masking.levels=token",
            'masking.levels = "token" is invalid; '
            'it should be a list, for example [{ unit = "token", fraction = 0.5 }, ...]',
        ),
        (
            "examples.stages.0.length=9",
            'examples.stages = {"0": {"length": 9}} is invalid; '
            "it should be a list, for example [{ fraction = 0.9, length = 128, predictions = 20 }, ...]",
        ),
        (
            "examples.stages=[{fraction=1, lenght=9, predictions=2}]",
            "unknown key examples.stages[0].lenght; did you mean examples.stages[0].length?",
        ),
        (
            "examples.stages=[{fraction=1, length=9}]",
            "examples.stages[0].predictions is missing; set it",
        ),
        (
            "model.heads=7",
            "model.heads = 7 does not divide model.width = 768; "
            "make the width a multiple of the heads: BERT's is 64 times as large",
        ),
        ("examples.stages=[]", "the fractions of examples.stages must add up to 1"),
    ],
)
def test_a_mistake_in_set_is_one_line_with_key_value_and_what_is_allowed(override, line):
    assert refusal("roberta-base", [override]) == f"settings: {line}"


def test_an_unknown_key_with_no_near_one_is_answered_with_the_keys_there():
    line = refusal("bert-base", ["optim.xyzzy=1"])
    assert line.startswith("settings: unknown key optim.xyzzy; keys there are algorithm, peak_lr, beta1")


def test_a_mistake_in_a_file_names_the_file(file):
    path = file('base = "bert-base"\n[optim]\npeek_lr = 1\n')
    assert refusal(path) == f"{path}: unknown key optim.peek_lr; did you mean optim.peak_lr?"
    path = file("[optim]\nbeta2 = 2\n")
    assert refusal(path, ["optim.beta1=0.5"]).startswith(f"{path}: optim.beta2 = 2 is invalid")


def test_a_rule_between_keys_names_every_place_that_broke_it(file):
    path = file("[model]\nwidth = 100\n")
    assert refusal(path).startswith(f"{path}: model.heads = 12 does not divide model.width = 100")
    assert refusal(path, ["model.heads=3"]).startswith(f"{path}, settings: model.heads = 3 does not divide")
    line = refusal("roberta-base", ["model.positions=128"])
    assert line.startswith("preset roberta-base, settings: examples.stages ask for 512 tokens")


def test_a_rule_between_keys_says_what_to_do():
    line = refusal("bert-base", ["model.type=roberta"])
    rule = "model.type = roberta does not have a head for examples.pairs = nsp or sop"
    assert line == f"settings: {rule}; set examples.pairs to full-sentences, doc-sentences or none"


@pytest.mark.parametrize(
    ("overrides", "rule"),
    [
        (
            ["optim.muon_momentum=0.9"],
            "optim.muon_momentum applies only to optim.algorithm = muon, not adamw",
        ),
        (
            ["run.average_decay=0.9"],
            "run.average_decay applies to an average, but run.average_from is off",
        ),
        (["optim.decay_from=0.7"], "optim.decay_from applies only to optim.schedule = wsd, not google"),
        (
            ["optim.schedule=wsd", "optim.warmup_fraction=0.6"],
            "optim.decay_from = 0.5 is within the warm-up, which takes 0.6 of the run",
        ),
    ],
)
def test_a_setting_of_an_optimiser_schedule_or_average_that_is_not_taken_is_rejected(overrides, rule):
    assert refusal("bert-base", overrides).startswith(f"settings: {rule}")


def test_a_rule_that_names_no_written_key_tells_the_last_place_written():
    line = refusal("bert-base", ["examples.objective=left-to-right"])
    assert line.startswith("settings: a one-sided objective does not support sentence pairs")
    assert "`examples.pairs=none`" in line


@pytest.mark.parametrize(
    ("preset", "override", "remedy"),
    [
        ("distilbert", "model.segments=2", "set model.segments to 0"),
        ("distilbert", "model.norm_eps=1e-5", "set model.norm_eps to 1e-12"),
        ("bert-base", "model.embedding_width=128", "set model.embedding_width to width"),
        ("ernie-base", "model.embedding_width=128", "set model.embedding_width to width"),
        ("roberta-base", "model.task_types=3", "set model.task_types to 0"),
        ("albert-base", "model.segments=0", "set model.segments to 1 or more"),
    ],
)
def test_what_the_saved_model_could_not_say_is_rejected(preset, override, remedy):
    line = refusal(preset, [override])
    assert "would be lost in a saved model" in line and line.endswith(f"; {remedy}")


def test_an_embedding_width_may_be_written_as_the_number_it_is():
    assert load_recipe("bert-base", ["model.embedding_width=768"]).model.embedding_width == 768


def test_a_distilbert_made_of_a_bert_recipe_must_lose_its_segments():
    overrides = ["model.type=distilbert", "examples.pairs=none"]
    assert refusal("bert-base", overrides).startswith("settings: model.segments = 2 would be lost")
    assert load_recipe("bert-base", [*overrides, "model.segments=0"]).model.segments == 0


def test_a_long_value_is_cut_short():
    line = refusal("bert-base", [f"run.keep_at={list(range(1000))}"])
    assert len(line) < 300
    assert len(refusal("bert-base", ["run.steps=" + "x" * 1000])) < 300
