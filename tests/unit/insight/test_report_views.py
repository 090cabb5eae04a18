"""The data of views, as their pages get them."""

import numpy as np
import pytest

from bertsmith.insight.report import Report, Table, View, view_data, write_report
from bertsmith.insight.report_views import measures_view


def test_a_measure_that_no_head_has_any_of_still_has_a_scale_to_divide_by():
    nothing = {"found": np.zeros((2, 3))}
    view = measures_view(nothing, [nothing], lead="Of nothing.")
    report = Report("coref", (Table("Nothing", ("", "right"), [("all", 0.0)], ()),), {}, lambda _: None)
    (measure,) = view_data(report, view)["measures"]
    assert 0 < measure["scale"]["top"] < 1e-5 and np.sum(measure["values"]) == 0


def test_a_view_that_fails_leaves_the_tables_and_is_not_the_users_mistake(tmp_path):
    table = Table("Some", ("", "right"), [("all", 0.5)], ("A note.",))
    report = Report("some", (table,), {"right": 0.5}, lambda _: None, view=View("no_such_view", {}))
    with pytest.raises(FileNotFoundError, match="no_such_view.js"):
        write_report(report, tmp_path / "look")
    assert sorted(file.name for file in (tmp_path / "look").iterdir()) == ["some.json", "some.txt"]
    assert "all  0.500" in (tmp_path / "look" / "some.txt").read_text()
