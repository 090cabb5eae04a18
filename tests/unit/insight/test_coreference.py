"""Antecedents: files, hand-computed baselines, and heads against loops over transformers' attentions."""

import json

import numpy as np
import pytest

from bertsmith.core.errors import UserError
from bertsmith.insight.antecedents import nearest, same_head, sieve
from bertsmith.insight.coreference import (
    AntecedentScore,
    Coreference,
    QuestionSet,
    _hits,
    document_questions,
    gap_questions,
    study_coreference,
)
from bertsmith.insight.coreference_report import coreference_report
from bertsmith.insight.gap import read_gap
from bertsmith.insight.mentions import read_mentions
from tests.command_line import bertsmith
from tests.unit.insight.slow_attention import eager_maps

# The boy(1) sits. A dog(2) runs. He(1) eats apple(3). The dog(2) of my cat(4) sleeps. She(4) plays. It(2)
# walks.
COLUMNS = """#begin document (a); part 000
a 0 0 The DT - (1
a 0 1 boy NN - 1)
a 0 2 sits VBZ - -

a 0 0 A DT - (2
a 0 1 dog NN - 2)
a 0 2 runs VBZ - -

a 0 0 He PRP - (1)
a 0 1 eats VBZ - -
a 0 2 apple NN - (3)

a 0 0 The DT - (2
a 0 1 dog NN - -
a 0 2 of IN - -
a 0 3 my PRP$ - (4
a 0 4 cat NN - 2)|4)
a 0 5 sleeps VBZ - -

a 0 0 She PRP - (4)
a 0 1 plays VBZ - -

a 0 0 It PRP - (2)
a 0 1 walks VBZ - -
#end document
"""
GUM = """# newdoc id = one
# global.Entity = GRP-etype-infstat
1\tMy\tmy\tPRON\t_\t_\t2\tnmod:poss\t_\tEntity=(1-person-new)
2\tcats\tcat\tNOUN\t_\tNumber=Plur\t3\tnsubj\t_\tEntity=(2-animal-new)|SpaceAfter=No
3\trun\trun\tVERB\t_\t_\t0\troot\t_\t_

1\tThe\tthe\tDET\t_\t_\t2\tdet\t_\tEntity=(2-animal-giv
2\tcats\tcat\tNOUN\t_\tNumber=Plur\t5\tnsubj\t_\t_
3\tof\tof\tADP\t_\t_\t4\tcase\t_\t_
4\tLondon\tLondon\tPROPN\t_\t_\t2\tnmod\t_\tEntity=(3-place-new)2)
5\tsit\tsit\tVERB\t_\t_\t0\troot\t_\t_

# newdoc id = two
1\tThey\tthey\tPRON\t_\t_\t2\tnsubj\t_\tEntity=(2-animal-new)
2\trun\trun\tVERB\t_\t_\t0\troot\t_\t_

"""


@pytest.fixture
def columns(tmp_path):
    (tmp_path / "a.conll").write_text(COLUMNS)
    return tmp_path / "a.conll"


# ---- files


def test_columns_of_conll_2012_are_read(columns):
    (document,) = read_mentions(columns)
    found = [(document.words[m.head], m.entity, m.kind, m.end - m.start) for m in document.mentions]
    assert found == [
        ("boy", "1", "nominal", 2),
        ("dog", "2", "nominal", 2),
        ("He", "1", "pronoun", 1),
        ("apple", "3", "nominal", 1),
        ("dog", "2", "nominal", 5),  # its head stands in front of "of"
        ("cat", "4", "nominal", 2),
        ("She", "4", "pronoun", 1),
        ("It", "2", "pronoun", 1),
    ]


def test_entities_of_gum_are_read_with_heads_from_the_tree(tmp_path):
    (tmp_path / "a.conllu").write_text(GUM)
    first, second = read_mentions(tmp_path / "a.conllu")
    found = [(first.words[m.head], m.entity, m.kind, m.plural, m.end - m.start) for m in first.mentions]
    assert found == [
        ("My", "1", "pronoun", False, 1),
        ("cats", "2", "nominal", True, 1),
        ("cats", "2", "nominal", True, 4),
        ("London", "3", "proper", False, 1),
    ]
    assert [second.words[m.head] for m in second.mentions] == ["They"]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("A DT - (2", "A DT - -", "a.conll:7: entity '2' is closed but was not opened"),
        ("sits VBZ - -", "sits VBZ - (9", "a.conll:4: entity '9' is never closed"),
        ("a 0 2 sits VBZ - -", "sits -", "a.conll:4: has 2 columns"),
        (COLUMNS, "a 0 0 tea NN - -\n", "does not contain mentions"),
    ],
)
def test_bad_mentions_are_named_by_their_line(columns, old, new, said):
    columns.write_text(COLUMNS.replace(old, new))
    with pytest.raises(UserError) as caught:
        read_mentions(columns)
    assert said in str(caught.value)


# ---- baselines, by hand: mentions 0 boy, 1 dog, 2 He, 3 apple, 4 dog, 5 cat, 6 She, 7 It


def test_baselines_answer_as_by_hand(columns):
    (document,) = read_mentions(columns)
    asked = [2, 4, 6, 7]
    answers = {
        each.__name__: [each(n, document.mentions, document.words) for n in asked]
        for each in (nearest, same_head, sieve)
    }
    assert answers == {
        "nearest": [1, 3, 5, 6],
        "same_head": [None, 1, None, None],
        # He: no equal, nearest that agrees is dog. The dog of my cat: head word. She: cat agrees.
        # It: She does not agree (gender), cat does.
        "sieve": [1, 1, 5, 5],
    }


def test_questions_and_scores_of_baselines_are_those_by_hand(bert, columns):
    asked = document_questions(bert, read_mentions(columns), longest=128)
    ((text),) = asked.texts
    assert [(q.mention, q.candidates, set(q.right), q.kind) for q in text.questions] == [
        (2, (0, 1), {0}, "pronoun"),
        (4, (0, 1, 2, 3), {1}, "nominal"),
        (6, (0, 1, 2, 3, 4, 5), {5}, "pronoun"),
        (7, (0, 1, 2, 3, 4, 5, 6), {1, 4}, "pronoun"),
    ]
    found = study_coreference(bert, asked, asked, seed=0)
    by = {(each.answered_by, each.kind): (each.count, each.accuracy) for each in found.scores}
    assert by["nearest mention", "all"] == (4, 0.25)  # She alone
    assert by["nearest mention", "pronoun"] == (3, pytest.approx(1 / 3))
    assert by["same head word", "all"] == (4, 0.25) and by["same head word", "nominal"] == (1, 1.0)
    assert by["rules", "all"] == (4, 0.5) and by["rules", "nominal"] == (1, 1.0)
    assert ("head", "proper") not in by


def test_windows_keep_sentences_that_fit_and_antecedents_inside_them(bert, columns):
    asked = document_questions(bert, read_mentions(columns), longest=14)
    assert all(len(text.mentions.encoded) <= 14 for text in asked.texts)
    assert sum(len(text.questions) for text in asked.texts) < 4


def test_what_is_too_long_is_counted_and_named(bert, columns, gap):
    long = COLUMNS.replace("a 0 5 sleeps VBZ - -\n", "a 0 5 sleeps VBZ - -\n" * 5)
    columns.write_text(long)
    asked = document_questions(bert, read_mentions(columns), longest=11)
    assert asked.left_out == "2 mentions in sentences longer than a window"
    gap.write_text(HEADER + FIRST + SECOND.replace("cat runs.", "cat" + " runs" * 200))
    assert gap_questions(bert, read_gap(gap)).left_out == "1 text longer than the model takes"
    assert document_questions(bert, read_mentions(columns), longest=128).left_out == ""


def scored(accuracy, low, high, who="head"):
    return AntecedentScore(who, "all", 9, accuracy, low, high)


def study_of(*scores):
    return Coreference(0, 1, "to the antecedent", scores, np.zeros((1, 2, 2)))


@pytest.mark.parametrize(
    ("low", "untrained", "said"),
    [
        (0.51, (0.2, 0.3), ["is above the best baseline (rules, 50.0).", "above it: 0 of 2."]),
        (0.51, (0.2, 0.6), ["is above the best baseline (rules, 50.0).", "above it: 1 of 2."]),
        (0.50, (0.2, 0.6), ["is not above the best baseline (rules, 50.0).", "above it: 1 of 2."]),
    ],
)
def test_the_notes_tell_what_beats_the_best_baseline(low, untrained, said):
    baselines = scored(0.4, 0.3, 0.9, "nearest mention"), scored(0.5, 0.4, 0.6, "rules")
    found = study_of(scored(0.7, low, 0.8), *baselines)
    asked = QuestionSet((), ("all",), ("nearest mention", "rules"), "3 texts longer than the model takes")
    controls = [study_of(scored(0.7, each, 0.8)) for each in untrained]
    report = coreference_report(found, controls, asked, model="toy", how="Somehow.")
    first, *notes, last = report.tables[0].notes
    assert (first, last) == ("Somehow.", "Left out: 3 texts longer than the model takes.")
    assert [each.endswith(end) for each, end in zip(notes, said, strict=True)] == [True, True]


# ---- heads


def slow_answer(maps, rows, question, layer, head, direction):
    """The candidate that a head points to."""

    def attention(source, target):
        return sum(maps[layer, head, row, column] for row in source for column in target) / len(source)

    mention = rows[question.mention]
    values = [
        attention(mention, rows[candidate]) if direction == 0 else attention(rows[candidate], mention)
        for candidate in question.candidates
    ]
    return question.candidates[int(np.argmax(values))]


def check_heads(bert, eager, asked):
    """Every head's hits, question by question."""
    found = {
        n: hits[:, :, at]
        for numbers, hits in _hits(bert, asked, what="texts")
        for at, n in enumerate(numbers)
    }
    for number, text in enumerate(asked.texts):
        maps, expected = eager_maps(eager, text.mentions.encoded), np.zeros((2, 2, 4, len(asked.kinds)))
        for question in text.questions:
            for layer, direction, head in np.ndindex(2, 2, 4):
                answer = slow_answer(maps, text.mentions.pieces, question, layer, head, direction)
                places = [asked.kinds.index(question.kind), -1]
                expected[layer, direction, head, places] += answer in question.right
        np.testing.assert_array_equal(found[number], expected)
    return found


@pytest.mark.usefixtures("groups")
def test_heads_point_where_slow_loops_say(bert, eager, columns, tmp_path):
    (tmp_path / "g.conllu").write_text(GUM)
    documents = [*read_mentions(columns), *read_mentions(tmp_path / "g.conllu")]
    asked = document_questions(bert, documents, longest=128)
    found = check_heads(bert, eager, asked)
    best = study_coreference(bert, asked, asked, seed=0)
    total = sum(len(text.questions) for text in asked.texts)
    rates = sum(found.values())[..., -1] / total
    assert rates.max() == pytest.approx(next(s.accuracy for s in best.scores if s.kind == "all"))
    np.testing.assert_allclose(best.accuracy_L2H, rates)


# ---- GAP

HEADER = "ID\tText\tPronoun\tPronoun-offset\tA\tA-offset\tA-coref\tB\tB-offset\tB-coref\tURL\n"
FIRST = "1\tA boy saw Tree Cat and my dog in a park; he ran.\the\t41\tTree Cat\t10\tTRUE\tdog\t26\tFALSE\tx\n"
SECOND = (
    "2\tMorning Rain met London, and her cat runs.\ther\t29\tMorning Rain\t0\tFALSE\tLondon\t17\tTRUE\tx\n"
)
NEITHER = "3\tBoy met Sun; she walks.\tshe\t13\tBoy\t0\tFALSE\tSun\t8\tFALSE\tx\n"


@pytest.fixture
def gap(tmp_path):
    (tmp_path / "gap.tsv").write_text(HEADER + FIRST + SECOND + NEITHER)
    return tmp_path / "gap.tsv"


@pytest.mark.usefixtures("groups")
def test_gap_has_two_candidates_and_a_gender(bert, eager, gap):
    examples = read_gap(gap)
    assert [(e.right, e.gender, e.nearest()) for e in examples] == [
        (0, "masculine", 1),
        (1, "feminine", 1),
        (None, "feminine", 1),
    ]
    asked = gap_questions(bert, examples)
    assert len(asked.texts) == 2  # one refers to neither name
    for text, words in zip(asked.texts, (("he", "cat", "dog"), ("her", "rain", "london")), strict=True):
        spelled = [
            "".join(bert.tokenizer.token(text.mentions.encoded.ids[r]).removeprefix("##") for r in rows)
            for rows in text.mentions.pieces
        ]
        assert tuple(spelled) == words  # of a name, its last word
    check_heads(bert, eager, asked)
    by = {(s.answered_by, s.kind): s.accuracy for s in study_coreference(bert, asked, asked, seed=0).scores}
    assert [by["nearest mention", kind] for kind in asked.kinds] == [0.0, 1.0, 0.5]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("\t41\t", "\t42\t", "does not contain 'he' at '42'"),
        ("TRUE\tdog", "maybe\tdog", "is not an example of GAP"),
    ],
)
def test_a_bad_line_of_gap_is_named(gap, old, new, said):
    gap.write_text(gap.read_text().replace(old, new))
    with pytest.raises(UserError, match="gap.tsv") as caught:
        read_gap(gap)
    assert said in str(caught.value)


def test_the_command_takes_every_format(capsys, tmp_path, lively_folder, gap, columns):
    words = ("look", "coref", "--model", lively_folder, "--out", tmp_path / "look", "--data")
    told = bertsmith(capsys, *words, gap, "--choose-on", gap)
    assert told.code == 0 and "feminine" in told.out and "untrained 3" in told.out, told.err
    values = json.loads((tmp_path / "look" / "coref.json").read_text())
    assert len(values["untrained"]) == 3 and np.shape(values["accuracy_of_heads"]) == (2, 2, 4)
    assert (tmp_path / "look" / "coref.png").exists()
    assert '"name": "to the antecedent"' in (tmp_path / "look" / "coref.html").read_text()
    told = bertsmith(capsys, *words, gap, "--choose-on", columns)
    assert told.code == 2 and "has another format" in told.err
    assert bertsmith(capsys, *words, tmp_path / "none").code == 2
