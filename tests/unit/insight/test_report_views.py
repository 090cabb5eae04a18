"""The data of views, as their pages get them."""

import numpy as np

from bertsmith.insight.report import Report, Table, view_data
from bertsmith.insight.report_views import measures_view


def test_a_measure_that_no_head_has_any_of_still_has_a_scale_to_divide_by():
    nothing = {"found": np.zeros((2, 3))}
    view = measures_view(nothing, [nothing], lead="Of nothing.")
    report = Report("coref", (Table("Nothing", ("", "right"), [("all", 0.0)], ()),), {}, lambda _: None)
    (measure,) = view_data(report, view)["measures"]
    assert 0 < measure["scale"]["top"] < 1e-5 and np.sum(measure["values"]) == 0
