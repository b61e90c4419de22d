"""One file, self-contained, escaped, accessible; the same figures on paper."""

from __future__ import annotations

import dataclasses
import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from itertools import pairwise

import pytest
import torch

from erlangen.extras import require
from erlangen.report import build, charts, read, render, save, static
from erlangen.report.interactive import figure, text
from erlangen.report.page import _asset, embedded
from tests.report.conftest import FOLDER


class Elements(HTMLParser):
    """Every element with its attributes, and the text of scripts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict]] = []
        self.text: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text.append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.found if name == tag]


@pytest.fixture(scope="module")
def page(trained):
    return render(build([read(trained)]))


@pytest.fixture(scope="module")
def hostile_page(hostile):
    return render(build([read(hostile)]))


def test_nothing_is_fetched(page):
    elements = Elements(page)
    for tag, attributes in elements.found:
        for name in ("src", "href", "action", "data", "poster"):
            value = attributes.get(name)
            assert value is None or value.startswith(("data:image/png", "#")), (tag, value)
    [policy] = [m["content"] for m in elements.all("meta") if m.get("http-equiv")]
    assert "default-src 'none'" in policy
    assert "unsafe-eval" not in policy
    assert "'unsafe-inline'" not in policy.split("script-src")[1].split(";")[0]
    assert page.count("plotly.js v") == 1


def test_it_can_be_read_without_eyes(page):
    elements = Elements(page)
    for landmark in ("header", "nav", "main", "footer", "h1"):
        assert len(elements.all(landmark)) == 1, landmark
    assert elements.all("html") == [{"lang": "en"}]
    assert all(image.get("alt") for image in elements.all("img"))
    plots = [d for d in elements.all("div") if "data-figure" in d]
    assert len(plots) >= 6
    assert all(d["role"] == "img" and d["aria-label"] for d in plots)
    assert len(elements.all("figcaption")) == len(elements.all("figure"))
    ids = [a["id"] for _, a in elements.found if "id" in a]
    assert len(ids) == len(set(ids))
    targets = [a["href"][1:] for a in elements.all("a")]
    assert set(targets) <= set(ids)


def test_users_text_is_only_text(hostile_page, hostile):
    elements = Elements(hostile_page)
    assert len(elements.all("script")) == 3  # the figures' data, plotly, ours
    assert not any(name.startswith("on") for _, attributes in elements.found for name in attributes)
    assert not [a for a in elements.all("img") if a.get("src") == "x"]
    assert "window.hacked = 1</script>" not in hostile_page
    shown = " ".join(elements.text)
    assert FOLDER in shown
    data = json.loads(re.search(r'id="figures">(.*?)</script>', hostile_page, re.S).group(1))
    ticks = data["run1-confusion"]["layout"]["xaxis"]["ticktext"]
    assert all("<" not in tick and "&lt;" in tick for tick in ticks)


def test_markup_in_plotly_texts_is_escaped_and_places_stay_apart(hostile):
    assert text("<b>a</b>\n&") == "&lt;b&gt;a&lt;/b&gt; &amp;"
    for chart in build([read(hostile)]).figures().values():
        if hasattr(chart, "pictures"):
            continue
        spec = json.dumps(figure(chart), allow_nan=False)
        assert "<script" not in spec
        assert "<img" not in spec


def test_embedded_json_cannot_end_its_element():
    nasty = {"a": "</script><!--\u2028&"}
    assert not set("<>&\u2028") & set(embedded(nasty))
    assert json.loads(embedded(nasty)) == nasty
    with pytest.raises(ValueError, match="JSON"):
        embedded(float("nan"))


def test_captions_speak_of_what_is_drawn(trained):
    run = read(trained)
    drawn = charts.training_curves(run)
    assert "right axis" in drawn.caption
    bare = [{k: v for k, v in row.items() if k != "test_accuracy"} for row in run.history]
    drawn = charts.training_curves(dataclasses.replace(run, history=tuple(bare)))
    assert "no accuracy to show" in drawn.caption
    assert "right axis" not in drawn.caption
    assert drawn.right is None
    assert [s.name for s in drawn.series] == ["ε spent"]


def test_images_are_called_public_by_their_owner_alone(trained, page):
    """An image of the test set may be a training image, too: the report cannot know."""
    caption = charts.predictions(read(trained)).caption
    assert "as its owner declared it; no other image is in this report" in caption
    assert "no private image" not in page
    assert "whoever is in the test set" in page


def test_non_private_curves_only_where_they_were_on_and_marked(trained, page):
    assert "NOT PRIVATE" not in "".join(Elements(page).text).split("Erlangen", 1)[1].split("window", 1)[0]
    run = read(trained)
    history = tuple({**row, "non_private": {"train_loss": 2.0}} for row in run.history)
    off = dataclasses.replace(run, history=history)
    assert not any(part.non_private for part in build([off]).pages[0].parts)
    on = dataclasses.replace(off, summary={**run.summary, "non_private": ["train_loss"]})
    [marked] = [part for part in build([on]).pages[0].parts if part.non_private]
    assert marked.figures[0][1].title == "Training loss (not private)"
    assert "NOT PRIVATE: computed from private records" in render(build([on]))


@pytest.mark.parametrize("form", ["svg", "pdf"])
def test_the_same_figures_on_paper(hostile, tmp_path, form):
    figures = build([read(hostile)]).figures()
    paths = save(figures, tmp_path, form)
    assert {p.stem for p in paths} == set(figures)
    assert all(re.fullmatch(r"[a-z0-9-]+\.(svg|pdf)", p.name) for p in paths)
    if form == "pdf":
        assert all(p.read_bytes().startswith(b"%PDF") for p in paths)
        return
    for path in paths:
        ET.parse(path)  # well formed, whatever users called their classes
    words = "".join(ET.parse(tmp_path / "run1-confusion.svg").getroot().itertext())
    assert "0</script>" in words
    assert "$x_{" in words


CLOTHES = ("T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")


def dressed(trained, names=CLOTHES):
    """Its predictions with names of classes that are words."""
    run = read(trained)
    data = {**run.summary["data"], "class_names": list(names)}
    return charts.predictions(dataclasses.replace(run, summary={**run.summary, "data": data}))


def test_captions_on_paper_tell_both_classes(trained, tmp_path):
    gallery = dressed(trained)
    wrong = [p for p in gallery.pictures if p.mark == "bad"]
    assert wrong
    save({"predictions": gallery}, tmp_path, "svg")
    words = [t.strip() for t in ET.parse(tmp_path / "predictions.svg").getroot().itertext()]
    assert not any("…" in word for word in words)
    for picture in wrong:
        said, truth = re.search(r": (.*), predicted (.*) with", picture.alt).group(2, 1)
        assert picture.label.startswith(f"{said} ")
        assert picture.second == f"is {truth}"
        assert {picture.label, picture.second} <= set(words)
        assert f"{picture.label}, is {truth}" in [row[0] for row in gallery.table()[1]]
    long = dressed(trained, [f"a name of {k} words and more than a picture is wide {k}" for k in range(10)])
    for picture in long.pictures:
        first, *second = static._lines(picture)
        assert len(first) <= static.CAPTION
        assert first.startswith("a name of")
        assert first.endswith("%")
        assert all(line.startswith("is a") and line[-1] == picture.second[-1] for line in second)


def test_captions_on_paper_do_not_run_into_each_other(trained):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    for names in (CLOTHES, ["a common murre, or guillemot, of Newfoundland"] * 10):
        paper = Figure(figsize=static._size(gallery := dressed(trained, names)), layout="constrained")
        static._gallery(paper, gallery)
        FigureCanvasAgg(paper).draw()
        room = paper.bbox.width / 8
        widths = [axes.title.get_window_extent().width for axes in paper.axes if axes.get_title()]
        assert len(widths) == len(gallery.pictures)
        assert max(widths) <= room


@pytest.mark.parametrize("span", [(0.955, 0.982), (0.1, 0.9), (0.9987, 0.9991), (1.0, 1.0)])
def test_ticks_on_paper_differ_and_end_at_all(trained, tmp_path, span):
    run = read(trained)
    scores = [span[0] + (span[1] - span[0]) * k / (len(run.history) - 1) for k in range(len(run.history))]
    history = tuple({**row, "test_accuracy": score} for row, score in zip(run.history, scores))
    run = dataclasses.replace(run, history=history)
    save({"training": charts.training_curves(run), "spending": charts.spending(run)}, tmp_path, "svg")
    for name in ("training", "spending"):
        words = [t.strip() for t in ET.parse(tmp_path / f"{name}.svg").getroot().itertext()]
        ticks = [float(t.removesuffix("%")) for t in words if re.fullmatch(r"[\d.]+%", t)]
        assert len(ticks) == len(set(ticks)) > 2
        assert all(tick <= 100 for tick in ticks)
        steps = {round(b - a, 6) for a, b in pairwise(ticks)}
        assert len(steps) == 1, "each says where it stands"


def test_a_thousand_classes_are_cut_to_the_most_confused(trained):
    run = read(trained)
    rng = torch.Generator().manual_seed(0)
    labels = torch.arange(3000) % 1000
    logits = torch.nn.functional.one_hot(labels, 1000).float() * 9
    logits[:40] = torch.randn(40, 1000, generator=rng)
    logits[range(40), range(40)] = -9  # classes 0 to 39 are taken for others
    public = dataclasses.replace(
        run.public, logits=logits, labels=labels, images=run.public.images[:1], shown=torch.tensor([0])
    )
    chart = charts.confusion(dataclasses.replace(run, public=public))
    assert chart.values.shape == (60, 60)
    assert set(map(str, range(40))) <= set(chart.rows)
    assert "of 1000 classes" in chart.caption


def test_a_missing_package_is_named_with_its_cure():
    require("erlangen report", "report", "json")
    with pytest.raises(ImportError, match=r"needs no_such_package.*pip install 'erlangen\[report\]'"):
        require("erlangen report", "report", "json", "no_such_package")


# -- contrast ------------------------------------------------------------------------------------------------------


def luminance(colour: str) -> float:
    channels = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1])
def test_texts_and_lines_stand_out_in_light_and_in_dark(theme):
    colours = dict(re.findall(r"--([\w-]+): (#\w{6})", re.findall(r":root \{(.*?)\}", _asset("page.css"), re.S)[theme]))
    for name in ("ink", "quiet", "accent", "bad"):
        assert contrast(colours[name], colours["surface"]) >= 4.5, name
        assert contrast(colours[name], colours["page"]) >= 4.5, name
    for tone in ("good", "bad", "careful"):
        assert contrast(colours["ink"], colours[f"{tone}-back"]) >= 7
    assert contrast(colours["bad"], colours["bad-back"]) >= 4.5
    for k in range(8):
        assert contrast(colours[f"c{k}"], colours["surface"]) >= 3, k
