"""What tools/check_wheels.py refuses."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path

import pytest

import penstock

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
import check_wheels

VERSION = penstock.__version__
ABOUT = f"penstock_loader-{VERSION}.dist-info"
HELD = {
    f"{ABOUT}/licenses/LICENSE": "Apache",
    f"{ABOUT}/licenses/{check_wheels.NOTICES}": "MIT License (MIT)\n  bytes 1.2.3  https://host/bytes\n",
    f"{ABOUT}/sboms/penstock.json": json.dumps({"components": [{"name": "bytes", "version": "1.2.3"}]}),
}


def wheel(directory: Path, held: dict[str, str], version: str = VERSION, kind: str = "cp310-abi3") -> Path:
    path = directory / f"penstock_loader-{version}-{kind}-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in held.items():
            archive.writestr(name, text)
    return path


@pytest.mark.parametrize("kind", ["cp310-abi3", "cp314-cp314t", "cp315-abi3.abi3t"])
def test_a_whole_wheel_has_no_faults(tmp_path: Path, kind: str) -> None:
    assert check_wheels.faults(wheel(tmp_path, HELD, kind=kind)) == []


@pytest.mark.parametrize("missing", HELD)
def test_what_is_missing_is_named(tmp_path: Path, missing: str) -> None:
    (fault,) = check_wheels.faults(wheel(tmp_path, {name: text for name, text in HELD.items() if name != missing}))
    assert fault.startswith("it lacks")


def test_notices_of_other_versions_are_refused(tmp_path: Path) -> None:
    notices = f"{ABOUT}/licenses/{check_wheels.NOTICES}"
    (fault,) = check_wheels.faults(wheel(tmp_path, HELD | {notices: HELD[notices].replace("1.2.3", "1.2.2")}))
    assert "('bytes', '1.2.2')" in fault


def test_another_version_or_kind_and_a_large_file_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "its version is not Cargo.toml's" in check_wheels.faults(wheel(tmp_path, HELD, version="9.9.9"))
    assert check_wheels.faults(wheel(tmp_path, HELD, kind="cp313-cp313")) == ["its name is of no known kind"]
    monkeypatch.setattr(check_wheels, "LARGEST", 10)
    (fault,) = check_wheels.faults(wheel(tmp_path, HELD))
    assert "larger than 10 bytes" in fault
