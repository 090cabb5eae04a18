"""Finding a model folder: a folder, a run's, the best of several runs, or one in a cache.

Nothing is downloaded: a name such as `org/name` is looked up in the cache of the Hugging Face tools.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from bertsmith.core.errors import UserError
from bertsmith.core.files import read_json, reporting_missing_homes
from bertsmith.inference.embedded_models import embedded_models
from bertsmith.model.folder.sentence_modules import MODULES_FILE

ADAPTER_CONFIG = "adapter_config.json"
"""File that peft and bertsmith write next to the weights of an adapter."""
SPREAD_FILE = "spread.json"
"""File next to the folders of several runs: the result of each, and the best one."""
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
"""A model's name on the hub; the oldest names lack an organisation."""


def model_folder(given: Path | str, *, environment: Mapping[str, str] = os.environ) -> Path:
    """Return the model folder for a path or name: of a run, the best of several, embedded or cached."""
    with reporting_missing_homes(given):
        folder = Path(given).expanduser()
    if folder.is_file():
        remedy = f"give its folder, {folder.parent}"
        raise UserError("is a file, not a model folder", where=str(folder), remedy=remedy)
    if not folder.is_dir():
        return embedded_models().get(str(given)) or _cached_folder(str(given), environment)
    if is_model(folder):
        return folder
    if is_model(folder / "model"):
        return folder / "model"
    runs = sorted(each.parent.name for each in folder.glob("*/model") if is_model(each))
    if not runs:
        return folder  # opening it reports what is missing
    # The folder of `finetune --seeds` or `--grid`; its spread is written once all runs are finished.
    spread = folder / SPREAD_FILE
    best = read_json(spread, remedy="run the study again").get("best") if spread.is_file() else None
    if best in runs:
        return folder / str(best) / "model"
    what = f"contains {len(runs)} runs, without a record of the best one"
    remedy = f"give one of them: {', '.join(str(folder / name) for name in runs)}"
    raise UserError(what, where=str(folder), remedy=remedy)


def is_adapter(folder: Path) -> bool:
    """Return True if a folder contains an adapter, which needs a base model."""
    return (folder / ADAPTER_CONFIG).is_file()


def is_model(folder: Path) -> bool:
    """Return True if a folder itself contains a model or an adapter."""
    return any((folder / file).exists() for file in ("config.json", MODULES_FILE, ADAPTER_CONFIG))


def _cached_folder(name: str, environment: Mapping[str, str]) -> Path:
    """Return the snapshot of a model in the cache of the Hugging Face tools."""
    cache = _hub_cache(environment)
    place = cache / f"models--{name.replace('/', '--')}"
    main = place / "refs" / "main"
    snapshots = sorted(place.glob("snapshots/*"))
    if main.is_file():
        commit = main.read_text(encoding="utf-8").strip()
        snapshots = [each for each in snapshots if each.name == commit]
    if HUB_NAME.fullmatch(name) and len(snapshots) == 1:
        return snapshots[0]
    what, remedy = "this folder does not exist", "give the path of a folder on this machine"
    if HUB_NAME.fullmatch(name) and "/" in name:
        what = f"{what}, and {cache} lacks a model of this name"
        remedy = f"{remedy}, or download the model with: hf download {name}"
    elif name.startswith("bertsmith"):
        remedy = f"{remedy}, or use an included model ({', '.join(embedded_models())})"
    raise UserError(what, where=name, remedy=f"{remedy}; bertsmith itself downloads nothing")


def _hub_cache(environment: Mapping[str, str]) -> Path:
    """Return the cache of the Hugging Face tools, by the rules of huggingface_hub."""
    if chosen := environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE"):
        return Path(chosen).expanduser()
    cache = environment.get("XDG_CACHE_HOME") or "~/.cache"
    home = environment.get("HF_HOME") or str(Path(cache) / "huggingface")
    return Path(home).expanduser() / "hub"
