"""Spoiling model folders, and what the reader says of them."""

import json

import pytest
from safetensors.torch import load_file, save_file

from bertsmith.core.errors import UserError
from bertsmith.model.folder.model_folder import read_model


def change_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    config.update(changes)
    kept = {key: value for key, value in config.items() if value != "DROP"}
    (folder / "config.json").write_text(json.dumps(kept))


def drop(folder, *names):
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: tensor for name, tensor in tensors.items() if name not in names}, folder / "model.safetensors"
    )


def complaint(folder) -> str:
    with pytest.raises(UserError) as caught:
        read_model(folder)
    line = str(caught.value)
    assert "\n" not in line and str(folder) in line
    return line
