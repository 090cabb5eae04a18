"""What a step's batches look like: shapes, fillers, targets, and what is refused."""

import pickle
import signal
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from bertsmith.core.errors import UserError
from bertsmith.core.measures import Field
from bertsmith.data.batch_inspection import batch_statistics, sequences_of
from bertsmith.data.collate import PAIR_FIELDS, Collated, Multiples, PretrainingBatch
from bertsmith.data.data_loader import PretrainingDataset, StepIndex, load_steps
from tests.example_stores import digest, random_store, recipe_named, small_recipe, with_fields

FIRST = StepIndex(0, 0)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory):
    return random_store(tmp_path_factory.mktemp("dataset"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def dataset_of(store, cache: Path, recipe=None, **choices) -> PretrainingDataset:
    return PretrainingDataset(
        store, recipe or small_recipe(), cache=cache, **{"micro_tokens": 128, **choices}
    )


@pytest.mark.parametrize("of_sequences", [1, 16])
def test_each_micro_batch_ends_in_filler_sequences_and_has_round_sizes(store, cache, of_sequences) -> None:
    multiples = Multiples(64, 32, of_sequences)
    step, pad = dataset_of(store, cache, multiples=multiples)[FIRST], store.tokenizer().pad_id
    assert len(step.micros) > 1
    for micro in step.micros:
        examples = int(micro["pair_weights_S"].sum())
        bounds = list(micro.inputs.layout.bounds())
        (begin, _), end = bounds[examples], len(micro.inputs.tokens_T)
        assert micro.end_1.tolist() == [begin] and bounds[-1][1] == end and end % 64 == 0 and end > begin
        assert max(last - first for first, last in bounds) <= micro.inputs.layout.longest == 64
        assert len(bounds) % of_sequences == 0 and len(micro["masked_rows_P"]) % 32 == 0
        assert set(micro.inputs.tokens_T[begin:].tolist()) == {pad}
        assert set(micro.inputs.segments_T[begin:].tolist()) == {0}
        assert micro.inputs.positions_T[begin:].max() < 32
        assert micro["pair_weights_S"].tolist() == [1.0] * examples + [0.0] * (len(bounds) - examples)


def test_the_counts_are_those_of_the_examples(store, cache) -> None:
    step = dataset_of(store, cache)[FIRST]
    shown = list(sequences_of(step))
    assert step.counts["sequences"] == step.counts["pairs"] == len(shown) == 8
    assert step.counts["tokens"] == sum(len(sequence.tokens) for sequence in shown)
    assert step.counts["masked"] == sum(len(sequence.targets) for sequence in shown)


def test_unused_predictions_weigh_nothing(store, cache) -> None:
    for micro in dataset_of(store, cache)[FIRST].micros:
        asked = int(micro["masked_weights_P"].sum())
        assert micro["masked_weights_P"].tolist() == [1.0] * asked + [0.0] * (
            len(micro["masked_rows_P"]) - asked
        )
        assert len(micro["masked_rows_P"]) % 64 == 0
        assert micro["masked_rows_P"][asked:].sum() == 0


def _lengths(step: Collated):
    return np.diff(step.sequences.starts_S1)


def _rows_of_tokens(step: Collated):
    return np.arange(len(step.sequences.tokens_T))


def test_a_declared_field_is_cut_filled_up_and_counted_in_each_micro_batch(store, cache) -> None:
    lengths = Field("lengths_S", _lengths, "total", filler=-1)
    rows = Field("rows_T", _rows_of_tokens, filler=9, is_row=True)
    step = dataset_of(store, cache, fields=(rows, lengths))[FIRST]
    assert len(step.micros) > 1
    for micro in step.micros:
        assert set(micro.fields) == {"rows_T", "lengths_S"}
        end, bounds = int(micro.end_1), list(micro.inputs.layout.bounds())
        assert micro["rows_T"].tolist() == [*range(end), *[9] * (len(micro.inputs.tokens_T) - end)]
        wanted = [last - first if first < end else -1 for first, last in bounds]
        assert micro["lengths_S"].tolist() == wanted
    fillers = sum(int((micro["lengths_S"] < 0).sum()) for micro in step.micros)
    assert step.counts["total"] == step.counts["tokens"] - fillers


def test_without_a_field_of_predicted_tokens_nothing_is_masked(store, cache) -> None:
    plain, mask = dataset_of(store, cache, fields=PAIR_FIELDS)[FIRST], store.tokenizer().mask_id
    assert all(mask not in micro.inputs.tokens_T for micro in plain.micros)
    masked = list(sequences_of(dataset_of(store, cache)[FIRST]))
    assert any(mask in sequence.tokens for sequence in masked)
    for shown, other in zip(sequences_of(plain), masked, strict=True):
        assert [other.targets.get(at, token) for at, token in enumerate(other.tokens)] == shown.tokens
        assert (shown.pair_label, shown.targets) == (other.pair_label, {})


def test_a_sequence_is_a_template_around_text_of_the_store(store, cache) -> None:
    tokenizer = store.tokenizer()
    text = store.gather(np.array([0]), np.array([store.tokens])).tolist()
    everything = " ".join(map(str, text))
    for sequence in sequences_of(dataset_of(store, cache)[FIRST]):
        tokens = [sequence.targets.get(place, token) for place, token in enumerate(sequence.tokens)]
        assert tokens[0] == tokenizer.cls_id and tokens[-1] == tokenizer.sep_id
        border = tokens.index(tokenizer.sep_id)
        assert sequence.segments == [0] * (border + 1) + [1] * (len(tokens) - border - 1)
        assert sequence.positions == list(range(len(tokens)))
        for part in (tokens[1:border], tokens[border + 1 : -1]):
            assert " ".join(map(str, part)) in everything


def test_left_to_right_asks_for_every_token_but_the_first(store, cache) -> None:
    recipe = recipe_named("gpt")
    for sequence in sequences_of(dataset_of(store, cache, recipe)[FIRST]):
        assert sequence.targets == dict(enumerate(sequence.tokens[1:], start=1))
        assert sequence.pair_label is None


def test_right_to_left_asks_for_every_token_but_the_last(store, cache) -> None:
    examples = recipe_named("gpt").examples.model_copy(update={"objective": "right-to-left"})
    recipe = recipe_named("gpt").model_copy(update={"examples": examples})
    for sequence in sequences_of(dataset_of(store, cache, recipe)[FIRST]):
        assert sequence.targets == dict(enumerate(sequence.tokens[:-1]))


def test_two_directions_ask_for_every_token_with_a_neighbour_on_each_side(store, cache) -> None:
    examples = recipe_named("gpt").examples.model_copy(update={"objective": "two-directions"})
    recipe = recipe_named("gpt").model_copy(update={"examples": examples})
    batches = dataset_of(store, cache, recipe)[FIRST]
    for sequence in sequences_of(batches):
        assert sequence.targets == dict(enumerate(sequence.tokens[1:-1], start=1))
    # What fills the predicted rows up points at row 0, and its views at rows 0 and 1.
    assert all(len(micro.inputs.tokens_T) > 1 for micro in batches.micros)


def test_a_model_with_one_segment_sees_one(store, cache) -> None:
    recipe = small_recipe(model={"segments": 1})
    for micro in dataset_of(store, cache, recipe)[FIRST].micros:
        assert micro.inputs.segments_T.max() == 0


def test_a_rank_without_examples_sees_fillers_only(store, cache) -> None:
    recipe = small_recipe(batch={"sequences": 2})
    ranks = [dataset_of(store, cache, recipe, rank=rank, world=3)[FIRST] for rank in range(3)]
    assert sorted(rank.counts["sequences"] for rank in ranks) == [0, 1, 1]
    assert {len(rank.micros) for rank in ranks} == {1}
    idle = min(ranks, key=lambda rank: rank.counts["sequences"])
    assert set(idle.counts.values()) == {0.0}
    assert idle.micros[0]["masked_weights_P"].sum() == 0


def test_a_step_survives_the_way_from_a_worker(store, cache) -> None:
    step = dataset_of(store, cache)[FIRST]
    again = pickle.loads(pickle.dumps(step))
    assert digest(again) == digest(step)
    assert again.micros[0].inputs.layout.longest == step.micros[0].inputs.layout.longest
    assert (again.index, again.counts) == (step.index, step.counts)


@pytest.mark.parametrize("with_task_types", [False, True])
def test_a_step_comes_from_a_worker_with_every_tensor_as_it_was(store, cache, with_task_types) -> None:
    step = dataset_of(store, cache)[FIRST]
    micros = tuple(_with_odd_values(micro, with_task_types=with_task_types) for micro in step.micros)
    sent = replace(step, micros=micros)
    loader = DataLoader([sent], batch_size=None, num_workers=1, collate_fn=_unchanged)
    for received in (pickle.loads(pickle.dumps(sent)), next(iter(loader))):
        for one, other in zip(received.micros, sent.micros, strict=True):
            assert (one.inputs.task_types_T is None) == (not with_task_types)
            got, wanted = _tensor_fields(one), _tensor_fields(other)
            assert got.keys() == wanted.keys()
            for name, tensor in got.items():
                assert tensor.dtype == wanted[name].dtype, name
                assert torch.equal(tensor, wanted[name]), name


@pytest.fixture
def bounded():
    """What waits for ever fails."""

    def late(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("bounded")
def test_steps_arrive_where_shared_memory_is_full(store, cache, monkeypatch) -> None:
    def full(*_: object) -> None:
        raise RuntimeError("unable to allocate shared memory(shm): No space left on device (28)")

    dataset = dataset_of(store, cache)
    monkeypatch.setattr(torch.UntypedStorage, "_share_fd_cpu_", full)
    monkeypatch.setattr(torch.UntypedStorage, "_share_filename_cpu_", full)
    (received,) = load_steps(dataset, [FIRST], workers=1, pin=False)
    assert digest(received) == digest(dataset[FIRST])


def test_what_is_wrong_with_a_step_comes_from_a_worker_as_it_is(store, cache) -> None:
    with pytest.raises(UserError, match=r"^batch.micro_tokens = 40 cannot hold a sequence of 32 tokens"):
        list(load_steps(dataset_of(store, cache, micro_tokens=40), [FIRST], workers=1, pin=False))


def test_closed_steps_leave_no_worker_whoever_still_refers_to_the_loader(store, cache, monkeypatch) -> None:
    begin, seen = DataLoader.__iter__, []
    monkeypatch.setattr(DataLoader, "__iter__", lambda loader: seen.append(begin(loader)) or seen[0])
    steps = load_steps(dataset_of(store, cache), iter([FIRST] * 9), workers=1, pin=False)
    next(steps)
    (worker,) = seen[0]._workers
    assert worker.is_alive()
    steps.close()
    assert not worker.is_alive()


def _with_odd_values(micro: PretrainingBatch, *, with_task_types: bool) -> PretrainingBatch:
    """The batch with weights that are no whole numbers, and perhaps with task types."""
    task_types_T = torch.arange(len(micro.inputs.tokens_T)) % 3 if with_task_types else None
    changed = with_fields(
        micro,
        masked_weights_P=micro["masked_weights_P"] * 0.3,
        pair_weights_S=micro["pair_weights_S"] * 0.7,
    )
    return replace(changed, inputs=replace(micro.inputs, task_types_T=task_types_T))


def _tensor_fields(batch) -> dict[str, torch.Tensor]:
    """Every tensor below a dataclass, by its path."""
    found = {}
    for each in fields(batch):
        value = getattr(batch, each.name)
        if each.name == "fields":
            found |= value
        if isinstance(value, torch.Tensor):
            found[each.name] = value
        elif is_dataclass(value):
            found |= {f"{each.name}.{name}": tensor for name, tensor in _tensor_fields(value).items()}
    return found


def _unchanged(step):
    return step


def test_a_feed_is_pickled_without_its_open_indexes(store, cache) -> None:
    dataset = dataset_of(store, cache)
    step = dataset[FIRST]
    packed = pickle.dumps(dataset)
    assert len(packed) < 100_000
    assert digest(pickle.loads(packed)[FIRST]) == digest(step)


def test_a_batch_moves_with_all_its_parts(store, cache) -> None:
    micro = dataset_of(store, cache)[FIRST].micros[0].to("meta")
    parts = (
        micro.inputs.tokens_T,
        micro.inputs.layout.starts_S1,
        micro["masked_weights_P"],
        micro["pair_labels_S"],
    )
    assert all(part.device == torch.device("meta") for part in parts)


def test_micro_batches_too_small_for_a_sequence_are_rejected(store, cache) -> None:
    with pytest.raises(UserError, match=r"micro_tokens = 40 cannot hold a sequence of 32 tokens; allow 64"):
        dataset_of(store, cache, micro_tokens=40)[FIRST]


def test_a_folder_will_do_for_a_store(store, cache) -> None:
    assert digest(dataset_of(store.folder, cache)[FIRST]) == digest(dataset_of(store, cache)[FIRST])


def test_static_masks_come_back_after_their_copies(store, cache) -> None:
    dataset = dataset_of(store, cache, recipe_named("static"))
    steps = dataset.stage_index(0).steps_in(0) + dataset.stage_index(0).steps_in(1)
    assert dataset.stage_index(0).steps_in(2) == dataset.stage_index(0).steps_in(0)
    first = {
        str(each.tokens)
        for step in range(dataset.stage_index(0).steps_in(0))
        for each in _shown(dataset, step)
    }
    later = {
        str(each.tokens)
        for step in range(dataset.stage_index(0).steps_in(0))
        for each in _shown(dataset, steps + step)
    }
    # The incomplete step at the end of an epoch leaves out others each time.
    assert len(first & later) > 0.9 * len(first)


def _shown(dataset: PretrainingDataset, step: int) -> list:
    return list(sequences_of(dataset[StepIndex(0, step)]))


@pytest.mark.parametrize(
    ("split", "fingerprints"),
    [
        ("train", ["cb3a3efccfc55a0a", "1648a0a866fbccbc"]),
        ("held-out", ["e2c4629da88bb8a4", "0b20fa3f1e652b2a"]),
    ],
)
def test_the_same_recipe_means_the_same_batches_in_later_versions(store, cache, split, fingerprints) -> None:
    stages = [{"fraction": 1, "length": 32, "predictions": 5}]
    recipe = small_recipe(examples={"stages": stages, "held_out_fraction": 0.2})
    dataset = dataset_of(store, cache, recipe, micro_tokens=4096, split=split)
    # Where they must change, runs cannot be resumed: plan.INDEX_FORMAT is to be raised with them.
    assert [digest(dataset[StepIndex(0, step)])[:16] for step in (0, 1)] == fingerprints


def test_shares_count_what_is_shown(store, cache) -> None:
    steps = [dataset_of(store, cache)[StepIndex(0, number)] for number in range(3)]
    shares, mask = batch_statistics(steps, mask_id=store.tokenizer().mask_id), store.tokenizer().mask_id
    shown = [sequence for step in steps for sequence in sequences_of(step)]
    asked = [
        (sequence.tokens[place], target) for sequence in shown for place, target in sequence.targets.items()
    ]
    assert shares.predicted == len(asked) == shares.as_mask + shares.as_random + shares.unchanged
    assert shares.as_mask == sum(seen == mask for seen, _ in asked)
    assert shares.unchanged == sum(seen == target for seen, target in asked)
    assert shares.negatives == sum(sequence.pair_label for sequence in shown)
    assert shares.lengths.tolist() == [len(sequence.tokens) for sequence in shown]
