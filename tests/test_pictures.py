"""The book's pictures of a reader's own text: figures that stay readable, files, and the commands that write them."""

import csv
import io
import json
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_folder import write_tiny_folder
from typer.testing import CliRunner

from llm_engine import cli, viz
from llm_engine.cli import app
from llm_engine.engine import Engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_tiny_folder(tmp_path_factory.mktemp("pictures") / "tiny"))


@pytest.fixture(scope="module")
def tiny(folder):
    return Engine.from_pretrained(folder, device="cpu", cache="none", runner="torch")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Files without a folder go into a new one; and pictures are coarse, which is quicker."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(viz, "DPI", 48)
    return tmp_path


def call(*arguments, **options):
    return CliRunner().invoke(app, [*map(str, arguments)], **options)


def causal(heads, T):
    scores = torch.randn(heads, T, T, generator=torch.Generator().manual_seed(0))
    return scores.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf).softmax(-1)


def words(count):
    return [f"␣word{i}" for i in range(count)]


# ---- figures


def boxes(axis):
    """Where the labels of an axis are, in pixels, from the first to the last."""
    figure = axis.axes.figure
    figure.draw_without_rendering()
    labels = [label for label in axis.get_ticklabels() if label.get_text()]
    return labels, [label.get_window_extent() for label in labels]


@pytest.mark.parametrize(("T", "heads"), [(1, 1), (25, 1), (26, 2), (400, 1), (30, 10)])
def test_attention_stays_readable_whatever_its_size(T, heads):
    figure = viz.attention_figure(causal(heads, T), words(T), title="a title")
    width, height = figure.get_size_inches()
    assert 2 < width < 20 and 2 < height < 20
    panels = [axes for axes in figure.axes if axes.images]
    assert len([axes for axes in panels if axes.get_title()]) == heads
    labels, extents = boxes(panels[0].yaxis)
    assert labels[0].get_text() == "␣word0" and min(T, 5) <= len(labels) <= T
    for above, below in zip(extents, extents[1:], strict=False):
        assert above.y0 >= below.y0 + 0.6 * below.height, "labels lie on one another"
    thinned = any("is named" in text.get_text() for text in figure.texts)
    supx = figure._supxlabel.get_text() if figure._supxlabel else ""
    assert (thinned or "is named" in supx) == (len(labels) < T)
    assert len(labels) == T or T > 25, "short texts have every token named"


def test_attention_draws_the_heads_that_are_asked_for():
    probs = causal(4, 6)
    figure = viz.attention_figure(probs, words(6), heads=[3, 1])
    panels = [axes for axes in figure.axes if axes.images and axes.get_title()]
    assert [axes.get_title() for axes in panels] == ["head 3", "head 1"]
    for axes, head in zip(panels, (3, 1), strict=True):
        assert np.allclose(axes.images[0].get_array(), probs[head].numpy())
    for heads, message in (([4], "no head 4"), ([-1], "no head -1"), ([], "no head is chosen")):
        with pytest.raises(ValueError, match=message):
            viz.attention_figure(probs, words(6), heads=heads)


def drawn(figure):
    """What a panel shows, from 0 (as light as can be) to 1; and the label of the color bar."""
    image = next(axes for axes in figure.axes if axes.images and axes.get_title()).images[0]
    return image.norm(image.get_array()).filled(0), image.colorbar.ax.get_ylabel()


@pytest.mark.parametrize("T", [49, 100, 700, 1024])
def test_long_texts_are_not_drawn_white_on_white(T):
    """Half of the attention on the first token, and a line of three times an even share: on a linear scale of 700
    tokens that line had 0.4 % of the way from white to blue."""
    probs = torch.full((1, T, T), 0.25 / T).tril()
    probs[0, T // 2 + 1 :, T // 2] = 3 / T
    probs[0, :, 0] = 0.5
    figure = viz.attention_figure(probs, words(T))
    seen, label = drawn(figure)
    block = -(-T // len(seen))
    line = seen[len(seen) * 3 // 4 :, (T // 2) // block]
    assert (line > 0.15).all(), "the line is too light to be seen"
    assert (seen[2:, 0] > 0.8).all() and (line < seen[-1, 0]).all()
    assert seen[-1, -(len(seen) // 4)] == 0, "less than an even share is as light as can be"
    assert "logarithmic" in label and f"1/{T}" in label
    small = figure._supxlabel.get_text() if figure._supxlabel else ""
    assert (f"largest of {block} × {block}" in small) == (block > 1)
    # squares lie where the labels say
    left, right, bottom, top = next(a for a in figure.axes if a.images).images[0].get_extent()
    assert (left, top) == (-0.5, -0.5) and T - 0.5 <= min(right, bottom) < T - 0.5 + block


def test_short_texts_keep_a_linear_scale():
    probs = causal(1, viz.LINEAR)
    seen, label = drawn(viz.attention_figure(probs, words(viz.LINEAR)))
    assert np.allclose(seen, probs[0]) and label == "probability"


def test_a_narrow_line_survives_where_dots_stand_for_several_values(monkeypatch):
    """An average of the values under a dot would make it fainter; a dot left out would lose it."""
    monkeypatch.setattr(viz, "DPI", 20)
    probs = torch.zeros(1, 1001, 1001)
    probs[0, :, 777] = 1
    seen, _ = drawn(viz.attention_figure(probs, words(1001)))
    assert len(seen) < 200 and (seen.max(1) == 1).all() and (seen.max(0) == 1).sum() == 1
    assert np.isnan(viz._largest(np.array([[np.nan, 1.0]]), 2)).all(), (
        "what is no number stays seen"
    )


def test_long_labels_are_cut():
    figure = viz.attention_figure(causal(1, 2), ["a" * 40, "b" * 14])
    labels, _ = boxes(next(axes for axes in figure.axes if axes.images).yaxis)
    assert [label.get_text() for label in labels] == ["a" * 13 + "…", "b" * 14]


def test_the_summary_says_where_heads_look():
    T = 5
    itself, first = torch.eye(T), torch.zeros(T, T).index_fill(1, torch.tensor([0]), 1.0)
    before = torch.eye(T).roll(-1, 1)
    before[0], before[:, 0] = torch.eye(T)[0], torch.eye(T)[:, 0]
    before[1:] = torch.eye(T)[:-1]
    even = torch.ones(T, T).tril() / torch.arange(1, T + 1)[:, None]
    headers, rows = viz.attention_summary(torch.stack([itself, first, before, even]), words(T))
    assert headers[1:4] == ["first", "itself", "before"]
    assert [row[:5] for row in rows] == [
        [0, "0%", "100%", "0%", "1.0"],
        [1, "100%", "0%", "25%", "1.0"],
        [2, "25%", "0%", "100%", "1.0"],
        [3, "32%", "32%", "32%", "3.5"],  # the means of 1/2 … 1/5 and of 2 … 5
    ]
    assert [row[5] for row in rows[:3]] == ["␣word4 100%", "␣word0 100%", "␣word3 100%"]
    assert rows[3][5] == "␣word0 20%, ␣word1 20%, ␣word2 20%"
    _, rows = viz.attention_summary(torch.ones(2, 1, 1), ["a"], heads=[1])
    assert rows == [[1, "100%", "100%", "0%", "1.0", "a 100%"]]


def test_shapes_are_drawn_to_scale(tiny):
    with tiny.trace() as trace:
        tiny.step(tiny.encode("abc"))
    figure = viz.shapes_figure(trace.rows, title="t")
    axes = figure.axes[0]
    widths = [bar.get_width() for bar in axes.patches]
    assert widths == [int(np.prod(row.shape)) for row in trace.rows]
    texts = [text.get_text() for text in axes.texts]
    assert "[1, 4, 3, 3]   B N T S" in texts and len(texts) == len(trace.rows)
    assert axes.yaxis_inverted() and axes.get_xscale() == "log"


# ---- characters


def test_bytes_of_an_incomplete_character_keep_their_space():
    assert viz.plain_label("<E4 BB>") == "<E4 BB>"
    assert viz.plain_label("a b") == "a␣b"


def test_chinese_is_drawn_where_the_machine_can_and_spelled_out_where_not(monkeypatch):
    from matplotlib import font_manager

    assert viz.plain_label("天") == "U+5929"
    with viz.machine_fonts(["plain text"]):
        assert viz.plain_label("天") == "U+5929"  # no font was looked for
    with monkeypatch.context() as patch:
        patch.setattr(viz, "FONTS", ["No Such Font"])
        with viz.machine_fonts(["天气"]):
            assert viz.plain_label("天") == "U+5929"
    there = {font.name for font in font_manager.fontManager.ttflist}
    if not there & {"Noto Sans CJK SC", "Noto Sans CJK JP", "Microsoft YaHei", "PingFang SC"}:
        pytest.skip("no Chinese font on this machine")
    tokens = ["今天", "天气", "␣fine"]
    with warnings.catch_warnings(), viz.machine_fonts(tokens):
        warnings.simplefilter("error")  # matplotlib warns of a character that no font has
        assert viz.plain_label("天") == "天"
        drawn = viz.attention_figure(causal(1, 3), tokens)
        for kind in viz.PICTURES:
            viz.save_figure(drawn, f"zh{kind}")
    assert viz.plain_label("天") == "U+5929", "stored pictures are the same everywhere"
    viz.save_figure(viz.attention_figure(causal(1, 3), tokens), "spelled.png")
    assert Path("zh.png").read_bytes() != Path("spelled.png").read_bytes()


def spelled(data: bytes) -> list[str]:
    """Labels of a text that is one byte a token."""
    backend = SimpleNamespace(piece=lambda i, previous: bytes([i]))
    token = lambda i: chr(i) if i < 128 else f"<{i:02X}>"  # noqa: E731
    return viz.token_labels(SimpleNamespace(backend=backend, token=token), data)


def test_the_token_that_ends_a_character_is_named_after_it(tiny):
    assert spelled("a你b".encode()) == ["a", "<E4>", "<BD>", "…你", "b"]
    assert spelled("😀".encode()) == ["<F0>", "<9F>", "<98>", "…😀"]
    assert spelled(b"\xe4\xbda\xbd\xe4") == ["<E4>", "<BD>", "a", "<BD>", "<E4>"]  # no character
    assert viz.token_labels(tiny.tokenizer, tiny.encode("a 你")) == [
        "a",
        "␣",
        "<E4>",
        "<BD>",
        "…你",
    ]
    pieces = [b", \xe4", b"\xbd\xa0\n\xe5", b"\xa5\xbd", b" \xe4", b"x"]
    backend = SimpleNamespace(piece=lambda i, previous: pieces[i])
    known = SimpleNamespace(backend=backend, token=lambda i: f"token {i}")
    assert viz.token_labels(known, range(5)) == [",␣…", "…你⏎…", "…好", "token 3", "token 4"]


def test_titles():
    assert viz.plain_title("The cat ") == "The cat "
    assert viz.plain_title("a\tb\n$") == r"aU+0009b⏎\$"
    assert viz.plain_title("x" * 30 + "y" * 50) == "…" + "y" * 50
    with viz.machine_fonts(["你"]):
        title = viz.plain_title("你" * 40)
    assert title in ("…" + "你" * 25, "…" + "U+4F60" * 8)


# ---- files


def test_a_figure_as_png_svg_and_pdf():
    probs = causal(2, 4)
    for name, begins in (("a.png", b"\x89PNG"), ("a.SVG", b"<?xml"), ("a.pdf", b"%PDF")):
        path = viz.save_figure(viz.attention_figure(probs, words(4)), name)
        first = path.read_bytes()
        assert first.startswith(begins)
        viz.save_figure(viz.attention_figure(probs, words(4)), name)
        assert path.read_bytes() == first, "the same figure, another file"
    inches = viz.attention_figure(probs, words(4)).get_size_inches()
    assert Image.open("a.png").size == tuple(int(x * viz.DPI) for x in inches)


def test_names_of_files(here):
    assert viz.output_file(None, "x").name == "x.png"
    (here / "x.png").touch()
    (here / "x-2.png").touch()
    assert viz.output_file(None, "x").name == "x-3.png"
    (here / "folder.png").mkdir()
    for path, error, message in (
        ("x.jpg", ValueError, r"must end in \.png, \.svg or \.pdf"),
        ("x", ValueError, "must end in"),
        ("no/x.png", FileNotFoundError, "no folder no"),
        ("folder.png", IsADirectoryError, "is a folder"),
    ):
        with pytest.raises(error, match=message):
            viz.output_file(path, "x")
    with pytest.raises(ValueError, match=r"must end in \.csv or \.json"):
        viz.save_rows("x.txt", ["a"], [])


def test_rows_as_csv_and_json():
    rows = [(1, "天, 气", 0.25), (2, 'a "quoted"\nline', 1e-7)]
    viz.save_rows("r.csv", ["n", "token", "p"], rows)
    with open("r.csv", encoding="utf-8", newline="") as file:
        read = list(csv.reader(file))
    assert read == [["n", "token", "p"], *([str(n), t, str(p)] for n, t, p in rows)]
    viz.save_rows("r.json", ["n", "token", "p"], rows, model="m", ids=[1, 2])
    page = json.loads(Path("r.json").read_text("utf8"))
    assert page == {
        "model": "m",
        "ids": [1, 2],
        "rows": [{"n": n, "token": t, "p": p} for n, t, p in rows],
    }


def test_tables_line_up_in_a_terminal():
    lines = viz.text_table(["id", "token", "p"], [(7, "天气", 0.5), (12, "abcd", 0.25)]).split("\n")
    assert lines == ["id  token     p", " 7  天气    0.5", "12  abcd   0.25"]


# ---- llm-engine attention


def test_attention_prints_saves_and_writes_the_numbers(folder, tiny, here):
    run = call("attention", folder, "abcd", "--layer", 1, "--heads", "0,2-3", "--numbers", "n.csv")
    assert run.exit_code == 0
    ids = tiny.encode("abcd")
    with tiny.trace(keep=("layers.1.attn.probs",)) as trace:
        tiny.step(ids)
    probs = trace.tensors["layers.1.attn.probs"][0]
    assert run.stdout.split("\n")[0].split() == (
        [
            "head",
            "first",
            "itself",
            "before",
            "spread",
            "over",
            "the",
            "last",
            "token",
            "looks",
            "at",
        ]
    )
    assert [line.split()[0] for line in run.stdout.splitlines()[1:]] == ["0", "2", "3"]
    assert run.stderr.splitlines()[-2:] == ["wrote n.csv", "wrote attention-layer-1.png"]
    picture = Image.open(here / "attention-layer-1.png")
    expected = viz.attention_figure(
        probs, list("abcd"), heads=[0, 2, 3], title=f"{folder}, layer 1"
    )
    same = Image.open(io.BytesIO(viz.figure_png(expected)))
    assert np.array_equal(np.asarray(picture), np.asarray(same))
    with open("n.csv", encoding="utf-8", newline="") as file:
        read = list(csv.DictReader(file))
    assert len(read) == 3 * (4 * 5 // 2)
    for row in read:
        head, i, j = int(row["head"]), int(row["query"]), int(row["key"])
        assert (row["query token"], row["key token"]) == ("abcd"[i], "abcd"[j])
        assert float(row["probability"]) == pytest.approx(float(probs[head, i, j]), rel=1e-5)


def test_a_file_is_never_lost_without_a_word(folder, here):
    for name in ("attention-layer-0.png", "attention-layer-0-2.png"):
        assert f"wrote {name}" in call("attention", folder, "ab").stderr
        assert (here / name).exists()
    (here / "mine.svg").write_text("old")
    run = call("attention", folder, "ab", "-o", "mine.svg", "--numbers", "mine.json")
    assert "replaced mine.svg" in run.stderr and "wrote mine.json" in run.stderr
    assert (here / "mine.svg").read_text().startswith("<?xml")
    page = json.loads((here / "mine.json").read_text("utf8"))
    assert (page["layer"], page["text"], page["ids"], len(page["rows"])) == (0, "ab", [97, 98], 12)


def test_the_last_layer_and_a_chat(folder, tiny):
    plain = ["--no-picture", "--numbers", "n.json"]
    tables = [call("attention", folder, "ab", "-l", i, *plain).stdout for i in (1, -1, 0)]
    assert tables[0] == tables[1] != tables[2]
    assert "wrote attention-layer-1.png" in call("attention", folder, "ab", "-l", "-1").stderr
    assert call("attention", folder, "ab", "--chat", *plain).exit_code == 0
    asked = [{"role": "user", "content": "ab"}]
    page = json.loads(Path("n.json").read_text("utf8"))
    assert page["ids"] == tiny.tokenizer.apply_chat_template(asked)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layer", "2"], "has the layers 0 to 1"),
        (["--layer", "-3"], "has the layers 0 to 1"),
        (["--heads", "4"], "has the heads 0 to 3"),
        (["--heads", "a"], "should look like 0,3-5"),
        (["--heads", "1-"], "should look like 0,3-5"),
        (["--heads", "3-1"], "has the heads 0 to 3"),
    ],
)
def test_what_a_model_does_not_have(folder, here, options, message):
    run = call("attention", folder, "ab", *options)
    assert run.exit_code == 1 and message in run.stderr and run.stdout == ""
    assert list(here.iterdir()) == []


def test_too_long_for_a_picture(folder, monkeypatch):
    monkeypatch.setattr(cli, "LONGEST", 3)
    run = call("attention", folder, "abcd")
    assert run.exit_code == 1 and "at most 3" in run.stderr


# ---- llm-engine logits, shapes


def test_logits(folder, tiny, here):
    run = call("logits", folder, "abc", "--top", 3, "--numbers", "n.json", "-o", "l.pdf")
    assert run.exit_code == 0 and (here / "l.pdf").read_bytes().startswith(b"%PDF")
    logits = tiny.step(tiny.encode("abc"))
    best = logits.topk(3)
    page = json.loads((here / "n.json").read_text("utf8"))
    assert [row["id"] for row in page["rows"]] == best.indices.tolist()
    assert [row["logit"] for row in page["rows"]] == pytest.approx(best.values.tolist(), rel=1e-5)
    probs = logits.softmax(-1)[best.indices].tolist()
    assert [row["probability"] for row in page["rows"]] == pytest.approx(probs, rel=1e-5)
    lines = run.stdout.splitlines()
    assert len(lines) == 4 and lines[0].split() == ["id", "token", "logit", "probability"]
    assert lines[1].split()[:2] == ["1", str(int(best.indices[0]))]
    assert call("logits", folder, "abc", "--top", "0").exit_code == 2


def test_every_token_may_be_asked_for(folder, here, monkeypatch):
    monkeypatch.setattr(viz, "DPI", 20)
    run = call("logits", folder, "abc", "--top", 1000)
    assert run.exit_code == 0 and len(run.stdout.splitlines()) == 1 + 260
    assert Image.open(here / "logits.png").size[1] < 20 * viz.DPI  # the picture has the first 40


def test_shapes(folder, here):
    run = call("shapes", folder, "-p", "abc", "--numbers", "s.csv")
    assert run.exit_code == 0 and "wrote shapes.png" in run.stderr and "layers.0" in run.stdout
    with open("s.csv", encoding="utf-8", newline="") as file:
        read = {row["module"]: row for row in csv.DictReader(file)}
    assert (read["layers.0.attn.probs"]["axes"], read["layers.0.attn.probs"]["shape"]) == (
        "B N T S",
        "[1, 4, 3, 3]",
    )
    assert "layers.1" not in read and float(read["layers.0.attn.probs"]["max"]) == 1
    small = Image.open(here / "shapes.png").size[1]
    assert call("shapes", folder, "--all").exit_code == 0
    assert Image.open(here / "shapes-2.png").size[1] > 1.5 * small


# ---- all three


def test_files_are_checked_before_the_model_is_loaded(monkeypatch, here):
    def never(*args, **options):
        raise AssertionError("loaded")

    monkeypatch.setattr(Engine, "from_pretrained", never)
    for command in (["attention", "x"], ["logits", "x"], ["shapes"]):
        for options in (["-o", "x.gif"], ["-o", "no/x.png"], ["--numbers", "x.xls"]):
            run = call(*command, *options)
            assert run.exit_code == 1 and options[1] in run.stderr and "loaded" not in run.stderr


def test_without_matplotlib(folder, monkeypatch, here):
    def missing():
        raise ImportError("drawing needs matplotlib: pip install 'llm-engine[book]'")

    monkeypatch.setattr(viz, "_matplotlib", missing)
    for command in (["attention", folder, "ab"], ["logits", folder, "ab"], ["shapes", folder]):
        run = call(*command, "-o", "x.png")
        assert run.exit_code == 1 and "pip install" in run.stderr and "--no-picture" in run.stderr
        alone = call(*command, "--no-picture")
        assert alone.exit_code == 0 and "matplotlib" not in alone.stderr and alone.stdout
    run = call("shapes", folder)  # the table is what it is for
    assert run.exit_code == 0 and "no picture: drawing needs matplotlib" in run.stderr
    assert list(here.iterdir()) == []


def test_the_model_may_be_left_out(monkeypatch):
    seen = []

    def load(model, **options):
        seen.append(model)
        raise ValueError("enough")

    monkeypatch.setattr(Engine, "from_pretrained", load)
    call("logits", "The capital of France is")
    call("attention", "smollm2-135m-hub", "text")
    call("attention", "owner/name", "text")
    call("logits", "./folder", "text")
    assert seen == ["smollm2-135m", "smollm2-135m-hub", "owner/name", "./folder"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["The", "capital", "of"], "needs quotes"),
        (["The", "capital"], "needs quotes"),
        (["smollm2-135m"], "is a model"),
        ([], "Missing argument"),
    ],
)
def test_texts_need_quotes(arguments, message):
    for command in ("attention", "logits"):
        run = call(command, *arguments, env={"COLUMNS": "200"})
        assert run.exit_code == 2 and message in run.stderr


def test_the_model_may_be_named_as_in_generate(folder, monkeypatch):
    def load(model, **options):
        raise ValueError(f"loading {model}")

    monkeypatch.setattr(Engine, "from_pretrained", load)
    for command in (["attention", "smollm2-135m"], ["logits", "a/b. c"], ["shapes"]):
        for option in ("-m", "--model"):
            assert f"loading {folder}\n" in call(*command, option, folder).stderr
    for command in (["attention", "x/y", "text"], ["logits", "x/y", "text"], ["shapes", "x/y"]):
        run = call(*command, "-m", folder, env={"COLUMNS": "200"})
        assert run.exit_code == 2 and "named twice" in run.stderr


def test_a_text_longer_than_the_name_of_a_file(folder, monkeypatch):
    text = "the cat sat " * 10  # 120 tokens here
    long = "the cat sat " * 200
    plain = ["--no-picture", "--device", "cpu"]
    for command in ("attention", "logits"):
        assert call(command, folder, text, *plain).exit_code == 0
        run = call(command, long, text, env={"COLUMNS": "200"})
        assert run.exit_code == 2 and "needs quotes" in run.stderr and len(run.stderr) < 1500
        run = call(command, "a." + long, text, env={"COLUMNS": "200"})
        assert run.exit_code == 2 and "no model" in run.stderr and len(run.stderr) < 1500
    run = call("shapes", long, env={"COLUMNS": "200"})
    assert run.exit_code == 2 and "no model, but a text" in run.stderr and len(run.stderr) < 1500
    seen = []
    monkeypatch.setattr(Engine, "from_pretrained", lambda model, **options: seen.append(model))
    for command in ("attention", "logits"):
        call(command, long)
    assert seen == ["smollm2-135m"] * 2


def test_titles_show_the_text_itself(folder, monkeypatch, here):
    seen = []
    for name in ("logits_figure", "shapes_figure", "attention_figure"):
        draw = getattr(viz, name)

        def drawn(*arguments, draw=draw, **options):
            figure = draw(*arguments, **options)
            seen.append(figure.axes[0].get_title())
            return figure

        monkeypatch.setattr(viz, name, drawn)
    monkeypatch.setattr(viz, "save_figure", lambda figure, path: None)
    monkeypatch.setattr(viz, "plain_label", lambda text: text)  # a font that has everything
    text = "a 你好"
    call("logits", folder, text, "--top", 2)
    call("shapes", folder, "-p", text)
    call("logits", folder, text, "--top", 2, "--chat")
    assert seen == [
        f"{folder}: a 你好 → ?",
        f"{folder}: a 你好",
        f"{folder}, a message: a 你好 → ?",
    ]
    run = call("attention", folder, text, "--no-picture", "--numbers", "n.csv")
    assert run.exit_code == 0 and "on average" in run.stderr
    with open("n.csv", encoding="utf-8", newline="") as file:
        assert "…好" in {row["key token"] for row in csv.DictReader(file)}


def test_a_text_from_stdin(folder):
    numbers = ["--no-picture", "--numbers", "n.json"]
    assert call("logits", folder, "-", *numbers, input="xyz\n").exit_code == 0
    assert json.loads(Path("n.json").read_text("utf8"))["text"] == "xyz\n"
