"""An encoder of another kind, which no package file knows: trained, resumed, saved and opened again.

What it has not is refused in one line, wherever a Transformer's parts are asked for.
"""

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import bertsmith
from bertsmith.core.errors import UserError
from bertsmith.data.collate import PretrainingBatch
from bertsmith.inference.head_introspection import inspect_heads
from bertsmith.inference.introspection import inspect_attention
from bertsmith.inference.layer_introspection import inspect_embedding
from bertsmith.insight.direction import study_direction
from bertsmith.interchange.onnx_network import onnx_model
from bertsmith.model.architecture import (
    Architecture,
    HeadSpec,
    Names,
    Pretraining,
    always,
    constant_std,
    pair_of,
)
from bertsmith.model.architectures.registry import ARCHITECTURES
from bertsmith.model.encoder import Depth, Encoder, Stack, WordView, mean_of_rows
from bertsmith.model.encoder_config import ConfigReader, EncoderConfig, PassSize, StepForm
from bertsmith.model.folder.model_folder import read_model
from bertsmith.model.heads import MaskedLanguageHead, OutputHead, Transform
from bertsmith.model.importance import importance_gates, sequence_of_rows
from bertsmith.model.lora import LoraShape, add_fresh_adapters
from bertsmith.model.network import Network, new_network, set_direction
from bertsmith.objectives.masked_language_modelling import MaskedLanguageModelling
from bertsmith.packed import ALL, PackedBatch, Rows, pack
from bertsmith.serve.model_registry import info_of
from bertsmith.shrink.layer_dropping import without_layers
from bertsmith.shrink.quantise import quantise_weights
from bertsmith.shrink.slicing import all_units, blocks_to_prune
from tests.command_line import mistake
from tests.tiny_runs import differing, last_state, metrics_of, run_tiny, stop_at, tiny_store, without_pictures
from tests.tuning import SHORT, tune

TYPE = "ernie"  # a recipe knows the registry's names alone: it stands there in the place of that one
RUN = ("examples.pairs=full-sentences", f"model.type={TYPE}", "model.heads=12", "model.inner=3072")
KEYS = ("vocabulary", "width", "layers", "positions")


@dataclass(frozen=True, kw_only=True)
class BagConfig(EncoderConfig):
    """As many layers as there are; each knows a text as the mean of its tokens."""

    def operations(self, size: PassSize) -> float:
        return 4.0 * size.tokens * self.layers * self.width**2

    def kept_bytes(self, form: StepForm) -> int:
        return self.layers * self.layer_bytes(form)

    def layer_bytes(self, form: StepForm) -> int:
        return 3 * self.width * form.value

    def working_bytes(self, form: StepForm) -> int:
        return self.layer_bytes(form)


class Bag(Encoder):
    """Each layer sees a token beside the mean of its sequence."""

    compilable = False

    def __init__(self, config: BagConfig) -> None:
        super().__init__("mean")
        self.table = nn.Embedding(config.vocabulary, config.width)
        self.stack = nn.ModuleList(nn.Linear(2 * config.width, config.width) for _ in range(config.layers))

    @property
    def words(self) -> nn.Embedding:
        return self.table

    def put_words(self, table: nn.Embedding) -> None:
        self.table = table

    @property
    def layers(self) -> int:
        return len(self.stack)

    def forward(self, batch: PackedBatch, *, rows: Rows = ALL) -> Tensor:
        return self.hidden_states(batch)[-1][rows]

    def hidden_states(self, batch: PackedBatch) -> list[Tensor]:
        states, sequence_T = [self.table(batch.tokens_T)], sequence_of_rows(batch.layout, len(batch.tokens_T))
        for layer in self.stack:
            mean_SD = mean_of_rows(states[-1], batch.layout)
            states.append(states[-1] + layer(torch.cat((states[-1], mean_SD[sequence_T]), -1)).tanh())
        return states

    def depths(self) -> list[Depth]:
        return [*map(Depth, reversed(self.stack)), Depth(self.table)]

    def matrices(self) -> dict[nn.Parameter, Stack]:
        return {layer.weight: Stack(4, 4) for layer in self.stack}  # as if they were the gates of an LSTM


def read_config(reader: ConfigReader) -> BagConfig:
    sizes = {key: reader.size(key) for key in KEYS}
    rates = {"dropout": reader.rate("dropout", 0.1), "initial_std": reader.number("initial_std", 0.02)}
    segments = reader.size("segments", 0, least=0)
    return BagConfig(model_type=TYPE, embedding_width=sizes["width"], segments=segments, **sizes, **rates)


def write_config(config: BagConfig) -> dict:
    return {
        "model_type": TYPE,
        **{key: vars(config)[key] for key in (*KEYS, "dropout", "initial_std", "segments")},
    }


def encoder_names(config: BagConfig) -> Names:
    names: Names = {"table.weight": ("words.weight",)}
    for number in range(config.layers):
        names |= pair_of(f"stack.{number}", f"layers.{number}")
    return names


def words_head(config: BagConfig, _: int) -> MaskedLanguageHead:
    return MaskedLanguageHead(Transform(nn.Linear(config.width, config.width), "gelu"), config.vocabulary)


def class_head(config: BagConfig, outputs: int) -> OutputHead:
    return OutputHead(nn.Linear(config.width, outputs), reads="sentence", dropout=0.0)


BAG = Architecture(
    model_type=TYPE,
    read_config=read_config,
    write_config=write_config,
    build_encoder=Bag,
    encoder_names=encoder_names,
    words_key="table.weight",
    prefix="bag.",
    heads={
        "mlm": HeadSpec(
            words_head, always(pair_of("transform.dense", "head.dense") | {"bias": ("head.bias",)})
        ),
        "classify": HeadSpec(class_head, always(pair_of("output", "classifier")), labelled=True),
    },
    classes={"BagForMaskedLM": ("mlm",), "BagModel": ()},
    initial=constant_std,
    tied={"head.decoder.weight": "bag.words.weight"},
    pretraining=Pretraining(100, lambda config: config.vocabulary * config.width, BagConfig, min_segments=0),
)


@pytest.fixture(scope="module", autouse=True)
def _bag():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ARCHITECTURES, TYPE, BAG)
        yield


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tiny_store(tmp_path_factory.mktemp("bag"))


@pytest.fixture(scope="module")
def run(store, tmp_path_factory) -> Path:
    """A finished run; not to be changed."""
    out = tmp_path_factory.mktemp("bag") / "run"
    with without_pictures():
        assert run_tiny(store, out, *RUN, "optim.peak_lr=1e-2").state == "finished"
    return out


@pytest.fixture
def network(run) -> Network:
    return read_model(run / "model").network


def test_it_learns_and_a_card_says_what_it_is(run):
    before, *_, after = metrics_of(run, "held-out")
    assert after["token_loss"] < before["token_loss"] - 0.1
    card = (run / "model" / "card.md").read_text(encoding="utf-8")
    assert "2 layers, width 32, " in card and "heads," not in card


@pytest.mark.parametrize("algorithm", ["lamb", "muon"])
def test_a_run_stopped_and_resumed_ends_with_the_same_bits(algorithm, store, tmp_path):
    settings = (*RUN, f"optim.algorithm={algorithm}", "optim.layer_decay=0.5")
    with without_pictures():
        run_tiny(store, tmp_path / "whole", *settings)
        with stop_at(3):
            assert run_tiny(store, tmp_path / "run", *settings).state == "stopped"
        run_tiny(store, tmp_path / "run", *settings)
    assert not differing(last_state(tmp_path / "whole"), last_state(tmp_path / "run"))


def test_it_is_opened_fills_masks_and_gives_vectors(run):
    bert = bertsmith.load(run / "model", device="cpu")
    assert len(bert.fill("the smith [MASK] the iron", top=3)[0]) == 3
    assert bert.embed(["the smith"]).shape == (1, 32)
    assert [each.shape for each in bert.hidden_states(["the smith"])] == [(3, 4, 32)]


def test_it_is_fine_tuned_and_has_no_heads_to_tell_of(run, tmp_path):
    tune("sst2", run / "model", tmp_path, *SHORT, "head.fresh_layers=1")
    folder = tmp_path / "runs" / "sst2"
    bert = bertsmith.load(folder, device="cpu")
    assert bert.classify(["the smith heats"])[0].label in ("negative", "positive")
    assert info_of(bert, folder).heads is None


@pytest.mark.parametrize(
    ("what", "act"),
    [
        ("heads or neurons that can be pruned", lambda network: blocks_to_prune(network)),
        ("attention heads", lambda network: all_units(network)),
        ("attention heads", lambda network: importance_gates(network).__enter__()),
        ("layers that can be left out", lambda network: without_layers(network, {0})),
        ("form in ONNX", lambda network: onnx_model(network, "fp32")),
        (
            "linear layers that can have adapters",
            lambda network: add_fresh_adapters(network, ["query"], LoraShape(2, 4.0), torch.Generator()),
        ),
    ],
)
def test_what_a_network_lacks_is_refused(what, act: Callable[[Network], object], network):
    with pytest.raises(UserError, match=f"this kind of model has no {what}"):
        act(deepcopy(network))


@pytest.mark.parametrize(
    ("what", "act"),
    [
        ("attention heads", lambda bert: inspect_attention(bert, "the smith")),
        ("attention heads", lambda bert: inspect_heads(bert, "the smith")),
        ("attention heads", lambda bert: study_direction(bert, ["the smith"], longest=9)),
        ("vectors that are added up", lambda bert: inspect_embedding(bert, "the smith", 1)),
    ],
)
def test_what_cannot_be_looked_at_is_refused(what, act: Callable[[bertsmith.Bert], object], run):
    with pytest.raises(UserError, match=f"this kind of model has no {what}"):
        act(bertsmith.load(run / "model", device="cpu"))


def test_it_stays_with_the_direction_that_it_has(network):
    set_direction(network, "both")
    with pytest.raises(UserError, match="cannot be made to read left-to-right"):
        set_direction(network, "left-to-right")


def test_its_weights_are_not_rounded(run, tmp_path):
    with pytest.raises(UserError, match="no linear layers with weights to round"):
        quantise_weights(run / "model", tmp_path / "small", bits=8, base=None)


def test_commands_say_so_in_one_line(run, tmp_path, capsys):
    model, out = run / "model", tmp_path / "out"
    look = mistake(capsys, "look", "attention", "the smith", "--model", model, "--out", out / "view.html")
    assert "this kind of model has no attention heads" in look
    assert "has no form in ONNX" in mistake(capsys, "export", "--model", model, "--onnx", out)


def test_recipe_keys_of_a_transformer_are_not_its_own(store, tmp_path):
    with pytest.raises(UserError, match=f"model.heads = 2 is not supported by model.type = {TYPE}"):
        run_tiny(store, tmp_path / "run", f"model.type={TYPE}")


# ---- a word that is predicted from both of its sides


class BothSides(Bag):
    """Half of a state is the mean of the words up to its row, half that of the words from its row on."""

    def __init__(self, config: BagConfig) -> None:
        super().__init__(config)
        self.table = nn.Embedding(config.vocabulary, config.width // 2)

    def hidden_states(self, batch: PackedBatch) -> list[Tensor]:
        states = []
        for start, end in batch.layout.bounds():
            words_NW = self.table(batch.tokens_T[start:end])
            count_N1 = torch.arange(1, len(words_NW) + 1)[:, None]
            behind_NW = (words_NW.flip(0).cumsum(0) / count_N1).flip(0)
            states.append(torch.cat((words_NW.cumsum(0) / count_N1, behind_NW), -1))
        return [torch.cat(states)]

    def word_views(self) -> tuple[WordView, ...]:
        half = self.table.embedding_dim
        return WordView(-1, (0, half)), WordView(1, (half, 2 * half))


@pytest.fixture
def both_sides(run, monkeypatch) -> bertsmith.Bert:
    def half_head(config: BagConfig, _: int) -> MaskedLanguageHead:
        half = config.width // 2
        return MaskedLanguageHead(Transform(nn.Linear(half, half), "gelu"), config.vocabulary)

    bert = bertsmith.load(run / "model", device="cpu")
    heads = {"mlm": HeadSpec(half_head, always({}))}
    monkeypatch.setitem(ARCHITECTURES, TYPE, replace(BAG, build_encoder=BothSides, heads=heads))
    config = replace(bert.model.network.config, initial_std=1.0)
    network = new_network(config, {"mlm": 0}, torch.Generator().manual_seed(1)).eval()
    return bertsmith.Bert(replace(bert.model, network=network), bert.tokenizer, device="cpu")


def of_side(network: Network, words: list[int], columns: tuple[int, int]) -> Tensor:
    """What a side predicts of a word, given all words of that side, by hand."""
    state_W = network.encoder.words(torch.tensor(words)).mean(0)
    assert columns in [view.columns for view in network.encoder.word_views()]
    return network.scores_of_words(state_W[None]).log_softmax(-1)[0]


def test_a_mask_is_filled_by_what_both_sides_say_of_it(both_sides):
    network, tokenizer = both_sides.engine.network, both_sides.tokenizer
    text = "the smith [MASK] the iron"
    ids = tokenizer.encode(text, allow_special=("[MASK]",)).ids
    place = ids.index(tokenizer.mask_id)
    left, right = network.encoder.word_views()
    with torch.no_grad():
        of_right_V = of_side(network, ids[place + 1 :], right.columns)
        scores_V = of_side(network, ids[:place], left.columns) + of_right_V
    expected = scores_V[: tokenizer.vocabulary_size].softmax(-1).topk(3)
    found = both_sides.fill(text, top=3)[0]
    assert [each.token for each in found] == [tokenizer.token(word) for word in expected.indices.tolist()]
    assert [each.probability for each in found] == pytest.approx(expected.values.tolist(), rel=1e-4)


def test_a_word_is_as_likely_as_both_sides_say_together_and_nothing_is_masked(both_sides):
    words = ["the", "smith", "heats", "the", "iron"]
    (found,) = both_sides.likelihood([" ".join(words)])
    assert found.is_pseudo
    for place, word in enumerate(words):
        masked = " ".join([*words[:place], "[MASK]", *words[place + 1 :]])
        guesses = {each.token: each.probability for each in both_sides.fill(masked, top=500)[0]}
        assert found.words[place].log_probability == pytest.approx(math.log(guesses[word]), abs=1e-4)


def test_several_masks_are_rejected_for_a_model_that_reads_them_as_words(both_sides):
    with pytest.raises(UserError, match=r"has 2 \[MASK\], but this model was trained without masks"):
        both_sides.fill("the [MASK] heats the [MASK]")


def test_each_side_learns_to_predict_a_word_alone(both_sides):
    network, words = both_sides.engine.network, [5, 6, 7, 8, 9, 10]
    network.train()
    rows_P, labels_P = torch.tensor([2, 3, 0, 0]), torch.tensor([7, 8, 0, 0])  # filler points at row 0
    batch = PretrainingBatch(
        pack([words]),
        end_1=torch.tensor([6]),
        fields={
            "masked_rows_P": rows_P,
            "masked_ids_P": labels_P,
            "masked_weights_P": torch.tensor([1.0, 1, 0, 0]),
            "pair_labels_S": torch.zeros(1),
            "pair_weights_S": torch.zeros(1),
        },
    )
    sums = MaskedLanguageModelling(network, "none").summed(batch)
    left, right = network.encoder.word_views()
    losses = [
        functional.nll_loss(of_side(network, seen, columns), torch.tensor(words[row]))
        for row in (2, 3)
        for seen, columns in ((words[:row], left.columns), (words[row + 1 :], right.columns))
    ]
    torch.testing.assert_close(sums["token_loss"], torch.stack(losses).sum() / 2)
