"""What tools/check_wheels.py refuses."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

import penstock

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
import check_wheels

VERSION = penstock.__version__
ABOUT = f"penstock_loader-{VERSION}.dist-info"
BYTES = next(version for name, version in check_wheels.locked() if name == "bytes")
HELD = {
    f"{ABOUT}/licenses/LICENSE": "Apache",
    f"{ABOUT}/licenses/{check_wheels.NOTICES}": f"MIT License (MIT)\n  bytes {BYTES}  https://host/bytes\n",
    f"{ABOUT}/sboms/penstock.json": "{}",
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
    (fault,) = check_wheels.faults(wheel(tmp_path, HELD | {notices: HELD[notices].replace(BYTES, "0.0.1")}))
    assert "('bytes', '0.0.1')" in fault


def test_another_version_or_kind_and_a_large_file_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "its version is not Cargo.toml's" in check_wheels.faults(wheel(tmp_path, HELD, version="9.9.9"))
    assert check_wheels.faults(wheel(tmp_path, HELD, kind="cp313-cp313")) == ["its name is of no known kind"]
    monkeypatch.setattr(check_wheels, "LARGEST", 10)
    (fault,) = check_wheels.faults(wheel(tmp_path, HELD))
    assert "larger than 10 bytes" in fault
