"""A small BERT with lively random weights, ours and as transformers computes it, for slow second opinions."""

from pathlib import Path

import pytest
import torch
import transformers

import bertsmith
from bertsmith.insight import attention_pass
from tests.toy_folder import toy_vocabulary

SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
}


@pytest.fixture(scope="session")
def eager(tmp_path_factory: pytest.TempPathFactory) -> transformers.BertForMaskedLM:
    """The model in transformers, with eager attention; `folder` is where it lies."""
    torch.manual_seed(7)
    config = transformers.BertConfig(vocab_size=len(toy_vocabulary()), **SHAPE, attn_implementation="eager")
    model = transformers.BertForMaskedLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Far from initial weights, so that heads differ and no maximum is a tie.
            parameter.normal_(1.0 if "LayerNorm.weight" in name else 0.0, 0.3)
    model.tie_weights()
    folder = tmp_path_factory.mktemp("lively")
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(toy_vocabulary()) + "\n")
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "BertTokenizer", "do_lower_case": true}'
    )
    model.folder = folder
    return model


@pytest.fixture(scope="session")
def lively_folder(eager: transformers.BertForMaskedLM) -> Path:
    """The model folder; not to be changed."""
    return eager.folder


@pytest.fixture(scope="session")
def bert(lively_folder: Path) -> bertsmith.Bert:
    """The same model, opened by us; not to be changed."""
    return bertsmith.load(lively_folder, device="cpu")


@pytest.fixture(params=["of one length", "filled up"])
def groups(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of one length are studied together, as on a CPU, or those of like length, as on a GPU."""
    if request.param == "filled up":
        monkeypatch.setitem(attention_pass.GROUP_SCORES, "cpu", 10**9)
