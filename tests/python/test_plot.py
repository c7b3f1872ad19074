"""Plots show what the frames hold: checked on the artists, not on pixels."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")

from matplotlib import pyplot  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402

import kvrelay as kr  # noqa: E402
from kvrelay import plot  # noqa: E402

TIMES = [
    "arrival",
    "prefill_start",
    "first_token",
    "transfer_start",
    "transfer_end",
    "decode_start",
    "last_token",
]


class Result:
    """A result made by hand."""

    def __init__(self, requests: pd.DataFrame, goodput: float | None, attainment: float | None) -> None:
        self.requests = requests
        self._numbers = (goodput, attainment)
        self.objectives: dict[str, list[kr.SLO]] = {}
        self.bounds: tuple[float, float] | None = None

    def goodput(self) -> float | None:
        return self._numbers[0]

    def attainment(self) -> float | None:
        return self._numbers[1]


def frame(rows: list[list[float | None]], **columns: object) -> pd.DataFrame:
    """Requests with these milestones, as nullable floats."""
    requests = pd.DataFrame(rows, columns=TIMES, dtype="Float64")
    requests["ttft"] = requests["first_token"] - requests["arrival"]
    requests["e2e"] = requests["last_token"] - requests["arrival"]
    requests["tpot"] = pd.array([0.05] * len(rows), dtype="Float64")
    requests["max_gap"] = pd.array([0.2] * len(rows), dtype="Float64")
    for name, values in {"slo_class": "chat", "status": "finished", "good": True, **columns}.items():
        requests[name] = values
    requests["good"] = requests["good"].astype("boolean")
    return requests


@pytest.fixture
def result() -> Result:
    rows = [
        [0.0, 0.1, 0.5, 0.4, 0.6, 0.7, 2.0],
        [0.5, 0.5, 1.5, 1.5, 1.6, 1.6, 1.6],
        [1.0, None, None, None, None, None, None],
        [1.2, 1.5, 2.0, None, None, 2.0, 4.0],
    ]
    requests = frame(
        rows,
        slo_class=["chat", "chat", "chat", "code"],
        status=["finished", "finished", "refused", "finished"],
        good=[True, pd.NA, False, False],
    )
    return Result(requests, 0.25, 1 / 3)


@pytest.fixture(autouse=True)
def close_figures():
    yield
    pyplot.close("all")


def test_a_cdf_counts_the_refused_as_never(result: Result) -> None:
    ax = plot.latency_cdf(result)
    chat, code = ax.get_lines()
    assert [chat.get_label(), code.get_label()] == ["chat", "code"]
    np.testing.assert_allclose(chat.get_xdata(), [0.0, 0.5, 1.0])
    np.testing.assert_allclose(chat.get_ydata(), [0.0, 1 / 3, 2 / 3])
    np.testing.assert_allclose(code.get_ydata(), [0.0, 1.0])
    assert ax.get_xlabel() == "time to first token (s)"
    assert ax.get_ylabel() == "share of requests"
    assert ax.get_legend() is not None


def test_a_cdf_leaves_out_what_is_undefined(result: Result) -> None:
    # Of four requests one had a single token, and does not count; the refused one never got there.
    result.requests.loc[[1, 2], "tpot"] = pd.NA
    line = plot.latency_cdf({"one": result}, metric="tpot").get_lines()[0]
    np.testing.assert_allclose(line.get_xdata(), [0.0, 50.0, 50.0])
    np.testing.assert_allclose(line.get_ydata(), [0.0, 1 / 3, 2 / 3])


def test_cdfs_of_several_results_share_one_axes(result: Result) -> None:
    _, ax = pyplot.subplots()
    assert plot.latency_cdf({"a": result, "b": result}, ax=ax, metric="e2e") is ax
    assert [line.get_label() for line in ax.get_lines()] == ["a", "b"]
    assert len({line.get_color() for line in ax.get_lines()}) == 2


def test_a_cdf_marks_objectives(result: Result) -> None:
    result.objectives = {"chat": [kr.SLO(ttft=0.5, tpot=0.05)], "code": [kr.SLO(ttft=2.0)]}
    ax = plot.latency_cdf(result)
    [marks] = ax.collections
    assert [segment[0][0] for segment in marks.get_segments()] == [0.5, 2.0]
    assert [text.get_text().strip() for text in ax.texts] == ["SLO chat", "SLO code"]
    assert [text.get_text().strip() for text in plot.latency_cdf(result, metric="tpot").texts] == ["SLO"]
    result.objectives = {"many": [kr.SLO(ttft=float(limit)) for limit in range(1, 10)]}
    assert not plot.latency_cdf(result).collections


def test_what_is_no_result_is_refused(result: Result) -> None:
    for draw in (plot.latency_cdf, plot.goodput_bars, plot.timeline):
        with pytest.raises(TypeError, match="result is of type list; give a Result"):
            draw([result])
    with pytest.raises(TypeError, match="result 'x' is of type int"):
        plot.goodput_bars({"x": 5})
    assert len(plot.goodput_bars(result).patches) == 1


@pytest.mark.parametrize("draw", [plot.latency_cdf, plot.timeline, plot.goodput_bars])
def test_what_is_no_axes_is_refused(result: Result, draw) -> None:
    with pytest.raises(TypeError, match=r"ax is 'tpot', of type str; .* metric='tpot'"):
        draw(result, "tpot")
    with pytest.raises(TypeError, match=r"ax is 3, of type int; it must be matplotlib Axes, or None$"):
        draw(result, 3)
    assert not pyplot.get_fignums()


def test_many_curves_stay_distinct(result: Result) -> None:
    ax = plot.latency_cdf({str(index): result for index in range(20)})
    styles = {(line.get_color(), line.get_linestyle()) for line in ax.get_lines()}
    assert len(styles) == 20


def test_a_long_cdf_is_thinned_but_keeps_its_ends() -> None:
    rows = [[0.0, 0.0, 0.001 * (index + 1), None, None, None, 50.0] for index in range(20_000)]
    line = plot.latency_cdf(Result(frame(rows), 1.0, 1.0)).get_lines()[0]
    assert len(line.get_xdata()) <= 4_000
    assert (line.get_xdata()[0], line.get_xdata()[-1]) == (0.0, pytest.approx(20.0))
    assert line.get_ydata()[-1] == 1.0


def test_an_unknown_metric_lists_the_known_ones(result: Result) -> None:
    with pytest.raises(ValueError, match="unknown metric 'itl'; known: ttft, tpot, e2e, max_gap"):
        plot.latency_cdf(result, metric="itl")


def bars(ax: Axes) -> dict[str, list[tuple[float, float, float]]]:
    """Row, start and length of each phase's bars."""
    return {
        container.get_label(): [
            (bar.get_y() + bar.get_height() / 2, bar.get_x(), bar.get_width()) for bar in container
        ]
        for container in ax.containers
    }


def test_a_timeline_has_the_phases_of_each_request(result: Result) -> None:
    ax = plot.timeline(result)
    drawn = bars(ax)
    assert set(drawn) == {"queue", "prefill", "hand-over", "decode", "KV transfer"}
    np.testing.assert_allclose(drawn["queue"], [(0, 0.0, 0.1), (3, 1.2, 0.3)])
    np.testing.assert_allclose(drawn["prefill"], [(0, 0.1, 0.4), (1, 0.5, 1.0), (3, 1.5, 0.5)])
    np.testing.assert_allclose(drawn["KV transfer"], [(0, 0.4, 0.2), (1, 1.5, 0.1)])
    np.testing.assert_allclose(drawn["decode"], [(0, 0.7, 1.3), (3, 2.0, 2.0)])
    crosses = ax.collections[0].get_offsets()
    np.testing.assert_allclose(crosses, [(1.0, 2), (4.0, 3)])
    assert ax.get_xlabel().endswith("(s)")
    top, bottom = ax.get_ylim()[1], ax.get_ylim()[0]
    assert top < bottom, "the first request is at the top"


def test_a_timeline_shows_the_first_and_says_so(result: Result) -> None:
    ax = plot.timeline(result, max_requests=2)
    assert ax.get_title(loc="left") == "the first 2 of 4 requests"
    assert plot.timeline(result).get_title(loc="left") == ""
    with pytest.raises(ValueError, match="max_requests is 0"):
        plot.timeline(result, max_requests=0)


def test_the_timeline_of_a_window_begins_where_the_window_does(workload, cluster) -> None:
    whole = kr.simulate(workload, cluster, progress=False)
    assert whole.bounds is None and plot.timeline(whole).get_xlim()[0] == 0.0
    window = whole.window(20.0, 25.0)
    left, right = plot.timeline(window).get_xlim()
    assert left == 20.0 == window.bounds[0] and right < 30.0


def test_empty_results_draw_empty_axes() -> None:
    empty = Result(frame([]), None, None)
    assert plot.latency_cdf(empty).get_lines() == []
    assert list(plot.timeline(empty).containers) == []


def test_bars_carry_goodput_and_attainment(result: Result) -> None:
    no_slo = Result(result.requests, None, None)
    ax = plot.goodput_bars({"fcfs": result, "goodput": Result(result.requests, 1.5, 0.9), "free": no_slo})
    assert [bar.get_height() for bar in ax.containers[0]] == [0.25, 1.5, 0.0]
    assert [text.get_text() for text in ax.texts] == ["0.25\n33% good", "1.50\n90% good", "no SLO"]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["fcfs", "goodput", "free"]
    assert ax.get_ylabel() == "goodput (good requests/s)"
    with pytest.raises(ValueError, match="no results"):
        plot.goodput_bars({})
