"""Video questions: every format's file, letters read from answers, turns, failures, submissions, somebody's server."""

import base64
import csv
import http.server
import io
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from data.synthetic import shape_clip
from eval import endpoint, qa_formats, video_qa
from eval.qa_formats import Question
from eval.video_qa import Ask
from lwm import cli, media

FILES = Path(__file__).parent / "video_qa"


def read(name: str, answers: str | None = None) -> tuple[str, list[Question]]:
    dataset = qa_formats.read_questions(FILES / name, None if answers is None else FILES / answers)
    return dataset.format, list(dataset.questions)


def test_video_mme() -> None:
    format, (first, second, third) = read("video_mme.json")
    assert format == "Video-MME"
    assert (first.id, first.video, first.options) == ("001-1", "001", ("One.", "Two.", "Three.", "Four."))
    assert [q.answer for q in (first, second, third)] == [0, 2, 3]
    assert second.groups["task_type"] == "Attribute Perception"
    assert third.groups == {
        "duration": "long", "domain": "Sports", "sub_category": "Football", "task_type": "Counting Problem",
    }  # fmt: skip
    format, (first, second) = read("video_mme_table.csv")
    assert format == "Video-MME table"
    assert (first.video, first.options[1], first.answer) == ("one", "Two.", 0)
    assert (second.video, second.answer, second.groups["duration"]) == ("two", 3, "long")


def test_mvbench() -> None:
    format, (first, second) = read("mvbench.json")
    assert format == "MVBench"
    assert (first.answer, first.start, first.end) == (1, 0.5, 1.5)
    assert (second.options, second.answer, second.start) == (("Left.", "Right.", "Nowhere."), 0, None)


def test_long_video_bench() -> None:
    format, (first, second) = read("longvideobench.json")
    assert format == "LongVideoBench"
    assert (first.id, first.video, first.answer, len(first.options)) == ("one_0", "one.mp4", 2, 5)
    assert second.groups == {"duration_group": "600", "question_category": "E3E"}


def test_ego_schema() -> None:
    format, (first, second) = read("egoschema.json", "egoschema_answers.json")
    assert format == "EgoSchema"
    assert (first.id, first.video, first.answer, first.options[4]) == ("aaa-1", "aaa-1", 4, "Painting.")
    assert second.answer is None


def test_next_qa() -> None:
    format, (first, second) = read("nextqa.csv")
    assert format == "NExT-QA"
    assert (first.video, first.answer, first.options[3], first.groups) == ("one", 3, "it was told to", {"type": "CW"})
    assert (second.answer, second.options[0]) == (0, "one")


def test_open_questions_find_their_answers_beside_them() -> None:
    format, (first, second) = read("msvd_test_q.json")
    assert format == "open"
    assert (first.id, first.video, first.options, first.answer) == ("v1_0", "one", (), "square")
    assert (second.answer, second.groups) == ("nobody", {"type": "who"})


def test_vnbench() -> None:
    format, questions = read("vnbench.json")
    assert format == "VNBench"
    # Options that are numbers are not taken for indices.
    assert [q.answer for q in questions] == [1, 0, 2, 0]
    assert questions[0].series == questions[1].series != questions[2].series
    assert questions[2].groups == {"type": "cnt_insert"}


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    path = tmp_path / "q.json"
    for content, message in (
        ("{}", "must hold a list"),
        ("[]", "has no questions"),
        ("[", "cannot be read"),
        ('[{"a": 1}]', "fields a are of no known format"),
        ('[{"video": "a", "question": "?", "candidates": ["x", "y"], "answer": "z"}]', "row 1 .* none of the options"),
        ('[{"q_uid": "a", "question": "?", "option 0": "x", "option 1": "y", "answer": 2}]', "beyond the 2 options"),
        ('[{"video_path": "a", "question": "?", "candidates": ["x", "y"], "id": 1}, '
         '{"video_path": "b", "question": "?", "candidates": ["x", "y"], "id": 1}]', "'1' appears twice"),
    ):  # fmt: skip
        path.write_text(content)
        with pytest.raises(ValueError, match=message) as error:
            qa_formats.read_questions(path)
        assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("output", "letter"),
    [
        ("B", "B"),
        ("b", "B"),
        ("(C) the cat", "C"),
        ("B. a dog", "B"),
        ("The answer is D.", "D"),
        ("Answer: A", "A"),
        ("It is a red cat, I think", "C"),
        ("a cat", None),
        ("A dog", "B"),
        ("I believe it's B", "B"),
        ("Either B or C", None),
        ("E", None),
        ("", None),
        ("A man walks by", None),
    ],
)
def test_choices_are_read(output: str, letter: str | None) -> None:
    options = ("a fish", "dog", "a red cat", "cats")
    assert video_qa.read_choice(output, options) == letter


def test_turns_move_the_answer_with_its_option() -> None:
    question = Question("q", "v", "?", ("w", "x", "y", "z"), 2)
    made = list(video_qa.turns([question], circular=True))
    assert len(made) == 4
    assert {turn.options["ABCD".index(turn.answer or "")] for turn in made} == {"y"}
    assert [turn.answer for turn in made] == ["C", "B", "A", "D"]
    assert made[1].text.splitlines()[1:5] == ["A. x", "B. y", "C. z", "D. w"]


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("videos")
    (root / "deep").mkdir()
    clip = shape_clip(np.random.default_rng(0), 8, 32)[0]
    media.write(root / "one.mp4", clip, fps=4.0)
    media.write(root / "deep" / "two.mp4", clip, fps=4.0)
    (root / "broken.mp4").write_bytes(b"no video at all")
    return root


class Reader:
    """Says the first option, and fails like a real model where the video cannot be read."""

    def __init__(self) -> None:
        self.asked: list[Ask] = []

    def answer(self, ask: Ask) -> str:
        from data.video import read_frames

        self.asked.append(ask)
        if ask.video is not None:
            read_frames(ask.video, num_frames=2, start=ask.start, end=ask.end)
        return "A"


def test_a_bad_video_is_a_failed_case_and_a_run_goes_on(videos: Path, tmp_path: Path) -> None:
    names = ("one", "two", "broken", "missing")
    questions = tuple(Question(name, name, "Which?", ("x", "y"), 0, {"kind": name[0]}) for name in names)
    dataset = qa_formats.Dataset("MVBench", questions)
    model = Reader()
    run: dict[str, Any] = {"videos": videos, "model_id": "m"}
    summary = video_qa.run(dataset, model, tmp_path, **run)
    assert (summary["accuracy"], summary["num_cases"], summary["num_errors"]) == (0.5, 4, 2)
    assert summary["groups"]["kind"]["b"]["accuracy"] == 0.0
    assert [each["id"] for each in summary["errors"]] == ["broken", "missing"]
    assert "broken.mp4" in summary["errors"][0]["error"]
    assert [ask.video and ask.video.name for ask in model.asked] == ["one.mp4", "two.mp4", "broken.mp4"]
    again = Reader()
    assert video_qa.run(dataset, again, tmp_path, **run) == summary
    assert again.asked == []
    turned = video_qa.run(dataset, again, tmp_path, circular=True, **run)
    assert (turned["circular_accuracy"], turned["accuracy"]) == (0.0, 0.25)
    # The unturned questions were asked before.
    assert len(again.asked) == 3
    assert json.loads((tmp_path / "submission.json").read_text())[0] == {"id": "one", "video": "one", "prediction": "A"}


def test_dummies_and_submissions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in (
        "video_mme.json",
        "mvbench.json",
        "longvideobench.json",
        "nextqa.csv",
        "vnbench.json",
        "msvd_test_q.json",
    ):
        out = tmp_path / name
        options = ["eval", "video-qa", "--dataset", str(FILES / name), "--model", "oracle", "--out", str(out)]
        assert cli.run([*options, "--circular"]) == 0
        summary = json.loads((out / "summary.json").read_text())
        assert summary["accuracy"] == 1.0
        assert summary["circular_accuracy"] in (1.0, None)
    command = ["eval", "video-qa", "--dataset", str(FILES / "egoschema.json"), "--model", "first-k"]
    assert cli.run([*command, "--out", str(tmp_path / "ego")]) == 0
    with (tmp_path / "ego" / "submission.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [["q_uid", "answer"], ["aaa-1", "0"], ["bbb-2", "0"]]
    assert json.loads((tmp_path / "ego" / "summary.json").read_text())["accuracy"] is None
    assert "no answers to compare with" in capsys.readouterr().out
    stderr = io.StringIO()
    assert cli.run([*command[:-2], "--out", str(tmp_path / "x")], stderr) == 2
    assert "give one of --checkpoint" in stderr.getvalue()


def test_random_answers_are_chance(tmp_path: Path) -> None:
    questions = tuple(Question(str(i), "v", "Which?", ("w", "x", "y", "z"), i % 4) for i in range(400))
    dataset = qa_formats.Dataset("MVBench", questions)
    dummy = video_qa.Dummy("random", dataset)
    summary = video_qa.run(dataset, dummy, tmp_path, videos=None, model_id="r", blind=True)
    low, high = summary["interval"]
    assert low < 0.25 < high
    assert summary["chance"] == 0.25


def test_somebodys_server(videos: Path, tmp_path: Path) -> None:
    """A chat endpoint on this machine: what it is sent, that it may be busy, and that it may refuse."""
    seen: list[dict[str, Any]] = []
    busy = [503, 429]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status = 200 if not busy else busy.pop()
            if self.path != "/v1/chat/completions" or body["model"] != "big":
                status = 404
            seen.append({"body": body, "authorization": self.headers["Authorization"]})
            content = json.dumps({"choices": [{"message": {"role": "assistant", "content": "B. Bob"}}]}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/v1"
        waits: list[float] = []
        client = endpoint.Endpoint(url, "big", key="secret", sleep=waits.append)
        dataset = qa_formats.read_questions(FILES / "vnbench.json")
        model = endpoint.EndpointVideoModel(client, num_frames=3, size=16)
        summary = video_qa.run(dataset, model, tmp_path, videos=videos, model_id="big")
        assert waits == [2.0, 4.0]
        assert (summary["num_cases"], summary["num_errors"]) == (4, 0)
        # "Bob" is B in the first turn and A in the second; the counting question has no Bob, and "B" is meant.
        assert summary["accuracy"] == 0.25
        request = seen[-1]
        assert request["authorization"] == "Bearer secret"
        *pictures, text = request["body"]["messages"][0]["content"]
        assert len(pictures) == 3
        data = pictures[0]["image_url"]["url"].removeprefix("data:image/jpeg;base64,")
        assert Image.open(io.BytesIO(base64.b64decode(data))).size == (16, 16)
        assert text["text"].startswith("How many words are there?\nA. 3\n")
        with pytest.raises(OSError, match="404"):
            endpoint.Endpoint(url, "small", sleep=waits.append).chat("hello")
    finally:
        server.shutdown()
        server.server_close()
    failing = endpoint.Endpoint(url, "big", sleep=waits.append)
    with pytest.raises(OSError, match="failed 4 times"):
        failing.chat("hello")
    with pytest.raises(ValueError, match="give a URL"):
        endpoint.Endpoint("localhost", "big")
