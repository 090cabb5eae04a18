"""The presets hold what was published."""

import tomllib
from contextlib import suppress
from itertools import pairwise

import pytest

from bertsmith.core.errors import UserError
from bertsmith.model.architectures.registry import architecture_of
from bertsmith.model.encoder_config import ConfigReader
from bertsmith.model.network import build_network
from bertsmith.recipe import load
from tests.example_stores import wordpiece

MODEL_CHANGES = [
    *(f"model.segments={segments}" for segments in range(4)),
    *("model.task_types=3", "model.embedding_width=96", "model.norm_eps=1e-6", "model.activation=gelu_new"),
    *("model.dropout=0.3", "model.attention_dropout=0.3", "model.initial_std=0.03", "model.positions=40"),
    *("model.layers=3", "model.heads=1", "model.inner=100", "model.width=1536", "model.activation=relu2"),
    *("model.global_layers=2", "model.global_layers=[0, 7]", "model.local_attention=64", "model.gated=false"),
    *("model.global_theta=5e4", "model.local_theta=500", "model.norm=rmsnorm", "model.qk_norm=true"),
    "model.sandwich_norm=true",
]

# layers, width, heads, inner, embedding width
SIZES = {
    "bert-tiny": (2, 128, 2, 512, "width"),
    "bert-mini": (4, 256, 4, 1024, "width"),
    "bert-small": (4, 512, 8, 2048, "width"),
    "bert-medium": (8, 512, 8, 2048, "width"),
    "bert-base": (12, 768, 12, 3072, "width"),
    "bert-large": (24, 1024, 16, 4096, "width"),
    "roberta-base": (12, 768, 12, 3072, "width"),
    "roberta-large": (24, 1024, 16, 4096, "width"),
    "albert-base": (12, 768, 12, 3072, 128),
    "albert-large": (24, 1024, 16, 4096, 128),
    "albert-xlarge": (24, 2048, 16, 8192, 128),
    "albert-xxlarge": (12, 4096, 64, 16384, 128),
    "distilbert": (6, 768, 12, 3072, "width"),
    "ernie-base": (12, 768, 12, 3072, "width"),
    "electra-small": (12, 256, 4, 1024, 128),
    "electra-base": (12, 768, 12, 3072, "width"),
    "speedrun-small": (9, 384, 6, 1024, "width"),
    "speedrun-base": (12, 768, 12, 2048, "width"),
    "modernbert-base": (22, 768, 12, 1152, "width"),
    "modernbert-large": (28, 1024, 16, 2624, "width"),
    "gpt2-small": (12, 768, 12, 3072, "width"),
    "elmo-small": (2, 256, 12, 3072, "width"),  # it has neither heads nor a feed-forward
    "elmo-original": (2, 1024, 12, 3072, "width"),
}

TWO_STAGES = [(0.9, 128, 20), (0.1, 512, 77)]
ONE_STAGE = [(1.0, 512, 77)]
BERT = {
    "model.type": "bert", "model.segments": 2, "model.activation": "gelu", "model.norm_eps": 1e-12,
    "model.dropout": 0.1, "model.attention_dropout": 0.1, "model.initial_std": 0.02, "model.positions": 512,
    "examples.objective": "masked", "examples.pairs": "nsp", "examples.negative_probability": 0.5,
    "examples.short_probability": 0.1, "examples.stages": TWO_STAGES,
    "masking.rate": 0.15, "masking.as_mask": 0.8, "masking.as_random": 0.1, "masking.unit": "token",
    "masking.levels": [], "masking.count": "rounded", "masking.random_from": "vocabulary",
    "masking.masks": "dynamic", "masking.copies": 10,
    "batch.by": "sequences", "batch.sequences": 256,
    "optim.algorithm": "adamw", "optim.peak_lr": 1e-4, "optim.beta1": 0.9, "optim.beta2": 0.999,
    "optim.eps": 1e-6, "optim.weight_decay": 0.01, "optim.bias_correction": False, "optim.clip_norm": 1.0,
    "optim.warmup_fraction": 0.01, "optim.schedule": "google",
    "run.budget": "steps", "run.steps": 1_000_000,
}  # fmt: skip
ROBERTA = BERT | {
    "model.type": "roberta", "model.segments": 1, "model.norm_eps": 1e-5,
    "examples.pairs": "full-sentences", "examples.short_probability": 0.0, "examples.stages": ONE_STAGE,
    "masking.count": "stochastic", "masking.random_from": "ordinary",
    "batch.sequences": 8192,
    "optim.peak_lr": 6e-4, "optim.beta2": 0.98, "optim.bias_correction": True, "optim.clip_norm": "off",
    "optim.warmup_fraction": 24_000 / 500_000, "optim.schedule": "linear",
    "run.steps": 500_000,
}  # fmt: skip
ALBERT = BERT | {
    "model.type": "albert", "model.activation": "gelu_new",
    "model.dropout": 0.0, "model.attention_dropout": 0.0,
    "examples.pairs": "sop", "examples.stages": [(1.0, 512, 20)],
    "masking.unit": "ngram", "masking.longest_ngram": 3, "masking.copies": 40,
    "batch.sequences": 4096,
    "optim.algorithm": "lamb", "optim.peak_lr": 0.00176, "optim.warmup_fraction": 3_125 / 125_000,
    "run.steps": 125_000,
}  # fmt: skip
DISTILBERT = BERT | {
    "model.type": "distilbert", "model.segments": 0,
    "examples.pairs": "doc-sentences", "examples.short_probability": 0.0, "examples.stages": ONE_STAGE,
    "batch.sequences": 4096,
    "optim.peak_lr": 5e-4, "optim.beta2": 0.98, "optim.weight_decay": 0.0, "optim.bias_correction": True,
    "optim.clip_norm": 5.0, "optim.warmup_fraction": 0.05, "optim.schedule": "linear",
    "run.budget": "tokens", "run.tokens": 10_000_000_000,
}  # fmt: skip
ERNIE = BERT | {
    "model.type": "ernie", "model.task_types": 0,
    "examples.short_probability": 0.15, "examples.stages": ONE_STAGE,
    "masking.levels": [("token", 0.34), ("phrase", 0.33), ("entity", 0.33)], "masking.levels_by": "mix",
    "batch.by": "tokens", "batch.tokens": 65_536,
    "optim.eps": 1e-8, "optim.bias_correction": True, "optim.warmup_fraction": 5_000 / 1_000_000,
}  # fmt: skip
ELECTRA = BERT | {
    "model.type": "electra",
    "examples.objective": "replaced", "examples.pairs": "none", "examples.short_probability": 0.05,
    "examples.stages": [(1.0, 128, 19)],
    "masking.as_mask": 0.85, "masking.as_random": 0.0,
    "replaced.generator_size": 0.25, "replaced.discriminator_weight": 50.0,
    "batch.sequences": 128,
    "optim.peak_lr": 5e-4,
}  # fmt: skip
ELECTRA_BASE = ELECTRA | {
    "examples.stages": [(1.0, 512, 79)],
    "replaced.generator_size": pytest.approx(1 / 3),
    "batch.sequences": 256,
    "optim.peak_lr": 2e-4, "optim.warmup_fraction": pytest.approx(10_000 / 766_000, abs=1e-5),
    "run.steps": 766_000,
}  # fmt: skip
MODERNBERT = BERT | {
    "model.type": "modernbert", "model.segments": 0, "model.norm_eps": 1e-5, "model.positions": 1024,
    "model.dropout": 0.0, "model.attention_dropout": 0.0, "model.gated": "auto", "model.norm": "layernorm",
    "model.global_layers": 3, "model.local_attention": 128,
    "model.global_theta": 10_000.0, "model.local_theta": 10_000.0,
    "examples.pairs": "doc-sentences", "examples.short_probability": 0.0,
    "examples.stages": [(1.0, 1024, 308)],
    "masking.rate": 0.3, "masking.count": "stochastic",
    "batch.by": "tokens", "batch.tokens": 4_608 * 1_024,
    "optim.peak_lr": 8e-4, "optim.beta2": 0.98, "optim.weight_decay": 1e-5, "optim.bias_correction": True,
    "optim.warmup_fraction": pytest.approx(3 / 1_719, rel=1e-3), "optim.schedule": "constant",
    "run.budget": "tokens", "run.tokens": 1_719_000_000_000,
}  # fmt: skip
MODERNBERT_LARGE = MODERNBERT | {
    "batch.tokens": 4_928 * 1_024,
    "optim.peak_lr": 5e-4, "optim.warmup_fraction": pytest.approx(2 / 1_719, rel=1e-3),
}  # fmt: skip
SPEEDRUN = {
    "model.type": "modernbert", "model.activation": "gelu", "model.gated": "auto", "model.norm": "layernorm",
    "model.qk_norm": False, "model.norm_eps": 1e-5, "model.dropout": 0.0, "model.global_layers": 1,
    "examples.pairs": "nsp", "examples.single_fraction": 0.5, "examples.pair_weight": 1.0,
    "examples.stages": [(1.0, 128, 39)], "masking.rate": 0.3,
    "examples.short_fraction": 0.3, "optim.weight_decay": 0.1, "optim.decay_from": 0.1,
    "batch.by": "tokens", "batch.tokens": 65_024,
    "optim.algorithm": "muon", "optim.schedule": "wsd", "optim.peak_lr": 1.5e-3,
    "optim.matrix_lr_factor": 2.0, "run.budget": "minutes",
}  # fmt: skip
SPEEDRUN_BASE = SPEEDRUN | {
    "examples.objective": "replaced", "examples.stages": [(1.0, 128, 26)],
    "masking.rate": 0.2, "masking.as_mask": 0.85, "masking.as_random": 0.0,
    "optim.peak_lr": 5e-4, "run.minutes": 20.0,
}  # fmt: skip
GPT2 = BERT | {
    "model.type": "gpt2", "model.segments": 0, "model.activation": "gelu_new", "model.norm_eps": 1e-5,
    "model.positions": 1024,
    "examples.objective": "left-to-right", "examples.pairs": "full-sentences",
    "examples.short_probability": 0.0, "examples.stages": [(1.0, 1024, 1023)],
    "batch.sequences": 512,
    "optim.peak_lr": 6e-4, "optim.beta2": 0.95, "optim.eps": 1e-8, "optim.weight_decay": 0.1,
    "optim.bias_correction": True, "optim.warmup_fraction": 375 / 300_000, "optim.schedule": "cosine",
    "run.budget": "tokens", "run.tokens": 300_000_000_000,
}  # fmt: skip
ELMO = BERT | {
    "model.type": "elmo", "model.segments": 0, "model.cell": 4096,
    "examples.objective": "two-directions", "examples.pairs": "full-sentences",
    "examples.short_probability": 0.0, "examples.stages": [(1.0, 128, 126)],
    "batch.by": "tokens", "batch.tokens": 128 * 20 * 3,
    "optim.peak_lr": 1e-3, "optim.weight_decay": 0.0, "optim.bias_correction": True, "optim.clip_norm": 10.0,
    "optim.schedule": "linear",
    "run.budget": "tokens", "run.tokens": 10 * 768_648_884,
}  # fmt: skip
PUBLISHED = {
    **dict.fromkeys(["bert-tiny", "bert-mini", "bert-small", "bert-medium", "bert-base", "bert-large"], BERT),
    "roberta-base": ROBERTA,
    "roberta-large": ROBERTA | {"optim.peak_lr": 4e-4, "optim.warmup_fraction": 30_000 / 500_000},
    **dict.fromkeys(["albert-base", "albert-large", "albert-xlarge", "albert-xxlarge"], ALBERT),
    "distilbert": DISTILBERT,
    "ernie-base": ERNIE,
    "electra-small": ELECTRA,
    "electra-base": ELECTRA_BASE,
    "modernbert-base": MODERNBERT,
    "modernbert-large": MODERNBERT_LARGE,
    "speedrun-small": SPEEDRUN,
    "speedrun-base": SPEEDRUN_BASE,
    "gpt2-small": GPT2,
    "elmo-small": ELMO | {"model.cell": 1024},
    "elmo-original": ELMO,
}

# Encoder plus pooler (DistilBERT, ELECTRA, ModernBERT and GPT-2 have none) with the published vocabulary.
COUNTS = {
    "bert-base": 109_482_240,
    "bert-large": 335_141_888,
    "roberta-base": 124_645_632,
    "roberta-large": 355_359_744,
    "albert-base": 11_683_584,
    "albert-large": 17_683_968,
    "albert-xlarge": 58_724_864,
    "albert-xxlarge": 222_595_584,
    "distilbert": 66_362_880,
    "electra-small": 13_483_008,
    "electra-base": 108_891_648,
    "modernbert-base": 149_014_272,
    "modernbert-large": 394_781_696,
    "gpt2-small": 124_439_808,
}

each_preset = pytest.mark.parametrize("name", SIZES)


def test_these_are_all_the_presets():
    assert load.preset_names() == sorted(SIZES) == sorted(PUBLISHED)


@each_preset
def test_a_preset_has_the_published_size(name):
    model = load.load_recipe(name).model
    assert (model.layers, model.width, model.heads, model.inner, model.embedding_width) == SIZES[name]


@each_preset
def test_a_preset_has_the_published_hyper_parameters(name):
    held = load.leaves(load.load_recipe(name).model_dump())
    held["examples.stages"] = [tuple(stage.values()) for stage in held["examples.stages"]]
    held["masking.levels"] = [tuple(level.values()) for level in held["masking.levels"]]
    assert {key: held[key] for key in PUBLISHED[name]} == PUBLISHED[name]


@each_preset
def test_a_preset_goes_by_the_name_of_its_file(name):
    assert load.load_recipe(name).name == name


@each_preset
def test_a_preset_names_the_source_of_every_value(name):
    lines = load.preset_text(name).splitlines()
    assert lines[0].startswith("# ")
    for above, line in pairwise(lines):
        if line[:1].isalpha() and not line.startswith(("name =", "base =", "type =")):
            assert "# " in line or above.startswith("# "), line


@each_preset
def test_a_preset_stands_on_at_most_one_other(name):
    base = tomllib.loads(load.preset_text(name)).get("base")
    assert base is None or "base" not in tomllib.loads(load.preset_text(base))


# ---- sizes


@pytest.mark.parametrize(("name", "count"), COUNTS.items())
def test_the_formula_gives_the_published_counts(name, count):
    model = load.load_recipe(name).model
    assert load.encoder_parameters(model, load.published_vocabulary(model.type)) == count


def test_the_formula_follows_the_vocabulary():
    assert (
        load.encoder_parameters(load.load_recipe("bert-base").model, 28_996) == 108_310_272
    )  # BERT-Base cased


@each_preset
def test_the_formula_agrees_with_the_network_itself(name):
    import torch

    model = load.load_recipe(name, ["model.positions=1200"]).model
    with torch.device("meta"):
        network = build_network(
            published_config_of(model, vocabulary=1000),
            {} if model.type in ("distilbert", "electra", "modernbert", "gpt2", "elmo") else {"pooler": 0},
        )
    assert load.encoder_parameters(model, 1000) == sum(each.numel() for each in network.parameters())


def published_config_of(model, *, vocabulary):
    """The model section as a published config, read as such."""
    sizes = {"hidden_size": model.width, "num_hidden_layers": model.layers, "intermediate_size": model.inner}
    sizes |= {"num_attention_heads": model.heads, "type_vocab_size": model.segments, "vocab_size": vocabulary}
    sizes |= {"max_position_embeddings": model.positions + 2 * (model.type == "roberta")}
    sizes |= {"cell_size": model.cell}
    if model.type == "distilbert":
        sizes |= {"dim": model.width, "n_layers": model.layers, "n_heads": model.heads}
        sizes |= {"hidden_dim": model.inner}
    if model.type == "gpt2":
        sizes |= {"n_embd": model.width, "n_layer": model.layers, "n_head": model.heads}
        sizes |= {"n_inner": model.inner, "n_positions": model.positions}
    config = {
        "model_type": model.type,
        "embedding_size": model.width if model.embedding_width == "width" else model.embedding_width,
        **sizes,
    }
    return architecture_of(model.type).read_config(ConfigReader(config, "config.json"))


@pytest.mark.parametrize(
    "name", ["bert-tiny", "roberta-base", "albert-base", "distilbert", "ernie-base", "modernbert-base"]
)
def test_a_model_that_a_recipe_may_ask_for_is_the_same_after_saving(name, tmp_path):
    from bertsmith.pretraining.initial_model import encoder_config_of

    tokenizer, models = wordpiece(tmp_path), accepted_changes(name)
    assert len(models) >= 10
    for change, model in models.items():
        config, architecture = encoder_config_of(model, tokenizer), architecture_of(model.type)
        saved = {"model_type": model.type, **architecture.write_config(config)}
        assert architecture.read_config(ConfigReader(saved, "config.json")) == config, change


def accepted_changes(name):
    """The model sections of a preset with each of the changes that it may have."""
    models = {}
    for change in MODEL_CHANGES:
        with suppress(UserError):
            short = "examples.stages=[{fraction=1, length=8, predictions=2}]"
            models[change] = load.load_recipe(name, [change, short]).model
    return models


def test_the_summaries_come_in_order_of_size_within_a_family():
    assert [each.name for each in load.preset_summaries()] == list(SIZES)
    tiny = load.preset_summaries()[0]
    assert (tiny.parameters, tiny.vocabulary) == (4_385_920, 30_522)
    assert tiny.summary.startswith("BERT-Tiny: 2 layers, 128 wide")
