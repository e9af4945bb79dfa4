"""Sources: folders with captions, texts, manifests, JSONL and parquet rows, and what they say when they are wrong."""

import io
import json

import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from data.examples import untokenize
from data.manifest import make_examples
from data.prepare import Encoder, Limits, Preparer, Worker, prepared
from data.sources import open_source
from data.text import train_tokenizer
from data.vocabulary import Vocabulary


def png(path=None, level=40):
    target = io.BytesIO() if path is None else path
    Image.fromarray(np.full((8, 8, 3), level, np.uint8)).save(target, format="PNG")
    return target.getvalue() if path is None else None


def lines_of(source):
    return [record.line for record in source.records(0)]


def write_rows(path, rows):
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


BOTH = ["video->text", "text->video"]


def make_folder(tmp_path):
    (tmp_path / "deep").mkdir()
    for name in ("b.mp4", "deep/a.MOV", "c.webm"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / ".hidden.mp4").write_bytes(b"x")
    png(tmp_path / "d.png")
    return tmp_path


def test_a_folder_with_captions_beside_its_files(tmp_path):
    folder = make_folder(tmp_path)
    (folder / "b.txt").write_text("A dog\n runs.\n")
    (folder / "deep" / "a.json").write_text('{"fps": 3, "caption": "A cat sits."}')
    (folder / "d.txt").write_text("A grey square.")
    source = open_source(folder)
    assert (source.total, source.has_media, source.without_caption) == (4, True, 1)
    assert lines_of(source) == [
        {"path": "b.mp4", "caption": "A dog runs.", "template": BOTH},
        {"path": "c.webm", "template": "video"},
        {"path": "d.png", "caption": "A grey square.", "template": ["image->text", "text->image"]},
        {"path": "deep/a.MOV", "caption": "A cat sits.", "template": BOTH},
    ]
    assert [record.line["path"] for record in source.records(2)] == ["d.png", "deep/a.MOV"]
    made = [example for record in source.records(0) for example in make_examples(record)]
    assert len(made) == 7
    assert made[0].spans[1].path == str(folder / "b.mp4")
    assert [made[2].spans[0].learn, len(made[2].spans)] == [True, 1]
    one = open_source(folder, templates=["video->text"])
    assert lines_of(one)[0]["template"] == "video->text"
    assert one.fingerprint != source.fingerprint
    (folder / "d.txt").write_text("Something else.")
    assert open_source(folder).fingerprint != source.fingerprint


@pytest.mark.parametrize("name", ["captions.csv", "metadata.jsonl"])
def test_a_folder_with_a_list_of_captions(tmp_path, name):
    folder = make_folder(tmp_path)
    rows = [("b.mp4", 'A dog, "Rex".'), ("deep/a.MOV", "A cat.")]
    if name.endswith("csv"):
        text = 'file_name,text\nb.mp4,"A dog, ""Rex""."\ndeep/a.MOV,A cat.\n'
    else:
        text = "".join(json.dumps({"file_name": file, "text": caption}) + "\n" for file, caption in rows)
    (folder / name).write_text(text)
    captions = [(line["path"], line["caption"]) for line in lines_of(open_source(folder)) if "caption" in line]
    assert captions == rows
    (folder / name).write_text("name,words\nb.mp4,A dog\n" if name.endswith("csv") else '{"name": "b.mp4"}\n')
    with pytest.raises(ValueError, match=rf"{name} line \d: needs a file's name .* and its caption"):
        open_source(folder)


def test_texts_are_documents_or_books_with_questions(tmp_path):
    for name in ("one.txt", "two.md"):
        (tmp_path / name).write_text(f"This is {name}.")
    source = open_source(tmp_path)
    assert (source.total, source.has_media) == (2, False)
    assert [example.spans[0].text for record in source.records(0) for example in make_examples(record)] == [
        "This is one.txt.", "This is two.md.",
    ]  # fmt: skip
    write_rows(tmp_path / "one.questions.jsonl", [{"question": "Which?", "answer": "One."}])
    (line,) = lines_of(open_source(tmp_path / "one.txt", templates=["book"]))
    assert line == {"path": "one.txt", "template": "book", "turns": [["Which?", "One."]]}
    write_rows(tmp_path / "one.questions.jsonl", [{"question": "Which?"}])
    with pytest.raises(ValueError, match=r"one\.questions\.jsonl line 1: needs a question and an answer"):
        open_source(tmp_path / "one.txt", templates=["book"])


MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi?"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "Bye?"},
    {"role": "assistant", "content": "Bye."},
]
ROWS = [
    ([{"text": "A tale."}], {"template": "document", "text": "A tale."}),
    ([{"id": 7, "messages": MESSAGES}], {
        "id": "7", "template": "chat", "turns": [["Hi?", "Hi."], ["Bye?", "Bye."]], "system": "Be brief.",
    }),
    ([{"conversations": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Hi."}]}], {
        "template": "chat", "turns": [["Hi?", "Hi."]],
    }),
    ([{"question": "2 + 2?", "answer": "4"}], {"template": "chat", "turns": [["2 + 2?", "4"]]}),
    ([{"video": "a.mp4", "caption": "A dog.", "score": 3}], {
        "path": "a.mp4", "caption": "A dog.", "template": BOTH,
    }),
    ([{"image_path": "a.jpg", "text": "A dog."}], {
        "path": "a.jpg", "caption": "A dog.", "template": ["image->text", "text->image"],
    }),
    ([{"video": "a.mp4", "question": "What?", "answer": "A dog."}], {
        "path": "a.mp4", "template": "video question", "question": "What?", "answer": "A dog.",
    }),
    ([{"video": "a.mp4"}], {"path": "a.mp4", "template": "video"}),
]  # fmt: skip


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize(("rows", "expected"), ROWS)
def test_rows_as_hugging_face_has_them(tmp_path, ending, rows, expected):
    source = open_source(write_rows(tmp_path / f"rows.{ending}", rows * 5))
    assert lines_of(source) == [expected] * 5
    assert [record.id for record in source.records(3)] == ["rows:4", "rows:5"]
    assert source.total == 5
    assert source.has_media == ("path" in expected)
    for record in source.records(4):
        assert make_examples(record)


def test_columns_are_named_where_their_names_do_not_tell(tmp_path):
    file = write_rows(tmp_path / "rows.parquet", [{"file": "a.mp4", "label": "A dog.", "rest": 1}])
    (line,) = lines_of(open_source(file, columns={"caption": "label"}, templates=["text->video"]))
    assert line == {"path": "a.mp4", "caption": "A dog.", "template": "text->video"}
    with pytest.raises(ValueError, match="'title' is not a role; the roles are path, caption"):
        open_source(file, columns={"title": "label"})
    with pytest.raises(ValueError, match="has no such column; it has file, label, rest"):
        open_source(file, columns={"caption": "name"})
    other = write_rows(tmp_path / "other.jsonl", [{"name": "x", "size": 3}])
    with pytest.raises(ValueError, match=r"other\.jsonl line 1 has the columns name, size, and none is known"):
        open_source(other)


def test_pictures_inside_parquet_are_seen(tmp_path):
    rows = [{"image": {"bytes": png(level=level), "path": None}, "caption": f"grey {level}"} for level in (40, 90, 200)]
    source = open_source(write_rows(tmp_path / "p.parquet", rows), templates=["image->text"])
    tokenizer = train_tokenizer(["Describe the image. grey 40 90 200"] * 3, tmp_path / "t.model", size=120)
    vocabulary = Vocabulary(200, 256, 258)
    worker = Worker(Preparer(tokenizer, Limits(), frame_size=4, codes_per_frame=1))
    encoder = Encoder(vocabulary, lambda pixels: pixels[:, 0, 0, :1].astype(int))
    made = [item for _, item in encoder(prepared(source.records(0), 0, worker, 0))]
    clips = [piece for item in made for piece in untokenize(item.tokens, tokenizer, vocabulary) if len(piece) == 1]
    assert [int(codes[0, 0]) for codes in clips] == [40, 90, 200]


def test_unfit_rows_are_problems_of_their_own(tmp_path):
    rows = [
        {"messages": MESSAGES[1:3]},
        {"messages": MESSAGES[2:3]},
        {"messages": MESSAGES[1:2]},
        {"messages": [{"speaker": "me"}]},
        {"messages": None},
    ]
    source = open_source(write_rows(tmp_path / "rows.jsonl", rows))
    problems = [record.problem for record in source.records(0)]
    assert problems[0] == ""
    for problem, expected in zip(
        problems[1:], ["take turns", "needs an answer", "role and content", "all empty"], strict=True
    ):
        assert expected in problem
        assert "rows.jsonl line" in problem


def test_a_manifest_is_passed_on_as_it_is(tmp_path):
    rows = [{"template": "document", "text": f"text {k}"} for k in range(5)]
    file = write_rows(tmp_path / "m.jsonl", rows)
    source = open_source(file)
    assert [json.loads(line) for line in lines_of(source)] == rows
    assert [json.loads(record.line) for record in source.records(3)] == rows[3:]
    assert not source.has_media
    with pytest.raises(ValueError, match="is a manifest"):
        open_source(file, columns={"text": "text"})


def test_several_files_of_rows_follow_each_other(tmp_path):
    for number in range(3):
        write_rows(tmp_path / f"part-{number}.parquet", [{"text": f"{number}.{row}"} for row in range(5)])
    source = open_source(tmp_path)
    texts = [f"{number}.{row}" for number in range(3) for row in range(5)]
    assert [line["text"] for line in lines_of(source)] == texts
    for first in (0, 4, 5, 7, 14, 15):
        assert [record.line["text"] for record in source.records(first)] == texts[first:]


def test_what_is_no_source_is_one_sentence(tmp_path):
    (tmp_path / "a.pdf").write_text("x")
    (tmp_path / "bad.parquet").write_text("x")
    (tmp_path / "empty").mkdir()
    for path, message in [
        ("a.pdf", "is not a source; give a folder"),
        ("no", "no such file or folder"),
        ("empty", "has no videos, images, texts"),
        ("bad.parquet", "cannot be read as parquet"),
    ]:
        with pytest.raises(ValueError, match=message) as caught:
            open_source(tmp_path / path)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="template 'film' is not one of"):
        open_source(tmp_path, templates=["film"])
