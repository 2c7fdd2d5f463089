"""What Penstock replaces in other packages: all of it is listed, all of it goes, and it can be turned off."""

from __future__ import annotations

import ast
import logging
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import penstock
from penstock import patches
from penstock.patches import Replacement, replace_for_good

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "engines" / "patches.md"
# But for what runs in a program that ``penstock start-report`` watches, where nothing of Penstock is.
SOURCES = sorted(path for path in (ROOT / "python" / "penstock").rglob("*.py") if path.parent.name != "hooks")


# The list


def test_the_manual_lists_what_the_code_does() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `") and " PENSTOCK_" not in line]
    listed = [row for row in rows if row.startswith("| `") and row.count(" | ") == 3]
    cells = [row.strip("| ").split(" | ") for row in listed]
    assert all(all(cells_of_one) for cells_of_one in cells)
    assert [(target.strip("`"), when) for target, when, _, _ in cells] == [
        (target, when) for when, targets in patches.PATCHES.items() for target in targets
    ]


def _foreign_roots(tree: ast.AST) -> set[str]:
    """Names that a module binds by importing something that is not Penstock's, and plain aliases of these."""
    roots: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(alias.name, alias.asname or alias.name.partition(".")[0]) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(node.module or "", alias.asname or alias.name) for alias in node.names]
        else:
            continue
        roots |= {bound for module, bound in names if module.partition(".")[0] not in {"penstock", "__future__"}}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _root(node.value) in roots:
            roots |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return roots


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _replacements(source: str) -> list[str]:
    """Statements that set or delete an attribute of another package."""
    tree = ast.parse(source)
    roots = _foreign_roots(tree)
    found = []
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, (ast.Assign, ast.Delete)) else []
        if any(isinstance(target, ast.Attribute) and _root(target) in roots for target in targets):
            found.append(ast.unparse(node))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"setattr", "delattr"}:
            found += [ast.unparse(node)] * (_root(node.args[0]) in roots)
    return found


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "python")))
def test_attributes_of_other_packages_are_set_in_one_place_only(source: Path) -> None:
    assert _replacements(source.read_text()) == []


@pytest.mark.parametrize(
    "statement", ["torch.nn.Module.x = 1", "setattr(nn, 'x', 1)", "kind = nn.Module\nkind.x = 1", "del torch.load"]
)
def test_a_replacement_elsewhere_would_be_seen(statement: str) -> None:
    assert len(_replacements(f"import torch\nfrom torch import nn\n{statement}")) == 1


def test_what_is_not_listed_cannot_be_replaced() -> None:
    with pytest.raises(KeyError, match="not listed"):
        Replacement("torch.nn.Module.forward", lambda original: original)


# Replacing and restoring


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A package with a function, of which the list speaks."""
    monkeypatch.setattr(patches, "_TARGETS", {*patches._TARGETS, "library.function"})
    made = ModuleType("library")
    made.function = lambda value: [value]  # type: ignore[attr-defined]
    return made


def doubled(original: object) -> object:
    return lambda value: original(2 * value)  # type: ignore[operator]


def test_the_last_user_restores_the_original(library: ModuleType) -> None:
    original, replacement = library.function, Replacement("library.function", doubled)
    with replacement.on(library) as exists:
        with replacement.on(library):
            assert library.function(1) == [2]
        assert (exists, library.function(1)) == (True, [2])
    assert library.function is original


def test_an_attribute_that_is_not_there_is_left_out(library: ModuleType) -> None:
    del library.function
    with Replacement("library.function", doubled).on(library) as exists:
        assert not exists
    assert not hasattr(library, "function")


def test_another_package_s_replacement_of_ours_stays(library: ModuleType) -> None:
    original, replacement = library.function, Replacement("library.function", doubled)
    with replacement.on(library):
        ours = library.function
        library.function = theirs = lambda value: ["theirs", *ours(value)]  # type: ignore[attr-defined]
    assert library.function is theirs
    # When they restore what they found, it is ours; the next use of it cleans up.
    library.function = ours  # type: ignore[attr-defined]
    with replacement.on(library):
        assert library.function(1) == [2]
    assert library.function is original


def test_another_package_s_removal_of_ours_is_not_undone(library: ModuleType) -> None:
    original = library.function
    theirs = library.function = lambda value: ["theirs", value]  # type: ignore[attr-defined]
    with Replacement("library.function", doubled).on(library):
        library.function = original  # type: ignore[attr-defined]
    assert library.function is original
    assert library.function is not theirs


def test_what_stays_is_replaced_once(library: ModuleType) -> None:
    made = []

    def counted(original: object) -> object:
        made.append(original)
        return doubled(original)

    for _ in range(3):
        replace_for_good(library, "library.function", counted)
    assert (len(made), library.function(1)) == (1, [2])
    with pytest.raises(AttributeError):
        replace_for_good(SimpleNamespace(), "library.function", counted)


def test_a_model_that_accelerate_empties_meanwhile_leaves_nothing_of_either(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    accelerate = pytest.importorskip("accelerate")
    from penstock.model import no_init

    original = torch.nn.Module.register_parameter
    emptied, built = threading.Event(), threading.Event()

    def empties() -> None:
        with accelerate.init_empty_weights():
            emptied.set()
            assert built.wait(60)

    # Theirs is entered first and left while ours goes on.
    other = threading.Thread(target=empties)
    other.start()
    assert emptied.wait(60)
    with no_init():
        built.set()
        other.join()
    assert torch.nn.Module.register_parameter is original
    assert torch.nn.Linear(2, 2).weight.device.type == "cpu"

    # Ours is entered first and left while theirs goes on.
    emptied.clear()
    built.clear()
    other = threading.Thread(target=empties)
    with no_init():
        other.start()
        assert emptied.wait(60)
    built.set()
    other.join()
    assert torch.nn.Linear(2, 2).weight.device.type == "cpu"
    with no_init():
        assert torch.nn.Linear(2, 2).weight.device.type == "meta"
    assert torch.nn.Module.register_parameter is original


# Turning it off


@pytest.mark.parametrize(("value", "is_off"), [("", False), ("0", False), ("false", False), ("1", True), ("yes", True)])
def test_a_variable_turns_integrations_off(monkeypatch: pytest.MonkeyPatch, value: str, is_off: bool) -> None:
    monkeypatch.setenv("PENSTOCK_DISABLE", value)
    assert patches.is_disabled() == is_off


def test_a_patch_does_nothing_while_it_is_turned_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    pytest.importorskip("safetensors")
    numpy = pytest.importorskip("numpy")
    import safetensors.numpy

    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file({"a": numpy.arange(4)}, path)
    caplog.set_level(logging.DEBUG)
    theirs = safetensors.safe_open
    monkeypatch.setenv("PENSTOCK_DISABLE", "1")
    block = penstock.patch_safetensors()
    with block:
        assert safetensors.safe_open is theirs
        monkeypatch.delenv("PENSTOCK_DISABLE")
        with block:
            assert safetensors.safe_open is not theirs
    assert safetensors.safe_open is theirs
    assert "PENSTOCK_DISABLE" in caplog.text
    # What is called by name is not an integration.
    monkeypatch.setenv("PENSTOCK_DISABLE", "1")
    assert list(penstock.open(path).load(framework="np")) == ["a"]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_plugin_imports_nothing_of_its_engine_while_it_is_turned_off(
    engine: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import importlib

    plugin = importlib.import_module(f"penstock.integrations.{engine}")
    monkeypatch.setenv("PENSTOCK_DISABLE", "1")
    caplog.set_level(logging.DEBUG)
    plugin.register()
    assert engine not in sys.modules
    assert [record.levelname for record in caplog.records] == ["DEBUG"]
    assert "PENSTOCK_DISABLE" in caplog.text
