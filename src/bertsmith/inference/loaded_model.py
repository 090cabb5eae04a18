"""`Bert`, the public model object: a trained encoder, its tokenizer and its prediction methods."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Literal, get_args, overload

import torch
from torch import Tensor

from bertsmith.core.errors import UserError
from bertsmith.core.files import atomic_folder
from bertsmith.core.steps import finished
from bertsmith.inference import fill_mask
from bertsmith.inference.adapter_folder import adapted_model, base_folder, read_adapter
from bertsmith.inference.embedded_models import default_model
from bertsmith.inference.engine import Engine, make_ready, usable_device
from bertsmith.inference.finetuned_folder import (
    FINETUNED_FILES,
    FinetunedTask,
    read_finetuned,
    write_finetuned,
)
from bertsmith.inference.likelihood import likelihoods
from bertsmith.inference.model_path import is_adapter, model_folder
from bertsmith.inference.outputs import (
    ABILITIES,
    Choice,
    Classification,
    Entity,
    Likelihood,
    NextSentence,
    TaggedWord,
)
from bertsmith.inference.precision import fast_network, quantised_network, takes_int8, usable_precision
from bertsmith.inference.text_reader import Reader, TextInput, TextOrPair, TokenizedText, as_list, as_pairs
from bertsmith.inference.vectors import direction_of_no_text, pooled_texts, without_direction
from bertsmith.model.architectures.registry import architecture_of
from bertsmith.model.folder.model_folder import Model, read_model, write_model
from bertsmith.model.folder.sentence_modules import POOLINGS, Pooling, transformer_folder
from bertsmith.model.folder.tensor_files import SAVED_WEIGHT_FILES
from bertsmith.model.inference.inference_network import computes_in_4_bits
from bertsmith.model.lora import merged_network
from bertsmith.packed import PackedBatch, unpack
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.text.tokenizer_files import TOKENIZER_FILES

if TYPE_CHECKING:
    from bertsmith.inference.predictor import Predictor, Sentence
    from bertsmith.inference.task_model import TaskModel
    from bertsmith.tasks.answers import QuestionAnswer

Precision = Literal["auto", "fp32", "bf16", "int8"]
NOT_FOR_SIMILARITY = (
    "the folder lacks modules.json, so the model was probably not trained for similarity: its vectors rank "
    "texts far worse than a sentence model's, for example sentence-transformers/all-MiniLM-L6-v2"
)
HEAD_OF_ABILITY = {"fill": "mlm", "extend": "mlm", "next": "nsp"}
"""Pre-training heads by ability; the kinds of tasks know their heads, and `embed` and `look` need none."""
PRECISIONS = get_args(Precision)

MAX_SPARE_ROWS = 128
"""Maximum spare rows of an embedding matrix (rounded up for speed); more indicate another vocabulary."""

log = logging.getLogger("bertsmith")


def load(
    folder: Path | str | None = None,
    *,
    device: str = "auto",
    precision: Precision = "fp32",
    base: Path | str | None = None,
) -> "Bert":
    """Open a Hugging Face model folder, or the folder of a run; without a name, the embedded encoder.

    The folder of several runs opens the best one. A name that is not a folder opens the embedded model of
    that name; a name like org/name opens a model that the Hugging Face tools have fetched. Nothing is
    downloaded. An adapter folder (LoRA, from bertsmith or peft) opens the model that it names, or `base`,
    with the adapter merged into its weights.

    Precisions: fp32 is exact, bf16 is faster if the machine supports it, and auto means bf16 only then. int8
    rounds the products of a CPU to 8 bits; it is calibrated on opening, unless the folder already was
    (`bertsmith quantise`). For such a folder, auto means int8 if the CPU has 8-bit products.

    Example: bertsmith.load("path/to/model-folder", device="cuda", precision="bf16")
    """
    if precision not in PRECISIONS:
        raise UserError(f"unknown precision {precision!r}", remedy=f"choose one of {', '.join(PRECISIONS)}")
    place = usable_device(device)
    chosen = usable_precision(precision, place)
    folder = default_model() if folder is None else model_folder(folder)
    adapter = read_adapter(folder) if is_adapter(folder) else None
    if base is not None and adapter is None:
        raise UserError(
            "is not an adapter, so it does not need a base", where=str(folder), remedy="remove the base"
        )
    whole = folder if adapter is None else base_folder(folder, given=base)
    model = read_model(whole, dtype=torch.bfloat16 if chosen == "bf16" else torch.float32)
    finetuned = read_finetuned(folder)
    # An adapter's folder need not have a tokenizer.
    tokenizer = Tokenizer.load(transformer_folder(folder if has_tokenizer(folder) else whole))
    if adapter is not None:
        adapted = adapted_model(model, adapter, finetuned)
        model = replace(adapted, network=merged_network(adapted.network))
    check_vocabulary(model, tokenizer, where=str(folder))
    # The last note is about a pooler without weights, which matters only if something reads it.
    skipped = finetuned is not None and finetuned.skips_pooler and model.untrained == ("pooler",)
    for note in model.notes[:-1] if skipped else model.notes:
        log.warning("%s: %s", folder, note)
    int8 = chosen == "int8" or (precision == "auto" and takes_int8(model.network, place))
    bert = Bert(model, tokenizer, device=device, finetuned=finetuned, int8=int8)
    bert.name = str(folder)
    return bert


def load_task_model(
    folder: Path, *, device: str = "auto", precision: Precision = "fp32", base: Path | None = None
) -> "TaskModel":
    """Open the fine-tuned model of a run folder, or of the model folder in it."""
    bert = load(folder, device=device, precision=precision, base=base)
    if bert.finetuned is None:
        remedy = "give the folder of a `bertsmith finetune` run"
        raise UserError(
            "was not fine-tuned by bertsmith: it lacks task.json", where=str(folder), remedy=remedy
        )
    from bertsmith.inference.task_model import task_model_of  # it imports what only training needs

    return task_model_of(bert.engine.network, bert.finetuned, bert.engine)


def has_tokenizer(folder: Path) -> bool:
    """Return True if an adapter folder contains a tokenizer."""
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def check_vocabulary(model: Model, tokenizer: Tokenizer, *, where: str) -> None:
    """Reject a tokenizer with ids that the model does not have embeddings for."""
    rows, entries = model.network.config.vocabulary, tokenizer.vocabulary_size
    if entries > rows:
        what = f"the tokenizer has {entries} entries, but the model has {rows} embedding rows"
        raise UserError(what, where=where, remedy="use the tokenizer that the model was trained with")
    if rows - entries > MAX_SPARE_ROWS:
        log.warning(
            "%s: %d of the model's %d embedding rows are without a token", where, rows - entries, rows
        )
    segments = 1 + max([0, *tokenizer.encode("a").segments, *tokenizer.closed.encode("a", "a").type_ids])
    if segments > model.network.config.segments > 1:
        what = f"the tokenizer numbers {segments} segments but the model has {model.network.config.segments}"
        raise UserError(what, where=where, remedy="use the tokenizer that the model was trained with")


class Bert:
    """A trained encoder with its tokenizer."""

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        *,
        device: str = "auto",
        finetuned: FinetunedTask | None = None,
        int8: bool = False,
    ) -> None:
        chosen = usable_device(device)
        make_ready(chosen)
        self.model, self.tokenizer, self.finetuned = model, tokenizer, finetuned
        self.name = "this model"
        self._predictors: dict[str, Predictor] = {}
        self._has_warned = False
        self._lock = Lock()  # building a predictor changes the network
        # A folder or its tokenizer may allow fewer tokens than the model has positions: as in training.
        positions = model.network.config.positions
        longest = min(positions, model.sentence.longest or tokenizer.max_length or positions)
        self._device, self._int8, self.reader = chosen, int8, Reader(tokenizer, longest)
        network = model.network.to(chosen).eval()
        if int8:
            self.engine = Engine(quantised_network(network, self.reader, chosen), self.reader, chosen)

    @cached_property
    def engine(self) -> Engine:
        """The engine for predictions: built at the first one, as fine-tuning needs none."""
        return Engine(fast_network(self.model.network, self._device), self.reader, self._device)

    def warm_up(self) -> None:
        """Compile the GPU kernels now, which takes seconds, so that the first prediction does not wait.

        Example: bertsmith.load("models/bert-base", device="cuda").warm_up()
        """
        if self._device.type == "cuda":
            self.engine.warm_up()

    def with_adapter(self, folder: Path | str) -> "Bert":
        """Return this model with the adapter of a folder and its heads; all other weights are shared.

        Nothing is merged: low-rank products are added to the products of the shared weights, so that many
        adapters cost little more than one model. `load` merges, which computes faster.

        Example: bertsmith.load("models/bert-base").with_adapter("runs/sst2-lora").classify(["A warm day."])
        """
        folder = model_folder(folder)
        if self._int8:
            what = "8-bit weights do not support adapters"
            remedy = "load the adapter's folder by itself in int8"
            raise UserError(what, where=str(folder), remedy=remedy)
        finetuned = read_finetuned(folder)
        model = adapted_model(self.model, read_adapter(folder), finetuned)
        tokenizer = Tokenizer.load(folder) if has_tokenizer(folder) else self.tokenizer
        check_vocabulary(model, tokenizer, where=str(folder))
        adapted = Bert(model, tokenizer, device=str(self._device), finetuned=finetuned)
        adapted.name = str(folder)
        network = fast_network(model.network, self._device, self.engine.network)
        adapted.engine = Engine(network, adapted.reader, self._device)
        return adapted

    @property
    def precision(self) -> str:
        """Precision of its products: fp32, bf16, int8, or int4 (with 8-bit inputs)."""
        network = self.model.network
        if self._int8 or (self._device.type == "cpu" and computes_in_4_bits(network)):
            return "int8" if self._int8 else "int4"
        return "bf16" if next(network.parameters()).dtype == torch.bfloat16 else "fp32"

    @property
    def heads(self) -> tuple[str, ...]:
        """The heads that the folder contains."""
        return tuple(head for head in self.model.network.heads if head not in self.model.untrained)

    @property
    def abilities(self) -> tuple[str, ...]:
        """Abilities of this model, of: fill, extend, next, classify, score, tag, answer, choose, embed, look.

        A model that predicts words fills masks if its vocabulary has one, and otherwise only extends texts.
        """
        able = {"embed", "look"}
        able |= {ability for ability, head in HEAD_OF_ABILITY.items() if not self._lacking(head)}
        able.discard("extend" if self.tokenizer.has_mask else "fill")
        # A model that was only pre-trained does not import everything that tasks need.
        if self.finetuned is not None or set(self.heads) - {"pooler", *HEAD_OF_ABILITY.values()}:
            from bertsmith.inference.predictor import ability_of_head
            from bertsmith.tasks.kinds.registry import KINDS

            heads = {kind.head.name for kind in KINDS.values()}
            able |= {
                ability_of_head(self.model, head, self.finetuned) for head in heads if not self._lacking(head)
            }
        return tuple(ability for ability in ABILITIES if ability in able)

    def __repr__(self) -> str:
        config = self.model.network.config
        size = f"{config.layers} layers of width {config.width} on {self._device}"
        return f"<Bert {config.model_type}, {size}, heads: {', '.join(self.heads) or 'none'}>"

    def hidden_states(self, texts: Iterable[TextOrPair], *, truncate: bool = False) -> list[Tensor]:
        """Return the states of each text after embeddings and each layer [layers + 1, tokens, width]."""

        def states(batch: PackedBatch) -> list[Tensor]:
            layers_LTD = torch.stack(self.engine.network.encoder.hidden_states(batch)).float().cpu()
            return [each.transpose(0, 1).clone() for each in unpack(layers_LTD.transpose(0, 1), batch.layout)]

        return list(self.engine.predict_each(texts, states, truncate=truncate))

    def embed(
        self,
        texts: Iterable[TextInput],
        *,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        prompt: str | None = None,
        truncate: bool = False,
    ) -> Tensor:
        """Return one vector for each text [texts, width].

        A folder of sentence-transformers sets the pooling of the last states, the normalisation to length 1
        and the prompt before a text. Arguments override the folder.

        Any other folder gives centred vectors of length 1, without a prompt: the mean without its component
        in the direction of an empty text's mean, which all texts share. If `pooling` is not given, the first
        call warns once that the model was probably not trained for similarity.
        """
        sentence = self.model.sentence
        if sentence.unsupported and (pooling is None or normalize is None):
            what = f"this folder makes vectors by {sentence.unsupported}, which bertsmith does not support"
            raise UserError(what, where="modules.json", remedy="choose both pooling and normalize yourself")
        chosen = sentence.pooling if pooling is None else pooling
        self._check_pooling(chosen)
        behind = as_list(texts)
        if sentence.prepares(prompt):
            behind = [sentence.prepared(text, prompt) if isinstance(text, str) else text for text in behind]
        rows = pooled_texts(self.engine, behind, chosen, truncate=truncate)
        if chosen == "centred":
            rows = without_direction(rows, self._direction_of_no_text)
        if pooling is None and not (sentence.files or self._has_warned):
            self._has_warned = True
            log.warning("%s: %s", self.name, NOT_FOR_SIMILARITY)
        wanted = sentence.normalize if normalize is None else normalize
        return torch.nn.functional.normalize(rows, dim=-1) if wanted else rows

    def _check_pooling(self, pooling: str) -> None:
        if pooling not in POOLINGS:
            raise UserError(f"unknown pooling {pooling!r}", remedy=f"choose one of {', '.join(POOLINGS)}")
        if pooling == "pooler":
            self._need("pooler", "embed texts by it")
        if pooling in ("cls", "pooler") and (seen := self.model.network.config.first_token_sees()):
            what = f"the first token of this model sees {seen}"
            raise UserError(what, remedy="choose another pooling, for example mean")

    @cached_property
    def _direction_of_no_text(self) -> Tensor:
        return direction_of_no_text(self.engine)

    def fill(self, text: str, *, top: int = 5, truncate: bool = False) -> list[list[fill_mask.Candidate]]:
        """Return the most probable tokens for each mask of the text, each mask independently."""
        (candidates,) = self.fill_each([text], top=top, truncate=truncate)
        return candidates

    def fill_each(
        self, texts: Iterable[str | TokenizedText], *, top: int = 5, truncate: bool = False
    ) -> list[list[list[fill_mask.Candidate]]]:
        """Return the most probable tokens for each mask of each text."""
        self._need("mlm", ABILITIES["fill"])
        return fill_mask.fill_each_mask(self.engine, texts, top=top, truncate=truncate)

    def fill_jointly(
        self, text: str, *, top: int = 5, beam: int = 10, truncate: bool = False
    ) -> list[fill_mask.Filling]:
        """Return the most probable fillings of all masks together: each sees the tokens chosen before it."""
        self._need("mlm", ABILITIES["fill"])
        (masked,) = fill_mask.encode_masked(self.engine, [text], truncate=truncate)
        return fill_mask.fill_jointly(self.engine, masked, top, beam)

    def extend(self, text: str, *, count: int) -> Iterator[fill_mask.Extension]:
        """Yield the text with one more token each time.

        A model that looks to both sides reads all of it again for each, one that looks to the left the token.
        """
        self._need("mlm", "extend texts")
        return fill_mask.extend_text(self.engine, text, count)

    def likelihood(self, texts: Iterable[str], *, truncate: bool = False) -> list[Likelihood]:
        """Return the likelihood of each text and of each of its words; special tokens are not counted.

        A masked model gives the pseudo-log-likelihood: it reads a text of n tokens n times, each time with
        another token masked. A one-sided model reads it once.

        Example: bertsmith.load().likelihood(["The cats annoy Tim.", "The cats annoys Tim."])
        """
        self._need("mlm", "give texts a likelihood")
        return likelihoods(self.engine, texts, truncate=truncate)

    def next_sentence(self, first: str, second: str, *, truncate: bool = False) -> NextSentence:
        """Predict if the second text follows the first."""
        (answer,) = self.next_sentences([(first, second)], truncate=truncate)
        return answer

    def next_sentences(
        self, pairs: Iterable[tuple[str, str] | TokenizedText], *, truncate: bool = False
    ) -> list[NextSentence]:
        """Predict for each pair if its second text follows the first."""
        self._need("nsp", ABILITIES["next"])
        network = self.engine.network
        next_label = architecture_of(network.config.model_type).next_label

        def probabilities(batch: PackedBatch) -> list[float]:
            probabilities_S2 = network.sentence_scores("nsp", batch).float().softmax(-1)
            return [float(each) for each in probabilities_S2[:, next_label].cpu()]

        found = self.engine.predict_each(as_pairs(pairs), probabilities, truncate=truncate)
        return [NextSentence(probability > 0.5, probability) for probability in found]

    def classify(self, texts: Iterable[TextInput], *, truncate: bool = False) -> list[Classification]:
        """Return the class of each text or pair, or its classes if it may have several.

        The rule of a fine-tuned folder for long texts applies regardless of `truncate`.
        """
        return finished(self.predictor("classify").classify_in_steps(texts, truncate=truncate))

    def score(self, texts: Iterable[TextInput], *, truncate: bool = False) -> list[float]:
        """Return the number that a regression model gives each text or pair; long texts as in `classify`."""
        return finished(self.predictor("score").score_in_steps(texts, truncate=truncate))

    def tag(self, sentences: "Iterable[Sentence | TokenizedText]") -> list[list[TaggedWord]]:
        """Tag each word; a sentence is a string or a list of words. Long ones are read in windows."""
        return finished(self.predictor("tag").tag_in_steps(sentences))

    def entities(self, text: str) -> list[Entity]:
        """Return the entities of a text that a tagger marks, for example names."""
        (found,) = self.entities_each([text])
        return found

    def entities_each(self, texts: Iterable[str]) -> list[list[Entity]]:
        """Return the entities of each text that a tagger marks."""
        return self.predictor("tag").entities(texts)

    def entities_of(self, text: str, words: Sequence[TaggedWord]) -> list[Entity]:
        """Return the entities that the tags of a text's words mark; [] if the tags mark none."""
        return self.predictor("tag").entities_of(text, words)

    @overload
    def answer(self, question: str, passage: str) -> "QuestionAnswer": ...

    @overload
    def answer(self, question: str, passage: str, *, best: Literal[1]) -> "QuestionAnswer": ...

    @overload
    def answer(
        self, question: str, passage: str, *, best: int
    ) -> "QuestionAnswer | list[QuestionAnswer]": ...

    def answer(
        self, question: str, passage: str, *, best: int = 1
    ) -> "QuestionAnswer | list[QuestionAnswer]":
        """Return the part of the passage that answers; with `best` > 1, a list of the best answers.

        A long passage is read in windows. If it contains no answer, by the folder's threshold, `text` is
        empty and `start` is -1.
        """
        (found,) = self.answers_each([(question, passage)], best=best)
        return found[0] if best == 1 else found

    def answers_each(
        self, questions: Iterable[tuple[str, str] | TokenizedText], *, best: int = 1
    ) -> "list[list[QuestionAnswer]]":
        """Return the `best` answers to each question from its passage, the best first."""
        return finished(self.predictor("answer").answers_in_steps(questions, best=best))

    def choose(self, options: Iterable[tuple[str, str]], *, truncate: bool = False) -> Choice:
        """Choose the right one of several pairs; long pairs as in `classify`."""
        return self.choose_each([options], truncate=truncate)[0]

    def choose_each(
        self, questions: Iterable[Iterable[tuple[str, str] | TokenizedText]], *, truncate: bool = False
    ) -> list[Choice]:
        """Choose the right pair of each question; all questions are computed together."""
        return self.predictor("choose").choose_each(questions, truncate=truncate)

    def predictor(self, ability: str) -> "Predictor":
        """Return the predictor of an ability, which also predicts in steps."""
        from bertsmith.inference.predictor import build_predictor
        from bertsmith.tasks.kinds.registry import heads_of_ability

        usual, *others = heads_of_ability(ability)
        head = next((each for each in (usual, *others) if not self._lacking(each)), usual)
        self._need(head, ABILITIES[ability])
        with self._lock:
            if head not in self._predictors:
                self._predictors[head] = build_predictor(self.model, self.engine, head, self.finetuned)
        return self._predictors[head]

    def save(self, folder: Path | str) -> None:
        """Write a model folder that `load` and the Hugging Face tools open."""
        replaces = (*SAVED_WEIGHT_FILES, *FINETUNED_FILES)  # other files in the folder stay
        with atomic_folder(Path(folder).expanduser(), replaces=replaces) as fresh:
            write_model(fresh, replace(self.model, network=merged_network(self.model.network)))
            self.tokenizer.save(fresh)
            if self.finetuned:
                write_finetuned(fresh, self.finetuned)

    def _need(self, head: str, purpose: str) -> None:
        if not (lacking := self._lacking(head)):
            return
        model_type = self.model.network.config.model_type
        if head not in architecture_of(model_type).heads:
            what = f"{model_type} models lack a {head} head, which is required to {purpose}"
            raise UserError(what, remedy="use a model of another family")
        command = _training_of(head)
        make = f"make one with {command}, or " if command else ""
        remedy = f"{make}load a folder that was saved with it (heads here: {', '.join(self.heads) or 'none'})"
        if head == "mlm" and "replaced" in self.heads:
            remedy = "its generator has one: load the folder `generator` inside of this model's"
        raise UserError(f"this model lacks the {lacking} head, which is required to {purpose}", remedy=remedy)

    def _lacking(self, head: str) -> str:
        """Return the first missing head that `head` depends on (or `head` itself), or ""."""
        if self.finetuned is not None and self.finetuned.mix and self.finetuned.config.head_name == head:
            return ""  # a mix of layers predicts instead
        plan = architecture_of(self.model.network.config.model_type).heads.get(head)
        skips_pooler = self.finetuned is not None and self.finetuned.skips_pooler
        needed = (head, *(() if plan is None or skips_pooler else plan.needs))
        return next((each for each in needed if each not in self.heads), "")


def _training_of(head: str) -> str:
    """Return a command that trains such a head, or ""."""
    if head in HEAD_OF_ABILITY.values():
        return "bertsmith pretrain"
    from bertsmith.tasks.kinds.registry import kinds_of_head

    return "".join(f"bertsmith finetune {kind.taught_by}" for kind in kinds_of_head(head)[:1])
