"""Heads and dependency relations, against loops over transformers' attentions."""

import json

import numpy as np
import pytest

from bertsmith.core.errors import UserError
from bertsmith.core.seeds import stream
from bertsmith.insight import relations as module
from bertsmith.insight.bootstrap import bootstrap_intervals
from bertsmith.insight.relations import OFFSETS, _readable, hit_rates, relations_of, study_relations
from bertsmith.insight.treebank import ParsedSentence, read_treebank
from tests.command_line import bertsmith
from tests.unit.insight.slow_attention import eager_maps

WORDS = ("the", "dog", "my", "cat", "tea", "runs", "zap", "town", "boy", "'s", "under", "snow")
KINDS = ("det", "nsubj", "obj", "nmod:poss", "punct", "rare")


def random_treebank(seed: int, sentences: int = 24) -> list[ParsedSentence]:
    """Sentences of random words under random trees; some words have several pieces."""
    chance, found = np.random.default_rng(seed), []
    for _ in range(sentences):
        count = int(chance.integers(3, 9))
        heads = [-1, *(int(chance.integers(0, word)) for word in range(1, count))]
        kinds = ["root", *(KINDS[kind] for kind in chance.integers(0, len(KINDS), count - 1))]
        words = [WORDS[word] for word in chance.integers(0, len(WORDS), count)]
        order = chance.permutation(count)
        place = {int(old): new for new, old in enumerate(order)}
        found.append(
            ParsedSentence(
                tuple(words),
                ("X",) * count,
                tuple(-1 if heads[old] < 0 else place[heads[old]] for old in order),
                tuple(kinds[old] for old in order),
            )
        )
    return found


def pieces_of_words(bert, words):
    """The rows of each word, from its own tokens: the toy vocabulary cuts words one by one."""
    rows, next_row = [], 1
    for word in words:
        count = len(bert.tokenizer.encode(word)) - 2
        rows.append(list(range(next_row, next_row + count)))
        next_row += count
    return rows


def slow_words(bert, eager, sentence, mode):
    """[L, H, W, W] between words, by loops."""
    encoded = bert.tokenizer.encode(" ".join(sentence.words))
    maps, rows = eager_maps(eager, encoded), pieces_of_words(bert, sentence.words)
    count = len(rows)
    found = np.zeros((*maps.shape[:2], count, count))
    for source in range(count):
        asked = rows[source] if mode == "mean" else rows[source][:1]
        for target in range(count):
            if source == target:
                continue
            for row in asked:
                for column in rows[target]:
                    found[:, :, source, target] += maps[:, :, row, column] / len(asked)
    return found


def is_right(predictions, sentence, word):
    """Whether a word's head is found; where 's follows a possessor, by what is predicted of 's."""
    mark = word + 1 < len(sentence.words) and sentence.words[word + 1] == "'s"
    asked = word + 1 if sentence.relations[word] == "nmod:poss" and mark else word
    return predictions[asked] == sentence.heads[word]


def slow_rates(sentences, predict, relation):
    """The fraction of words of a relation whose head `predict` finds."""
    right = total = 0
    for number, sentence in enumerate(sentences):
        predictions = predict(number, sentence)
        for word, kind in enumerate(sentence.relations):
            if kind not in ("root", "punct") and relation in (kind, "all"):
                total += 1
                right += is_right(predictions, sentence, word)
    return right / total


@pytest.mark.parametrize("mode", ["mean", "first"])
@pytest.mark.usefixtures("groups")
def test_rates_of_every_head_and_offset_are_those_of_slow_loops(bert, eager, mode):
    sentences = random_treebank(1)
    names = relations_of(sentences, least=10)
    found = hit_rates(bert, *_readable(bert, sentences, names), mode=mode)
    words = [slow_words(bert, eager, sentence, mode) for sentence in sentences]
    for at, name in enumerate(names):
        for layer in range(2):
            for head in range(4):
                to = slow_rates(sentences, lambda n, _: words[n][layer, head].argmax(1), name)  # noqa: B023
                fro = slow_rates(sentences, lambda n, _: words[n][layer, head].argmax(0), name)  # noqa: B023
                assert found.heads_L2HR[layer, :, head, at].tolist() == pytest.approx([to, fro], abs=1e-9)
        expected = [
            slow_rates(sentences, lambda _, s, by=by: [word + by for word in range(len(s.words) + 1)], name)
            for by in OFFSETS
        ]
        assert found.offsets_OR[:, at].tolist() == pytest.approx(expected, abs=1e-9)


@pytest.mark.usefixtures("groups")
def test_the_head_is_chosen_on_one_treebank_and_scored_on_the_other(bert, monkeypatch):
    monkeypatch.setattr(module, "LEAST", 10)
    scored, chosen_on = random_treebank(2), random_treebank(3)
    found = study_relations(bert, scored, chosen_on, mode="mean", seed=0)
    names = [score.relation for score in found.scores]
    chosen = hit_rates(bert, *_readable(bert, chosen_on, tuple(names)), mode="mean")
    final = hit_rates(bert, *_readable(bert, scored, tuple(names)), mode="mean")
    for at, score in enumerate(found.scores):
        direction = module.DIRECTIONS.index(score.direction)
        assert chosen.heads_L2HR[score.layer, direction, score.head, at] == chosen.heads_L2HR[..., at].max()
        assert score.accuracy == pytest.approx(final.heads_L2HR[score.layer, direction, score.head, at])
        offset = OFFSETS.index(score.offset)
        assert chosen.offsets_OR[offset, at] == chosen.offsets_OR[:, at].max()
        assert score.baseline == pytest.approx(final.offsets_OR[offset, at])
        assert score.low <= score.accuracy <= score.high
        assert score.beats == (score.low > score.baseline)
    np.testing.assert_allclose(found.accuracy_L2HR, final.heads_L2HR)


def test_the_interval_is_that_of_the_binomial_where_sentences_are_alike():
    right = np.repeat([[1.0], [0.0]], [300, 700], axis=0)
    low, high = bootstrap_intervals(right, np.ones_like(right), seed=1)
    # 1.96 standard errors: sqrt(.3 * .7 / 1000) = .01449
    assert low[0] == pytest.approx(0.3 - 0.0284, abs=0.004) and high[0] == pytest.approx(0.3284, abs=0.004)


def test_the_interval_is_that_of_a_plain_resampling():
    right, total = (
        [[2.0, 0.0], [1.0, 3.0], [0.0, 1.0], [3.0, 0.0]],
        [[2.0, 1.0], [4.0, 3.0], [1.0, 2.0], [5.0, 0.0]],
    )
    low, high = bootstrap_intervals(np.array(right), np.array(total), seed=4)
    chance = stream(4, "bootstrap")
    samples = [chance.multinomial(4, [0.25] * 4) for _ in range(1000)]
    for column in range(2):
        fractions = []
        for times in samples:
            asked = sum(count * total[at][column] for at, count in enumerate(times))
            if asked:  # a sample may have none
                fractions.append(sum(count * right[at][column] for at, count in enumerate(times)) / asked)
        fractions.sort()
        for found, part in ((low, 0.025), (high, 0.975)):
            place = part * (len(fractions) - 1)
            below, above = fractions[int(place)], fractions[int(place) + 1]
            assert found[column] == pytest.approx(below + (place - int(place)) * (above - below), abs=1e-9)


# ---- files

TREE = """# text = The dog runs.
1\tThe\tthe\tDET\t_\t_\t2\tdet\t_\t_
2-3\tdogs\t_\t_\t_\t_\t_\t_\t_\t_
2\tdog\tdog\tNOUN\t_\t_\t3\tnsubj\t_\t_
3\truns\trun\tVERB\t_\t_\t0\troot\t_\t_

"""


def test_a_treebank_is_read_with_heads_and_depths(tmp_path):
    (tmp_path / "a.conllu").write_text(TREE)
    (sentence,) = read_treebank(tmp_path / "a.conllu")
    assert sentence == ParsedSentence(
        ("The", "dog", "runs"), ("DET", "NOUN", "VERB"), (1, 2, -1), ("det", "nsubj", "root")
    )
    assert sentence.depths() == [2, 1, 0]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("\t2\tdet", "\tx\tdet", "a.conllu:2: 'x' is not a head of this word"),
        ("\t2\tdet", "\t9\tdet", "a.conllu:2: '9' is not a head of this word"),
        ("\t0\troot", "\t2\troot", "its heads form a cycle"),
        ("\t2\tdet\t_\t_", "\t2\tdet", "8 tab-separated columns"),
    ],
)
def test_a_broken_tree_is_named_by_its_line(tmp_path, old, new, said):
    (tmp_path / "a.conllu").write_text(TREE.replace(old, new))
    with pytest.raises(UserError, match="a.conllu") as caught:
        read_treebank(tmp_path / "a.conllu")
    assert said in str(caught.value)


def test_the_command_marks_choice_baseline_and_control(capsys, tmp_path, lively_folder):
    (tmp_path / "a.conllu").write_text(TREE * 100)
    words = ("look", "heads", "--model", lively_folder, "--treebank", tmp_path / "a.conllu")
    told = bertsmith(capsys, *words, "--out", tmp_path / "look")
    assert told.code == 0, told.err
    assert "chosen on the scored sentences" in told.out and "94.3 (51.7)" in told.out
    values = json.loads((tmp_path / "look" / "heads.json").read_text())
    assert [each["relation"] for each in values["relations"]] == ["det", "nsubj", "all"]
    assert len(values["untrained"]) == 3 and (tmp_path / "look" / "heads.png").stat().st_size > 1000
    assert '"name": "nsubj"' in (tmp_path / "look" / "heads.html").read_text()
    (tmp_path / "few.conllu").write_text(TREE)
    words = ("look", "heads", "--model", lively_folder, "--treebank", tmp_path / "few.conllu")
    told = bertsmith(capsys, *words, "--out", tmp_path / "none")
    assert told.code == 2 and "100 times" in told.err and not (tmp_path / "none").exists()
