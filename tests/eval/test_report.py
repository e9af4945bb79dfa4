"""Charts, frame sheets and the page: what they say, read back from the files."""

import colorsys
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from eval import pages, plots, report, scoring


def _records(lengths, depths, rounds, right):
    return [
        {
            "case": "c",
            "kind": kind,
            "length": length,
            "depth": depth,
            "answer": "482",
            "output": "482" if right(length, depth) else "<b>no</b>",
            "num_tokens": length,
            "real_depth": depth,
        }
        for length in lengths
        for depth in depths
        for _ in range(rounds)
        for kind in ("single", "distractors")
    ] + [
        {
            "case": "c",
            "kind": kind,
            "length": 64,
            "depth": None,
            "answer": "482",
            "output": "111",
            "num_tokens": 64,
            "real_depth": None,
        }
        for kind in ("no_needle", "blind")
    ]


GOOD = scoring.summarize(_records([512, 4096], [0.0, 1.0], 3, lambda length, depth: True))
HALF = scoring.summarize(_records([512, 4096], [0.0, 1.0], 3, lambda length, depth: depth == 0.0 or length == 512))
CURVES = [
    plots.StageCurve(
        "warm-up", 512, 1e4, [0, 1, 2, 3], [4.0, 3.0, 2.5, 2.0], [3.0, 2.0, 1.5, 1.0], [5.0, 4.0, 3.5, 3.0]
    ),
    plots.StageCurve("long", 4096, 1e6, [0, 1], [2.2, float("nan")]),
]


def _texts(path):
    """The drawn words of an SVG are glyph paths; matplotlib leaves each string beside them as a comment."""
    return [text.strip() for text in re.findall(r"<!--(.*?)-->", path.read_text())]


def test_heatmap_says_every_cell(tmp_path):
    picture = plots.heatmap(tmp_path / "h", HALF, title="Needle in video")
    assert {p.name for p in tmp_path.iterdir()} == {"h.png", "h.svg", "h-dark.svg"}
    texts = _texts(picture.vector)
    assert texts.count("3/3") == 3
    assert texts.count("0/3") == 1
    assert "6/6" in texts  # all depths at 512
    assert {"512", "4K", "0%", "75% of 12 answers right"} <= set(texts)
    assert Image.open(picture.path).size[0] > 600


def test_heatmap_of_one_cell_and_of_a_missing_cell(tmp_path):
    one = {"cells": [GOOD["cells"][0]]}
    plots.heatmap(tmp_path / "one", one, title="t")
    ragged = plots.heatmap(tmp_path / "ragged", {"cells": HALF["cells"][:3]}, title="t")
    assert "–" in _texts(ragged.vector)
    with pytest.raises(ValueError, match="nothing to draw"):
        plots.heatmap(tmp_path / "none", {"cells": []}, title="t")


def test_heatmap_is_reproducible(tmp_path):
    first = plots.heatmap(tmp_path / "a", HALF, title="t").path.read_bytes()
    assert plots.heatmap(tmp_path / "b", HALF, title="t").path.read_bytes() == first


def _deuteranope(rgb):
    """Viénot, Brettel and Mollon (1999): how one without green cones sees a colour (linear RGB in, linear RGB out)."""
    to_lms = np.array([[17.8824, 43.5161, 4.11935], [3.45565, 27.1554, 3.86714], [0.0299566, 0.184309, 1.46709]])
    blind = np.array([[1, 0, 0], [0.494207, 0, 1.24827], [0, 0, 1]])
    return np.linalg.inv(to_lms) @ blind @ to_lms @ rgb


def test_accuracy_colours_stay_apart_for_the_colour_blind():
    low, middle, high = (_deuteranope(np.array(plots.ACCURACY(x)[:3]) ** 2.2) for x in (0.0, 0.5, 1.0))
    hues = [colorsys.rgb_to_hsv(*np.clip(c, 0, 1))[0] for c in (low, high)]
    assert abs(hues[0] - hues[1]) > 0.3
    assert np.linalg.norm(low - high) > 0.1
    assert min(np.linalg.norm(low - middle), np.linalg.norm(high - middle)) > 0.3


def test_loss_curves_name_every_stage(tmp_path):
    picture = plots.loss_curves(tmp_path / "loss", CURVES)
    assert {"warm-up", "512 tokens", "θ 10K", "long", "4K tokens", "θ 1M", "text", "vision"} <= set(
        _texts(picture.vector)
    )
    with pytest.raises(ValueError, match="no stage has a loss"):
        plots.loss_curves(tmp_path / "none", [])


def test_smooth_keeps_constants_and_does_not_lag():
    np.testing.assert_allclose(plots.smooth([2.0] * 50, 5), 2.0, rtol=1e-12)
    line = plots.smooth(np.arange(101.0), 5)
    assert line[50] == pytest.approx(50, abs=1e-3)
    np.testing.assert_array_equal(plots.smooth([3.0, 1.0], 0), [3.0, 1.0])


def test_spread_labels_neither_overlap_nor_leave():
    moved = plots.spread([1, 9.0, 9.5], [2, 2, 2], 0, 10)
    assert moved == [1, 7, 9]
    assert plots.spread([5], [2], 0, 10) == [5]


@pytest.mark.parametrize(
    ("value", "text"),
    [(512, "512"), (4096, "4K"), (2**20, "1M"), (1e6, "1M"), (25e6, "25M"), (10000, "10K"), (300, "300")],
)
def test_short_count(value, text):
    assert plots.short_count(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(1, "100%"), (0.999, "99.9%"), (0.9999, "99.9%"), (0.5, "50%"), (0.001, "<1%"), (0, "0%")]
)
def test_percent_says_all_or_none_only_when_true(value, text):
    assert plots.percent(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(8.24, "8.2 s"), (59.96, "1 min 00 s"), (65, "1 min 05 s"), (11520, "3 h 12 min")]
)
def test_duration(seconds, text):
    assert report.duration(seconds) == text


def test_chosen_frames_hold_the_needle_and_its_neighbours():
    assert pages.chosen_frames(5, [2], 8) == [0, 1, 2, 3, 4]
    chosen = pages.chosen_frames(1000, [517], 20)
    assert len(chosen) <= 20
    assert {0, 516, 517, 518, 999} <= set(chosen)
    assert chosen == sorted(set(chosen))
    assert {0, 1} <= set(pages.chosen_frames(1000, [0], 20))
    assert pages.chosen_frames(1000, list(range(0, 100, 10)), 4) == sorted(
        {n for i in range(0, 100, 10) for n in (i - 1, i, i + 1) if n >= 0}
    )


def test_contact_sheet_frames_the_needle(tmp_path):
    frames = np.full((30, 16, 16, 3), 90, np.uint8)
    frames[11] = (200, 30, 30)
    picture = pages.contact_sheet(tmp_path / "sheet.png", frames, {11: "Needle 482"}, columns=8)
    pixels = np.asarray(Image.open(picture.path).convert("RGB")).astype(int)
    red = np.argwhere((np.abs(pixels - (200, 30, 30)) < 4).all(-1))
    top, left = red.min(0)
    bottom, right = red.max(0)
    assert bottom - top == right - left == 111  # one frame, whole
    # Frame 11 stands fourth in the second row, framed in the mark's colour on all sides.
    assert left == 28 + 3 * (112 + 12)
    for y, x in ((top - 3, left + 50), (bottom + 3, left + 50), (top + 50, left - 3), (top + 50, right + 3)):
        assert tuple(pixels[y, x]) == (255, 176, 46)
    assert picture.caption.startswith("all 30 frames")


def test_frame_sheets_refuse_what_they_cannot_show(tmp_path):
    frames = np.zeros((4, 8, 8, 3), np.uint8)
    with pytest.raises(ValueError, match="needle frame 9 lies outside the video's 4 frames"):
        pages.contact_sheet(tmp_path / "a.png", frames, {9: "x"})
    with pytest.raises(ValueError, match="shapes must be equal"):
        pages.reconstructions(tmp_path / "a.png", frames, frames[:2])
    with pytest.raises(ValueError, match="no generated frames"):
        pages.generated(tmp_path / "a.png", [])
    with pytest.raises(ValueError, match="frames are uint8"):
        pages.generated(tmp_path / "a.png", [("p", frames.astype(float))])


class _Checker(HTMLParser):
    """Collects the words, every address, and tags left open."""

    def __init__(self):
        super().__init__()
        self.words, self.addresses, self.stack = [], [], []

    def handle_starttag(self, tag, attrs):
        self.addresses += [value for name, value in attrs if name in ("src", "srcset", "href")]
        if tag not in ("meta", "img", "source"):
            self.stack.append(tag)

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        if self.stack and self.stack[-1] != "style" and data.strip():
            self.words.append(data.strip())


REPORT = {
    "stages": [
        {
            "name": "warm-up",
            "seq_len": 512,
            "steps": 4,
            "tokens": 8192,
            "loss_first": 4.0,
            "loss_last": 2.0,
            "mesh": {"dp": 1, "fsdp": 2, "sp": 4},
            "layout": "striped",
            "strategy": "ring",
        }
    ],
    "needle_text": GOOD,
    "needle_video": HALF,
    "packing_efficiency": 0.98,
    "vqgan": {"psnr_db": 24.31, "codes_used": 431},
    "wall_seconds": {"training": 65.0, "needles": 5.0},
    "peak_rss_mb": 2048.0,
    "versions": {"jax": "0.12"},
}


def test_page_is_whole_and_needs_nothing_else(tmp_path):
    sheet = pages.contact_sheet(tmp_path / "sheet.png", np.zeros((4, 8, 8, 3), np.uint8), {1: "Needle 482"})
    answers = [{"source": "clip.mp4", "question": "What is <this>?", "answer": "a & b"}]
    path = report.write(tmp_path, {**REPORT, "answers": answers}, title="Demo", curves=CURVES, pictures=[sheet])
    page = _Checker()
    page.feed(path.read_text(encoding="utf-8"))
    assert page.stack == []
    # The loss chart and two heatmaps in light and dark, and the sheet.
    assert len(page.addresses) == 7
    assert all(address.startswith("data:image/") for address in page.addresses)
    assert "url(" not in path.read_text()
    assert "http" not in re.sub(r"data:image/[^\"]*", "", path.read_text())
    words = page.words
    for expected in (
        "100%",
        "50%",
        "24.3 dB",
        "2.0 GB",
        "fsdp 2 × sp 4",
        "4.000 → 2.000",
        "1 min 10 s",
        "What is <this>?",
    ):
        assert expected in words, expected
    assert words.index("Needle in text, 4K tokens") < words.index("Training")  # headline numbers come first
    assert "<b>no</b>" in words  # a model's output is shown, not interpreted
    assert json.loads((tmp_path / "report.json").read_text())["packing_efficiency"] == 0.98


def test_page_of_a_run_that_stopped_early(tmp_path):
    path = report.write(tmp_path, {"stages": REPORT["stages"]})
    page = _Checker()
    page.feed(path.read_text(encoding="utf-8"))
    assert page.stack == []
    assert "warm-up" in page.words
    assert "Needles" not in page.words
    assert report.write(tmp_path, {}).exists()
