"""The launch scripts with stand-ins for gcloud, srun and scontrol: what is started, and what follows each exit code."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from lwm.lifecycle import EXIT_BAD_INPUT, EXIT_NON_FINITE

SCRIPTS = Path(__file__).parents[2] / "scripts"

# Says the next exit code of codes.txt for each host, as the remote command does; other commands are only noted.
GCLOUD = """#!/usr/bin/env bash
echo "$*" >> "$PLACE/calls.txt"
case "$*" in *"lwm train"*"lwm exit code"*) ;; *) exit 0 ;; esac
codes=$(head -n 1 "$PLACE/codes.txt")
sed -i 1d "$PLACE/codes.txt"
for code in $codes; do echo "lwm exit code $code"; done
"""
SRUN = """#!/usr/bin/env bash
echo "srun $*" >> "$PLACE/calls.txt"
exit $(cat "$PLACE/codes.txt")
"""
NOTED = """#!/usr/bin/env bash
echo "$(basename "$0") $*" >> "$PLACE/calls.txt"
"""


def launch(place: Path, script: str, codes: list[str], *arguments: str, **variables: str) -> tuple[int, list[str]]:
    """Exit code of the script, and the commands it gave."""
    programs = {"gcloud": GCLOUD, "srun": SRUN, "scontrol": NOTED, "sleep": "#!/bin/sh\n"}
    (place / "bin").mkdir()
    for name, text in programs.items():
        (place / "bin" / name).write_text(text)
        (place / "bin" / name).chmod(0o755)
    (place / "codes.txt").write_text("".join(f"{code}\n" for code in codes))
    (place / "calls.txt").touch()
    environ = os.environ | {"PATH": f"{place / 'bin'}:{os.environ['PATH']}", "PLACE": str(place)} | variables
    done = subprocess.run(["bash", SCRIPTS / script, *arguments], env=environ, capture_output=True, check=False)
    return done.returncode, (place / "calls.txt").read_text().splitlines()


@pytest.mark.parametrize(
    ("codes", "expected", "starts"),
    [
        (["0 0"], 0, 1),
        (["42 42", "43 1", "0 0"], 0, 3),
        (["0 134", "0 0"], 0, 2),  # one host lost at the very end
        (["2 2"], 2, 1),
        (["42 42", "44 44"], 44, 2),
        (["1 1"] * 9, 1, 3),
    ],
)
def test_a_tpu_slice_is_started_again_until_it_is_done(
    tmp_path: Path, codes: list[str], expected: int, starts: int
) -> None:
    where = ["slice", "zone", "/mnt/a place", "lwm_text_7b", "name=two words"]
    code, calls = launch(tmp_path, "launch_tpu_pod.sh", codes, *where, RESTARTS="2", PROJECT="mine")
    assert code == expected
    trained = [each for each in calls if "lwm exit code" in each]
    assert len(trained) == starts
    assert sum("pkill -KILL" in each for each in calls) == sum("pkill -TERM" in each for each in calls) >= starts - 1
    before, _, remote = trained[0].partition(" --command ")
    assert before == "compute tpus tpu-vm ssh slice --zone zone --project mine --worker=all"
    place, program, *_ = remote.split(" && ")
    assert shlex.split(place) == ["cd", "/mnt/a place"]
    expected_words = [".venv/bin/lwm", "train", "lwm_text_7b", "cluster.join=yes", "name=two words"]
    assert shlex.split(program.split(";")[0])[: len(expected_words)] == expected_words


@pytest.mark.parametrize(
    ("code", "requeued"), [(0, False), (2, False), (44, False), (42, True), (43, True), (137, True)]
)
def test_a_slurm_job_goes_back_into_the_queue(tmp_path: Path, code: int, requeued: bool) -> None:
    arguments = ["my.yaml", "name=two words"]
    ended, calls = launch(tmp_path, "launch_slurm.sh", [str(code)], *arguments, SLURM_JOB_ID="17")
    assert calls[0] == "srun --kill-on-bad-exit=1 .venv/bin/lwm train my.yaml name=two words"
    assert calls[1:] == (["scontrol requeue 17"] if requeued else [])
    assert requeued or ended == code


def test_a_jobset_ends_where_starting_again_would_not_help() -> None:
    job = yaml.safe_load((SCRIPTS / "launch_gke.yaml").read_text())["spec"]["replicatedJobs"][0]["template"]["spec"]
    (rule,) = job["podFailurePolicy"]["rules"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert rule["onExitCodes"] == {
        "containerName": container["name"],
        "operator": "In",
        "values": [EXIT_BAD_INPUT, EXIT_NON_FINITE],
    }
    assert container["command"][:2] == ["sh", "-c"]
    assert shlex.split(container["command"][2])[:4] == ["exec", "lwm", "train", "CONFIG"]
    sizes = [int(size) for size in pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")]
    chips = sizes[0] * sizes[1] * sizes[2]
    assert job["completions"] == job["parallelism"] == chips // container["resources"]["limits"]["google.com/tpu"]
