"""Where a run's numbers come from: its code, the packages it ran with."""

import hashlib
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
_ROOT = Path(__file__).resolve().parents[1]
_GIT_SECONDS = 10


@cache
def git_revision() -> str:
    """The commit the code stands at, with `-dirty` when tracked files differ from it; empty outside of a checkout."""
    if not (_ROOT / ".git").exists():
        return ""
    command = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


@cache
def code_digest() -> str:
    """sha256 of the sources that decide what training computes, the same wherever they are installed."""
    hashed = hashlib.sha256()
    for package in ("ring", "data", "lwm"):
        for file in sorted((_ROOT / package).rglob("*.py")):
            hashed.update(f"{file.relative_to(_ROOT).as_posix()} {file.stat().st_size}\n".encode())
            hashed.update(file.read_bytes())
    return hashed.hexdigest()


def versions() -> dict[str, str]:
    """Package -> version, of those that decide numbers and formats."""
    return {name: metadata.version(name) for name in PACKAGES}
