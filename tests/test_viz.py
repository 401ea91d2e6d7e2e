"""The drawing helpers: what they publish, what they refuse, and that pictures depend on the data alone."""

import io

import IPython.display
import numpy as np
import pytest
import torch
from PIL import Image

from llm_engine import viz


class Letters:
    """A tokenizer of one letter a token."""

    def token(self, index: int) -> str:
        return chr(ord("a") + index)


@pytest.fixture
def shown(monkeypatch):
    """What the helpers hand to the notebook, in order."""
    outputs = []
    monkeypatch.setattr(
        IPython.display, "display", lambda data, metadata=None, raw=False: outputs.append(data)
    )
    return outputs


def pixels(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))


def test_show_figure_publishes_every_number_drawn(shown):
    figure, _ = viz.new_figure(2, 2)
    viz.show_figure(figure, "two", a=torch.tensor([[1.0, 2.0]]), b=[0.123456789012])
    data = shown[0][viz.FIGURE_DATA]
    assert data["name"] == "two"
    assert data["data"]["a"] == {"shape": [1, 2], "values": [1.0, 2.0]}
    assert data["data"]["b"]["values"] == [0.123456789]
    assert "a: 1x2, from 1 to 2, mean 1.5" in shown[0]["text/plain"]


def test_numbers_that_json_lacks_are_published_as_words(shown):
    figure, _ = viz.new_figure(2, 2)
    viz.show_figure(figure, "odd", a=[float("nan"), float("-inf"), 1.0])
    assert shown[0][viz.FIGURE_DATA]["data"]["a"]["values"] == ["nan", "-inf", 1.0]


def test_long_arrays_are_thinned_but_keep_their_shape(shown):
    figure, _ = viz.new_figure(2, 2)
    viz.show_figure(figure, "long", a=np.arange(100_000))
    published = shown[0][viz.FIGURE_DATA]["data"]["a"]
    assert published["shape"] == [100_000]
    assert 1000 < len(published["values"]) <= viz.MAX_VALUES


def test_the_identity_is_a_diagonal(shown):
    """The one matrix whose picture everyone knows: dark on the diagonal, light elsewhere, row 0 on top."""
    figure, axes = viz.new_figure(3, 3)
    viz.plot_heatmap(axes, torch.eye(4), numbers=False)
    axes.set_position([0, 0, 1, 1])
    figure.set_layout_engine("none")
    axes.set_axis_off()
    picture = pixels(viz.figure_png(figure)).astype(int).sum(-1)
    step = picture.shape[0] // 4
    cells = picture[step // 2 :: step, step // 2 :: step][:4, :4]
    assert (cells < cells.max()).tolist() == torch.eye(4, dtype=torch.bool).tolist()


def test_signed_matrices_are_drawn_around_zero():
    _, axes = viz.new_figure(3, 3)
    image = viz.plot_heatmap(axes, [[-1.0, 0.5], [0.0, 0.25]])
    assert image.get_clim() == (-1.0, 1.0)


def test_pictures_do_not_depend_on_the_notebooks_style(shown):
    import matplotlib

    viz.heatmap(np.eye(3), "plain")
    with matplotlib.rc_context({"font.size": 20, "figure.facecolor": "black", "axes.grid": True}):
        viz.heatmap(np.eye(3), "styled")
    assert shown[0]["image/png"] == shown[1]["image/png"]


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: viz.heatmap(np.zeros(3), "x"), "needs a matrix"),
        (lambda: viz.show_attention(np.zeros((2, 3, 3)), ["a"], "x"), "S = 1"),
        (lambda: viz.show_logits(torch.zeros(1, 3), Letters(), "x"), "one position"),
        (lambda: viz.show_pipeline("brain"), "unknown part"),
    ],
)
def test_wrong_shapes_and_names_are_refused(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()


def test_show_logits_orders_candidates_and_breaks_ties_by_id(shown):
    viz.show_logits(torch.tensor([0.0, 3.0, 3.0, -1.0]), Letters(), "x", top=3)
    assert shown[0][viz.FIGURE_DATA]["data"]["logits"]["values"] == [3.0, 3.0, 0.0]


def test_show_attention_draws_the_heads_asked_for(shown):
    probs = torch.eye(3).expand(4, 3, 3) * torch.arange(1, 5)[:, None, None] / 4
    viz.show_attention(probs, ["a", "b", "c"], "x", heads=[3, 0])
    values = shown[0][viz.FIGURE_DATA]["data"]["probs"]
    assert values["shape"] == [2, 3, 3]
    assert values["values"][0] == 1.0
    assert values["values"][9] == 0.25


def test_histogram_publishes_counts_over_common_bins(shown):
    viz.show_histogram("x", bins=4, a=[0.0, 1.0], b=[4.0])
    data = shown[0][viz.FIGURE_DATA]["data"]
    assert data["edges"]["values"] == [0, 1, 2, 3, 4]
    assert data["a"]["values"] == [1, 1, 0, 0]
    assert data["b"]["values"] == [0, 0, 0, 1]


def test_tables_align_numbers_and_escape_html(shown):
    viz.show_table(["name", "n"], [("<b>", 1234567), ("c", torch.tensor(2))], "caption")
    assert shown[0]["text/plain"].splitlines() == [
        "caption",
        "name          n",
        "----  ---------",
        "<b>   1,234,567",
        "c             2",
    ]
    assert "&lt;b&gt;" in shown[0]["text/html"]
    assert "<b>" not in shown[0]["text/html"]


def test_a_shape_table_that_contradicts_itself_is_not_printed(shown):
    ids, x = torch.zeros(1, 5), torch.zeros(1, 5, 8)
    viz.show_shapes({"ids": "B T", "x": "B T H"}, ids=ids, x=x)
    assert "[1, 5, 8]" in shown[0]["text/plain"]
    with pytest.raises(ValueError, match="axis T is 4 here and 5 before"):
        viz.show_shapes({"ids": "B T", "x": "B T H"}, ids=ids, x=x[:, :4])
    with pytest.raises(ValueError, match="its axes are 'B T'"):
        viz.show_shapes({"x": "B T"}, x=x)


def test_labels_show_spaces_and_spell_out_what_the_font_lacks():
    assert viz.plain_label(" a\n") == "␣a⏎"
    assert viz.plain_label("你") == "U+4F60"
    assert viz.plain_label("\x07") == "U+0007"


@pytest.mark.parametrize(
    "lit", ["all", "layers", "engine", ["config", "weights"], *[p[0] for p in viz.PIPELINE]]
)
def test_each_part_of_the_pipeline_can_be_lit(lit):
    figure, axes = viz.new_figure(8.4, 2.6)
    viz.plot_pipeline(axes, lit)
    plain, empty = viz.new_figure(8.4, 2.6)
    viz.plot_pipeline(empty, [])
    assert not np.array_equal(pixels(viz.figure_png(figure)), pixels(viz.figure_png(plain)))


def test_missing_matplotlib_is_explained(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"llm-engine\[book\]"):
        viz.new_figure(1, 1)
