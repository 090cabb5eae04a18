"""Folders of sentence-transformers: the steps from a text to a vector, read and written back.

`modules.json` lists the steps, each with the folder of its settings: a Transformer (the model itself),
Pooling, and often Normalize. Other files have prompts and the longest text.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal, get_args

from bertsmith.core.errors import UserError
from bertsmith.core.files import read_json, read_text, write_json

Pooling = Literal["mean", "cls", "max", "mean_sqrt_len_tokens", "lasttoken", "pooler", "centred"]
"""Poolings of sentence-transformers, and two of ours: pooler, and centred (see `Bert.embed`)."""
POOLINGS = get_args(Pooling)

MODULES_FILE = "modules.json"
PROMPTS_FILE = "config_sentence_transformers.json"
LENGTH_FILE = "sentence_bert_config.json"
POOLING_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""The switches of 1_Pooling/config.json, which newer files replace by one `pooling_mode`."""
REMEDY = "copy the whole folder again"


@dataclass(frozen=True, slots=True)
class SentenceModules:
    """Conversion of a text to a vector by a folder; the defaults are for a model not trained for that."""

    pooling: Pooling = "centred"
    normalize: bool = True
    longest: int | None = None
    """Tokens of the longest text; None: the model's maximum."""
    lowers_case: bool = False
    """True if texts are lower-cased before they are tokenized."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Prefixes of texts, by the name of the purpose."""
    default_prompt: str = ""
    unsupported: str = ""
    """Required step of the folder that is not supported here; empty if all are."""
    files: Mapping[str, Any] = field(default_factory=dict)
    """Files by their names in the folder, to be written back; empty without a modules.json."""

    def prepares(self, prompt: str | None) -> bool:
        """True if texts are changed before they are read."""
        return self.lowers_case or bool(self.default_prompt if prompt is None else prompt)

    def prepared(self, text: str, prompt: str | None) -> str:
        """Return the text after a prompt: this one, or by default the folder's own."""
        if not text.strip():
            return text  # an empty text is a mistake, with or without a prompt
        whole = (self.default_prompt if prompt is None else prompt) + text
        return whole.lower() if self.lowers_case else whole

    def write(self, folder: Path) -> None:
        """Write the files back into an unfinished model folder."""
        for name, value in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write_json(folder / name, value)


def transformer_folder(folder: Path) -> Path:
    """Return the folder with config.json and weights: itself, or its 0_Transformer (the older layout)."""
    if (folder / "config.json").exists() or not (folder / MODULES_FILE).is_file():
        return folder
    return folder / next((each["path"] for each in _modules(folder) if _kind(each) == "Transformer"), "")


def read_sentence_modules(folder: Path) -> SentenceModules:
    """Read the modules of a folder; the defaults if it is not one of sentence-transformers."""
    if not (folder / MODULES_FILE).is_file():
        return SentenceModules()
    modules, inner = _modules(folder), transformer_folder(folder)
    # Saved files are next to modules.json, in either layout.
    flat = [{**each, "path": ""} if _kind(each) == "Transformer" else each for each in modules]
    files: dict[str, Any] = {MODULES_FILE: flat}
    length, prompts = _optional(inner / LENGTH_FILE), _optional(folder / PROMPTS_FILE)
    files |= {name: value for name, value in ((LENGTH_FILE, length), (PROMPTS_FILE, prompts)) if value}
    steps, unsupported = [_kind(each) for each in modules], ""
    if steps not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        unsupported = f"the steps {', '.join(steps)}" if steps else "an empty list of steps"
    pooling: Pooling = "mean"
    leaves_prompt_out = False
    for each in (each for each in modules if _kind(each) == "Pooling"):
        name = f"{each['path']}/config.json"
        settings = files[name] = read_json(folder / name, remedy=REMEDY)
        leaves_prompt_out = settings.get("include_prompt") is False
        modes = _modes(settings)
        if len(modes) == 1 and modes[0] in POOLINGS:
            pooling = modes[0]
        else:
            unsupported = unsupported or f"the pooling {' with '.join(modes)}"
    listed = prompts.get("prompts") or {}
    if not isinstance(listed, dict):
        what, remedy = f"prompts is {listed!r}", 'write it as {"query": "text before queries", ...}'
        raise UserError(what, where=str(folder / PROMPTS_FILE), remedy=remedy)
    named = {str(name): str(text) for name, text in listed.items()}
    default = _default_prompt(prompts, named, where=folder / PROMPTS_FILE)
    if named and leaves_prompt_out:
        unsupported = unsupported or "prompts that are not pooled (include_prompt)"
    return SentenceModules(
        pooling=pooling,
        normalize="Normalize" in steps,
        longest=_longest(length, where=inner / LENGTH_FILE),
        lowers_case=bool(length.get("do_lower_case")),
        prompts=named,
        default_prompt=default,
        unsupported=unsupported,
        files=files,
    )


def _modules(folder: Path) -> list[dict[str, Any]]:
    """Return the steps as modules.json lists them, each with the folder of its settings."""
    file = folder / MODULES_FILE
    try:
        listed = json.loads(read_text(file, remedy=REMEDY))
    except (ValueError, RecursionError) as error:
        raise UserError(f"is not valid JSON ({error})", where=str(file), remedy=REMEDY) from error
    if not isinstance(listed, list) or not all(isinstance(each, dict) and "type" in each for each in listed):
        raise UserError("is not a list of modules with their types", where=str(file), remedy=REMEDY)
    for each in listed:
        path = PurePosixPath(str(each.get("path") or ""))
        if path.is_absolute() or ".." in path.parts:
            what = f"has a module at {path}, outside of the folder"
            raise UserError(what, where=str(file), remedy="correct the path")
        # Its config.json would be the model's, and be overwritten.
        if _kind(each) == "Pooling" and not path.parts:
            what = "has a Pooling module without a separate folder"
            raise UserError(what, where=str(file), remedy='write its path, for example "1_Pooling"')
        each["path"] = "/".join(path.parts)
    return listed


def _kind(module: Mapping[str, Any]) -> str:
    """Return the class of a step, without the package, which has changed over the years."""
    return str(module["type"]).rpartition(".")[2]


def _optional(file: Path) -> dict[str, Any]:
    return read_json(file, remedy=REMEDY) if file.is_file() else {}


def _modes(settings: Mapping[str, Any]) -> list[Any]:
    """Return the poolings to concatenate; nearly always one."""
    mode = settings.get("pooling_mode")
    if mode is None:
        return [name for key, name in POOLING_KEYS.items() if settings.get(key)] or ["mean"]
    return [str(each) for each in mode] if isinstance(mode, list) else [str(mode)]


def _default_prompt(settings: Mapping[str, Any], prompts: Mapping[str, str], *, where: Path) -> str:
    name = settings.get("default_prompt_name")
    if name is None:
        return ""
    if not isinstance(name, str) or name not in prompts:
        what = f"default_prompt_name is {name!r}, which is not one of its prompts"
        raise UserError(what, where=str(where), remedy="correct the name")
    return prompts[name]


def _longest(settings: Mapping[str, Any], *, where: Path) -> int | None:
    longest = settings.get("max_seq_length")
    if longest is not None and (type(longest) is not int or longest < 1):
        what = f"max_seq_length is {longest!r}"
        raise UserError(what, where=str(where), remedy="write a whole number from 1 on, or null")
    return longest
