"""Studies of attention on a GPU, where texts of like length are filled up, beside those of the CPU."""

import numpy as np
import pytest

import bertsmith
from bertsmith.insight.clusters import study_clusters
from bertsmith.insight.relations import _readable, hit_rates, relations_of
from bertsmith.insight.surface import MEASURES, measure_attention
from tests.toy_folder import write_toy_folder
from tests.unit.insight.test_relations import random_treebank

pytestmark = pytest.mark.gpu

TEXTS = ["The dog plays in the snow.", ("My cat sits.", "It is cold, and it rains."), "Tea.", "A boy walks."]


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    write_toy_folder(folder)
    return [bertsmith.load(folder, device=device) for device in ("cpu", "cuda")]


def test_heads_find_as_many_relations(both):
    sentences = random_treebank(1, 200)
    names = relations_of(sentences, least=10)
    cpu, cuda = (hit_rates(bert, *_readable(bert, sentences, names), mode="mean") for bert in both)
    # A word or two may be attended to equally, up to rounding.
    counts_R = _readable(both[0], sentences, names)[1].totals().sum(0)
    assert (np.abs(cpu.heads_L2HR - cuda.heads_L2HR) * counts_R).max() < 2.5
    assert np.array_equal(cpu.offsets_OR, cuda.offsets_OR)


def test_measures_and_divergences_are_equal(both):
    cpu, cuda = (measure_attention(bert, TEXTS, longest=128).measures for bert in both)
    for name in MEASURES:
        np.testing.assert_allclose(cuda[name], cpu[name], atol=1e-5, err_msg=name)
    cpu, cuda = (study_clusters(bert, TEXTS, longest=128).distances_AA for bert in both)
    np.testing.assert_allclose(cuda, cpu, atol=1e-5)
