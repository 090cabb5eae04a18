"""Export a pre-training run's kept checkpoints as model folders, to compare or combine several steps."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bertsmith.core.errors import UserError
from bertsmith.core.files import check_not_taken, read_json
from bertsmith.corpus.token_store import TokenStore
from bertsmith.model.folder.model_folder import read_model
from bertsmith.model.network import Network
from bertsmith.objectives.registry import declaration
from bertsmith.objectives.replaced_token_detection import GENERATOR
from bertsmith.pretraining import pretrained_model
from bertsmith.pretraining.initial_model import build_initial_model
from bertsmith.pretraining.run_setup import STORE_FILE, run_folder
from bertsmith.recipe.load import load_recipe
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.training.checkpoint import SavedState, kept_states, load_weights
from bertsmith.training.checkpoint_storage import check_undamaged
from bertsmith.training.run_folder import card_text, facts_block, table_block, usage_block


@dataclass(frozen=True, slots=True)
class KeptCheckpoint:
    """Progress and metrics of a checkpoint that a run kept."""

    step: int
    tokens: int
    seconds: float
    held_out: dict[str, float]
    """Metrics of the last held-out evaluation before the checkpoint."""


def kept_checkpoints(run: Path) -> list[KeptCheckpoint]:
    """Return the checkpoints of a pre-training run, oldest first."""
    states = [saved.state for saved in _states(run).values()]
    return [
        KeptCheckpoint(each.step, each.tokens, each.seconds, each.scalars.get("held_out", {}))
        for each in states
    ]


def export_checkpoints(run: Path, targets: Mapping[int, Path], *, store: Path | None = None) -> None:
    """Write the checkpoints of these steps as model folders; keep folders that an earlier call has written.

    Config and tokenizer are taken from the finished model, or from the recipe and the store.
    """
    states = _states(run)
    for step in targets:
        if step not in states:
            known = ", ".join(map(str, states))
            raise UserError(f"step {step} was not kept", where=str(run), remedy=f"choose one of {known}")
        check_undamaged(states[step].folder)
    networks, tokenizer = _blank_model(run, store)
    recipe = (run / "recipe.toml").read_text(encoding="utf-8")
    cards = {step: _card(run, states[step], networks[""], tokenizer) for step in targets}
    texts = {step: {"recipe.toml": recipe, "card.md": card} for step, card in cards.items()}
    missing = {step: target for step, target in targets.items() if not _holds(target, texts[step])}
    for target in missing.values():
        check_not_taken(target)
    for step, target in missing.items():
        for folder, network in networks.items():
            load_weights(states[step], network, prefix=pretrained_model.weights_prefix(folder))
        pretrained_model.check_weights_are_finite(networks.values(), where=str(states[step].folder))
        pretrained_model.write_model_folder(target, networks, tokenizer, texts[step])


def _holds(folder: Path, texts: Mapping[str, str]) -> bool:
    """True if a folder, which is written atomically, has files of exactly these texts."""
    files = {folder / name: text for name, text in texts.items()}
    return all(file.is_file() and file.read_bytes() == text.encode() for file, text in files.items())


def _states(run: Path) -> dict[int, SavedState]:
    if not (run / STORE_FILE).is_file() or not run_folder(run).begun:
        remedy = "give the folder of a bertsmith pretrain run"
        raise UserError("is not a pre-training run", where=str(run), remedy=remedy)
    folder = run_folder(run).checkpoints
    states = {saved.state.step: saved for saved in kept_states(folder)}
    if not states:
        remedy = "set run.save_every_steps or run.keep_at to keep checkpoints"
        raise UserError("does not contain a checkpoint", where=str(folder), remedy=remedy)
    return states


def _blank_model(run: Path, store: Path | None) -> tuple[dict[str, Network], Tokenizer]:
    """Return networks, by folder, to load a checkpoint's weights into, and the tokenizer of the run."""
    folder = run_folder(run)
    if folder.finished:
        has_generator = (folder.model / GENERATOR).is_dir()
        folders = ["", GENERATOR] if has_generator else [""]
        networks = {each: read_model(folder.model / each).network for each in folders}
        return networks, Tokenizer.load(folder.model)
    if store is None:
        what = "the run is not finished, so its store is needed for the vocabulary"
        raise UserError(what, where=str(run), remedy="add `store`, the store that it trains on")
    opened = TokenStore.open(store)
    if read_json(run / STORE_FILE, remedy="give another run").get("hash") != opened.hash:
        remedy = "give `store` the run's initial store"
        raise UserError("the run was started with another store", where=str(store), remedy=remedy)
    initial = build_initial_model(load_recipe(folder.config), opened)
    networks = {"": initial.network.eval()}
    if initial.generator is not None:
        networks[GENERATOR] = initial.generator.eval()
    return networks, opened.tokenizer()


def _card(run: Path, saved: SavedState, network: Network, tokenizer: Tokenizer) -> str:
    recipe, state = load_recipe(run / "recipe.toml"), saved.state
    introduction = (
        f"A checkpoint of a pre-training run, exported with bertsmith: after {state.step:,} steps and "
        f"{state.tokens:,} tokens ({state.seconds / 60:.1f} minutes). "
        f"{pretrained_model.opened_by(network.config)}"
    )
    facts = ["Every setting: `recipe.toml`."]
    if saved.averaged:
        facts.append(f"The weights are the average of {saved.averaged:,} steps' (`run.average_from`).")
    results = pretrained_model.held_out_rows(declaration(recipe), state.scalars.get("held_out", {}))
    blocks = [
        facts_block(facts, heading="Training"),
        table_block(("metric", "value"), results, heading="Last held-out results before it"),
    ]
    caveat = "The learning rate had not decayed fully, unless this is the run's last checkpoint."
    blocks.append(usage_block(pretrained_model.usage_of(network, tokenizer)))
    title = f"{recipe.name}, step {state.step:,}"
    header = pretrained_model.card_header(network, tokenizer)
    return card_text(title, introduction, blocks, caveat=caveat, header=header)
