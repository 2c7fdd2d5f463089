"""What every wheel of a release must hold, where they were built: ``python tools/check_wheels.py DIRECTORY``.

A name of a known kind, the version of Cargo.toml, no more than ``LARGEST`` bytes, a list of what is linked (SBOM), and
its licences, in the versions of Cargo.lock. Prints their sizes. ``try_wheel.py`` says whether they run.
"""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LARGEST = 10_000_000
# The last, which needs 3.15, is for it with and without the GIL.
NAME = re.compile(
    r"penstock_loader-(?P<version>[\d.]+)-(cp310-abi3|cp314-cp314t|cp315-abi3\.abi3t)"
    r"-(manylinux_2_28|musllinux_1_2)_(x86_64|aarch64)\.whl"
)
NOTICES = "THIRD_PARTY_NOTICES.txt"


def noticed(text: str) -> set[tuple[str, str]]:
    """Crates and versions that the notices name."""
    return set(re.findall(r"^  (\S+) (\d+\.\d+\.\S+)", text, re.MULTILINE))


def locked() -> set[tuple[str, str]]:
    """Crates and versions of Cargo.lock."""
    text = (ROOT / "Cargo.lock").read_text(encoding="utf-8")
    return set(re.findall(r'^name = "(.+)"\nversion = "(.+)"', text, re.MULTILINE))


def faults(wheel: Path) -> list[str]:
    """What is wrong with a wheel."""
    named = NAME.fullmatch(wheel.name)
    if named is None:
        return ["its name is of no known kind"]
    found = []
    version = re.search(r'^version = "(.+)"', (ROOT / "Cargo.toml").read_text(encoding="utf-8"), re.MULTILINE)
    if version is None or named["version"] != version[1]:
        found.append("its version is not Cargo.toml's")
    if wheel.stat().st_size > LARGEST:
        found.append(
            f"it is larger than {LARGEST:,} bytes: find what came in, or raise LARGEST in {Path(__file__).name}"
        )
    with zipfile.ZipFile(wheel) as archive:
        about = f"penstock_loader-{named['version']}.dist-info"
        held = set(archive.namelist())
        licences = ("LICENSE", NOTICES)
        found += [f"it lacks {file}" for file in licences if f"{about}/licenses/{file}" not in held]
        if not any(name.startswith(f"{about}/sboms/") for name in held):
            found.append("it lacks an SBOM")
        if found:
            return found
        strangers = noticed(archive.read(f"{about}/licenses/{NOTICES}").decode()) - locked()
    if strangers:
        found.append(f"its notices are of other versions: {sorted(strangers)}")
    return found


def main() -> None:
    """Exits with 1 where a wheel has a fault, or there is none."""
    wheels = sorted(Path(sys.argv[1]).glob("*.whl"))
    wrong = [f"{wheel.name}: {fault}" for wheel in wheels for fault in faults(wheel)]
    for wheel in wheels:
        sys.stdout.write(f"{wheel.stat().st_size / 1e6:5.2f} MB  {wheel.name}\n")
    sys.exit("\n".join(wrong) or (None if wheels else f"no wheels in {sys.argv[1]}"))


if __name__ == "__main__":
    main()
