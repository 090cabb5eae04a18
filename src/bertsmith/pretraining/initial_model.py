"""Initial network of a run: freshly sampled, or from a model folder with missing parts added."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from bertsmith.core.errors import UserError
from bertsmith.core.files import read_json
from bertsmith.core.seeds import key_of
from bertsmith.corpus.token_store import TokenStore, tokenizer_hash
from bertsmith.inference.model_path import is_adapter, model_folder
from bertsmith.model.architectures.distilbert import without_segments
from bertsmith.model.architectures.registry import architecture_of
from bertsmith.model.encoder_config import ConfigReader, Direction, EncoderConfig
from bertsmith.model.folder.model_folder import Model, read_config, read_model
from bertsmith.model.folder.sentence_modules import transformer_folder
from bertsmith.model.heads import MaskedLanguageHead
from bertsmith.model.layer_subset import (
    freeze_positions,
    network_of_layers,
)
from bertsmith.model.network import Network, add_fresh_head, new_network, set_direction
from bertsmith.objectives.distillation import check_comparable, check_reads_masks
from bertsmith.objectives.registry import OBJECTIVES
from bertsmith.objectives.replaced_token_detection import GENERATOR
from bertsmith.recipe.model_section import ModelSection
from bertsmith.recipe.schema import Recipe
from bertsmith.recipe.validation_errors import user_error
from bertsmith.text.extend_vocabulary import new_words, read_words, with_words
from bertsmith.text.tokenizer import Tokenizer

log = logging.getLogger("bertsmith")

SIDES: dict[Direction, str] = {
    "both": "both sides of a token",
    "left-to-right": "the text before a token",
    "right-to-left": "the text after a token",
    "two-directions": "one side of a token in each half of its state",
}


@dataclass(frozen=True, slots=True)
class InitialModel:
    """A network to train, with notes for the user."""

    network: Network
    notes: tuple[str, ...] = ()
    generator: Network | None = None
    """Masked LM that a discriminator learns from, if the objective has one."""
    teacher: Network | None = None
    """Teacher of a student, if the objective has one."""

    @property
    def other(self) -> Network | None:
        """Second network of the objective: generator, teacher or None."""
        return self.generator if self.teacher is None else self.teacher


def build_initial_model(recipe: Recipe, store: TokenStore) -> InitialModel:
    """Build the network that the recipe requires, for the store's vocabulary."""
    stream = torch.Generator().manual_seed(key_of(recipe.run.seed, "initial weights"))
    objective = OBJECTIVES[recipe.examples.objective]
    teacher = read_teacher(recipe, store) if recipe.examples.has_teacher else None
    if teacher is not None and recipe.distill.layers:
        initial = _student_of_layers(recipe, teacher, stream)
    elif recipe.start.model == "scratch":
        config = encoder_config_of(recipe.model, store.tokenizer())
        initial = InitialModel(new_network(config, objective.heads(recipe), stream))
        if recipe.examples.has_generator:
            generator = new_network(_generator_config(recipe, config), {"mlm": 0}, stream)
            initial = replace(initial, generator=generator)
    else:
        initial = _adapted(recipe, store, stream)
    if teacher is not None:
        _check_student(initial.network, teacher, recipe)
        initial = replace(initial, teacher=teacher)
    before, wanted = initial.network.config.direction, recipe.examples.sees
    set_direction(initial.network, wanted)
    if recipe.start.model != "scratch" and before != wanted:
        note = f"{recipe.start.model} sees {SIDES[before]}; it will see {SIDES[wanted]} (examples.objective)"
        initial = replace(initial, notes=(*initial.notes, note))
    config = initial.network.config
    if only_ours := config.own_settings():
        note = f"only bertsmith opens the result: no published {config.model_type} has {', '.join(only_ours)}"
        initial = replace(initial, notes=(*initial.notes, f"{note} as set here"))
    return initial


def encoder_config_of(model: ModelSection, tokenizer: Tokenizer) -> EncoderConfig:
    """Return the encoder config of a new network for this vocabulary."""
    begin, end = tokenizer.ends
    ids = {"pad_id": tokenizer.pad_id, "begin_id": begin, "end_id": end}
    return model.encoder_config(tokenizer.vocabulary_size, **ids)


def with_true_model(recipe: Recipe) -> Recipe:
    """Return the recipe with the true architecture: its initial model folder's, if it has one, or a student's
    made from the teacher's layers.
    """
    if recipe.start.model == "scratch":
        _check_words_have_a_model(recipe)
        if not recipe.distill.layers:
            return recipe
        folder, config = folder_and_config(recipe.distill.teacher, key="distill.teacher")
        config = student_config(config, recipe)
    else:
        folder, config = folder_and_config(recipe.start.model, key="start.model")
    values = {**recipe.model_dump(), "model": model_section_of(config).model_dump()}
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise user_error(error, values, {f"model.{key}": str(folder) for key in values["model"]}) from error


def folder_and_config(model: str, *, key: str) -> tuple[Path, EncoderConfig]:
    """Return the folder of a model that a setting names, and its encoder config, without its weights."""
    folder = transformer_folder(model_folder(model))
    if is_adapter(folder):
        remedy = "combine both with bertsmith merge"
        raise UserError("is an adapter of another model", where=model, remedy=remedy)
    config_json = read_json(folder / "config.json", remedy=f"give `{key}` a model folder")
    return folder, read_config(ConfigReader(config_json, str(folder / "config.json")))


def student_config(teacher: EncoderConfig, recipe: Recipe) -> EncoderConfig:
    """Return the config of a student that begins with layers of a teacher."""
    fewer = teacher.subset(recipe.distill.layers)
    return without_segments(fewer) if recipe.distill.segments == "dropped" else fewer


def read_teacher(recipe: Recipe, store: TokenStore) -> Network:
    """Read the teacher of a recipe, without unused heads."""
    folder, distill = model_folder(recipe.distill.teacher), recipe.distill
    model = read_model(folder)
    check_reads_masks(model.network)
    check_same_vocabulary(Tokenizer.load(transformer_folder(folder)), store, distill.teacher)
    if distill.soft_weight and "mlm" not in model.network.heads:
        remedy = (
            "give one with an MLM head (bertsmith pretrain --from trains one), or set distill.soft_weight=0"
        )
        raise UserError("does not predict words: it lacks an MLM head", where=str(folder), remedy=remedy)
    longest, most = max(stage.length for stage in recipe.examples.stages), model.network.config.positions
    if longest > most:
        what = f"takes texts of at most {most} tokens, but examples.stages require {longest}"
        raise UserError(what, where=str(folder), remedy=f"give `max_length={most}`, or less")
    for head in set(model.network.heads) - {"mlm"}:
        del model.network.heads[head]
    return model.network


def _student_of_layers(recipe: Recipe, teacher: Network, stream: torch.Generator) -> InitialModel:
    config, notes = student_config(teacher.config, recipe), []
    if config.segments != teacher.config.segments:
        notes.append("the student is a DistilBERT: the first segment's vector is part of its positions")
    network = network_of_layers(teacher, recipe.distill.layers, config)
    if recipe.distill.frozen_positions and freeze_positions(network):
        notes.append("its positions stay the teacher's (distill.frozen_positions)")
    notes += _fit_heads(Model(network), {"mlm": 0}, stream)
    return InitialModel(network, tuple(notes))


def _check_student(student: Network, teacher: Network, recipe: Recipe) -> None:
    """Raise if there is nothing to compare; warn if the student is the larger one."""
    check_comparable(student.config, teacher.config, recipe.distill)
    ours, theirs = (sum(each.numel() for each in net.encoder.parameters()) for net in (student, teacher))
    if ours > theirs:
        sizes = f"{ours:,} encoder weights, more than its teacher ({theirs:,})"
        log.warning("the student has %s", sizes)


def model_section_of(config: EncoderConfig) -> ModelSection:
    """Return the recipe's section for a folder's encoder config, so that a run's recipe.toml is true."""
    values = config.in_recipe()
    return ModelSection.model_validate(
        {key: values[key] for key in ModelSection.model_fields if key in values}
    )


def _check_words_have_a_model(recipe: Recipe) -> None:
    if recipe.start.add_words != "none":
        what = "words can only be added to the vocabulary of a model, but this run starts from scratch"
        where = f"`start.add_words={recipe.start.add_words}`"
        raise UserError(
            what, where=where, remedy="give `start.model` that model's folder, or remove the words"
        )


def _generator_config(recipe: Recipe, config: EncoderConfig) -> EncoderConfig:
    """Return the config of the generator that a discriminator of this config learns from."""
    pretraining = architecture_of(config.model_type).pretraining
    assert pretraining is not None and pretraining.generator_config is not None, "the recipe was checked"
    generator: EncoderConfig = pretraining.generator_config(config, recipe.replaced.generator_size)
    return generator


def _adapted(recipe: Recipe, store: TokenStore, stream: torch.Generator) -> InitialModel:
    folder = model_folder(recipe.start.model)
    model, before = read_model(folder), Tokenizer.load(transformer_folder(folder))
    objective, notes, tokenizer = OBJECTIVES[recipe.examples.objective], list(model.notes), before
    generator = (
        _read_generator(folder, recipe, model.network.config) if recipe.examples.has_generator else None
    )
    if recipe.start.add_words != "none":
        words = read_words(Path(recipe.start.add_words).expanduser())
        tokenizer = with_words(before, words)
        for network in (model.network, generator):
            if network is not None:
                notes.append(grow_for_words(network, before, tokenizer, words))
    check_same_vocabulary(tokenizer, store, recipe.start.model)
    notes += _fit_heads(model, objective.heads(recipe), stream)
    if recipe.examples.has_generator and generator is None:
        notes.append(f"the folder lacks a {GENERATOR}: it starts from fresh weights")
        generator = new_network(_generator_config(recipe, model.network.config), {"mlm": 0}, stream)
    return InitialModel(model.network, tuple(dict.fromkeys(notes)), generator)


def _fit_heads(model: Model, wanted: Mapping[str, int], stream: torch.Generator) -> list[str]:
    """Keep only a model's trained heads, adding missing ones; return notes on new heads."""
    notes = []
    for unwanted in set(model.network.heads) - set(wanted):
        del model.network.heads[unwanted]
    for head, outputs in wanted.items():
        if head not in model.network.heads or head in model.untrained:
            notes.append(f"the head {head} is not in the folder: it starts from fresh weights")
            if head not in model.network.heads:
                add_fresh_head(model.network, head, outputs, stream)
    return notes


def _read_generator(folder: Path, recipe: Recipe, config: EncoderConfig) -> Network | None:
    """Return the generator that a run left next to its discriminator, or None."""
    if not (folder / GENERATOR).is_dir():
        return None
    generator, wanted = read_model(folder / GENERATOR).network, _generator_config(recipe, config)
    for key in (
        "vocabulary",
        "embedding_width",
        "positions",
        "segments",
        "layers",
        "width",
        "heads",
        "inner",
    ):
        held, needed = (vars(each).get(key) for each in (generator.config, wanted))
        if held != needed:
            what = f"is a generator of {key} {held}, but the recipe and the model require {needed}"
            remedy = "restore replaced.generator_size, or remove the folder to begin with a new one"
            raise UserError(what, where=str(folder / GENERATOR), remedy=remedy)
    if "mlm" not in generator.heads:
        remedy = "remove the folder to begin with a new one"
        raise UserError("is not a masked language model", where=str(folder / GENERATOR), remedy=remedy)
    return generator


def check_same_vocabulary(tokenizer: Tokenizer, store: TokenStore, model: str) -> None:
    """Raise if the tokens of a store and a model differ."""
    if tokenizer_hash(tokenizer) != store.tokenizer_hash:
        what = f"the store was tokenised with another vocabulary than {model}'s"
        source = "`vocab` (and `start.add_words`) of that model"
        raise UserError(what, where=str(store.folder), remedy=f"make the store again with {source}")


def grow_for_words(network: Network, before: Tokenizer, after: Tokenizer, words: Sequence[str]) -> str:
    """Give each new word the mean of its former pieces' embeddings; return a note about it."""
    fresh = new_words(before, words)
    if after.vocabulary_size > network.config.vocabulary:
        _grow(network, after.vocabulary_size)
    # The decoder of masked words is the same table, unless the folder has a separate one.
    head = _masked_language_head(network)
    learned = [network.encoder.words.weight, *(() if head is None else (head.decoder, head.bias))]
    tables = [table for table in learned if table is not None]
    with torch.no_grad():
        for word in fresh:
            pieces = [number for number in before.encode(word).ids if number not in before.special_ids]
            rows = torch.tensor(pieces or [before.unknown_id])
            for table in tables:
                table[after.id(word)] = table[rows].mean(0)
    behind = after.vocabulary_size - before.vocabulary_size
    return (
        f"{len(fresh)} words added, {len(fresh) - behind} of them in [unused] slots, {behind} after the end"
    )


def _grow(network: Network, entries: int) -> None:
    def longer(table: Tensor) -> nn.Parameter:
        rows = table.new_zeros(entries, *table.shape[1:])
        rows[: len(table)] = table.detach()
        return nn.Parameter(rows)

    words, head = network.encoder.words, _masked_language_head(network)
    words.weight, words.num_embeddings = longer(words.weight), entries
    if head is not None:
        head.bias = None if head.bias is None else longer(head.bias)
        head.decoder = None if head.decoder is None else longer(head.decoder)
    network.config = replace(network.config, vocabulary=entries)


def _masked_language_head(network: Network) -> MaskedLanguageHead | None:
    if "mlm" not in network.heads:
        return None
    head = network.heads["mlm"]
    assert isinstance(head, MaskedLanguageHead)
    return head
