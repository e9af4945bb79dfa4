"""JSONL manifests: what they may say, and errors that name file, line and field."""

import json

import pytest

from data.manifest import read_manifest


def write(path, *records):
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records) + "\n", encoding="utf-8")
    return path


def test_spans_in_order_with_paths_beside_the_manifest(tmp_path):
    manifest = write(
        tmp_path / "m.jsonl",
        {
            "id": "x",
            "source": "web",
            "spans": [
                {"kind": "video", "path": "clips/a.mp4", "fps": 2, "start": 1.5, "num_frames": 8},
                {"kind": "text", "text": "Ein Hund läuft.", "learn": True},
            ],
        },
        "",
        {"spans": [{"kind": "text", "text": "b", "learn": True}]},
    )
    first, second = read_manifest(manifest)
    video, text = first.spans
    assert (first.id, first.source) == ("x", "web")
    assert (video.kind, video.learn, video.path) == ("video", False, str(tmp_path / "clips" / "a.mp4"))
    assert (video.fps, video.start, video.end, video.num_frames) == (2, 1.5, None, 8)
    assert (text.kind, text.learn, text.text) == ("text", True, "Ein Hund läuft.")
    assert (second.id, second.source) == ("m:3", str(manifest))


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"template": "document", "text": "a b"}, [("text", True, "a b")]),
        (
            {"template": "chat", "turns": [["q", "a"], ["r", "b"]], "system": ""},
            [
                ("text", False, "USER: q ASSISTANT:"), ("text", True, "a"),
                ("text", False, "USER: r ASSISTANT:"), ("text", True, "b"),
            ],
        ),
        (
            {"template": "text->video", "path": "/v.mp4", "caption": "a dog", "fps": 4},
            [
                ("text", False, "You are a helpful assistant. USER: Generate a video of a dog ASSISTANT:"),
                ("video", True, "/v.mp4"),
            ],
        ),
        (
            {"template": "image->text", "path": "/i.png", "caption": "a dog"},
            [
                ("text", False, "You are a helpful assistant. USER: Describe the image.\n"),
                ("image", False, "/i.png"), ("text", False, "ASSISTANT:"), ("text", True, "a dog"),
            ],
        ),
        (
            {"template": "video question", "path": "/v.mp4", "question": "why?", "answer": "so", "num_frames": 4},
            [
                ("text", False, "You are a helpful assistant. USER: why?\n"),
                ("video", False, "/v.mp4"), ("text", False, "ASSISTANT:"), ("text", True, "so"),
            ],
        ),
    ],
)  # fmt: skip
def test_templates(tmp_path, record, expected):
    (example,) = read_manifest(write(tmp_path / "m.jsonl", record))
    assert [(span.kind, span.learn, span.text or span.path) for span in example.spans] == expected


TEXT = {"kind": "text", "text": "a", "learn": True}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "must be an object in braces, not list"),
        ({"spam": []}, "spam: unknown field; did you mean spans"),
        ({"id": "x"}, "spans: missing"),
        ({"id": 3, "spans": [TEXT]}, "id: must be a string, not 3"),
        ({"spans": TEXT}, "spans: must be a list"),
        ({"spans": []}, "spans is empty"),
        ({"spans": ["a"]}, r"spans\[0\]: must be an object in braces"),
        ({"spans": [TEXT, {"kind": "text", "texd": "a"}]}, r"spans\[1\]: texd: unknown field; did you mean text"),
        ({"spans": [{"text": "a"}]}, r"spans\[0\]: kind: missing"),
        ({"spans": [{**TEXT, "learn": 1}]}, r"spans\[0\]: learn: must be true or false, not 1"),
        ({"spans": [{**TEXT, "kind": "sound"}]}, r"spans\[0\]: kind is 'sound'"),
        ({"spans": [{"kind": "video", "path": "a", "fps": "2"}]}, r"spans\[0\]: fps: must be a number, not '2'"),
        ({"spans": [{"kind": "video", "path": "a", "num_frames": 2.5}]}, "num_frames: must be a whole number"),
        ({"spans": [{"kind": "text", "text": "a"}]}, "nothing would be learned"),
        ({"template": "film"}, "template: 'film' is not one of document, chat"),
        ({"template": "document"}, "text: missing"),
        ({"template": "document", "text": "a", "path": "b"}, "path: given beside text"),
        ({"template": "book", "text": "a"}, "book examples are made when a corpus is built"),
        ({"template": []}, "template: the list is empty"),
        ({"template": "image->text", "path": "a", "caption": "b", "fps": 1}, "fps: unknown field"),
        ({"template": "chat", "turns": [["a", "b"], ["c"]]}, r"turns\[1\]: must be \[question, answer\]"),
        ({"template": "chat", "turns": []}, "turns: spans is empty"),
    ],
)
def test_errors_name_file_line_and_field(tmp_path, record, message):
    manifest = write(tmp_path / "m.jsonl", {"spans": [TEXT]}, record)
    with pytest.raises(ValueError, match=rf"m\.jsonl line 2.*{message}") as caught:
        list(read_manifest(manifest))
    assert "\n" not in str(caught.value)


def test_missing_empty_and_odd_files_are_named(tmp_path):
    for content, message in [(None, "cannot be read"), (b"\n \n", "is empty"), (b"\xff", "not UTF-8")]:
        if content is not None:
            (tmp_path / "m.jsonl").write_bytes(content)
        with pytest.raises(ValueError, match=rf"m\.jsonl.*{message}"):
            list(read_manifest(tmp_path / "m.jsonl"))


def test_lines_are_read_as_they_are_asked_for(tmp_path):
    examples = read_manifest(write(tmp_path / "m.jsonl", {"spans": [TEXT]}, "{"))
    assert next(examples).spans[0].text == "a"
