"""Dependencies point one way: docs/architecture.md has the picture, this holds it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "python" / "penstock"

LAYERS = [
    {"_native", "errors", "extension", "google_tokens", "namesake", "strides", "variables"},
    {"units"},
    {"arguments", "optional", "patches", "patterns", "progress", "selection", "tensor_info"},
    {"frameworks", "manifests", "neighbours", "storage_options"},
    {"trust", "watching"},
    {"loading"},
    {"parts"},
    {"destinations", "state"},
    {"checkpoint"},
    {"supply"},
    {"model", "pulling", "safetensors", "saving"},
    {"fp8"},
    {"recording"},
    {"pool"},
    {"metrics"},
    {"distributed"},
    {"integrations.safetensors", "integrations.shared"},
    {"integrations.peft", "integrations.sglang", "integrations.transformers", "integrations.vllm"},
    {"integrations.diffusers"},
    {"doctor"},
    {"start"},
    {"bench"},
    {"integrations", "cli"},
    {"__init__", "__main__"},
]
"""Each may use those of earlier lines, and itself."""


def rooms() -> list[tuple[str, Path]]:
    paths = sorted(PACKAGE.rglob("*.py"))
    return [(room(path.relative_to(PACKAGE).with_suffix("").parts), path) for path in paths]


def room(parts: tuple[str, ...]) -> str:
    inside = parts[0] == "integrations" and len(parts) > 1 and parts[1] != "__init__"
    return ".".join(parts[:2]) if inside else parts[0]


def imported(path: Path) -> Iterator[str]:
    """The rooms that a module imports when it is used, at whatever line."""
    tree = ast.parse(path.read_text())
    for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in for_types:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "penstock":
            for name in node.names:
                yield room((*node.module.split(".")[1:], name.name))
        elif isinstance(node, ast.Import):
            yield from (room((*name.name.split(".")[1:], "__init__")) for name in node.names if "penstock" in name.name)


def test_every_module_is_in_the_picture() -> None:
    assert {of for of, _ in rooms()} == set().union(*LAYERS) - {"_native"}


@pytest.mark.parametrize(("of", "path"), rooms(), ids=lambda value: value.stem if isinstance(value, Path) else value)
def test_modules_use_those_below_them(of: str, path: Path) -> None:
    height = {name: number for number, layer in enumerate(LAYERS) for name in layer}
    # The package's own names (``penstock.open``) are for those who stand above all that it hands on.
    least_of_all = height["integrations.safetensors"]
    for used in imported(path):
        if used in height and used != "__init__":
            assert used == of or height[used] < height[of], f"{of} uses {used}"
        else:
            assert height[of] >= least_of_all, f"{of} uses the package's own names: {used}"


# Rust


def sources(crate: str) -> dict[tuple[str, ...], str]:
    """The text of each module, tests and comments aside, by its path."""
    source = ROOT / "crates" / crate / "src"
    found = {}
    for path in source.rglob("*.rs"):
        parts = path.relative_to(source).with_suffix("").parts
        if "tests" in parts or parts[-1] == "testing":
            continue
        text = re.sub(r"(?m)^\s*//.*$|\s//\s.*$|pub\(in [\w:]+\)", "", path.read_text())
        text = text.split("#[cfg(test)]\nmod tests {")[0]
        found[parts[:-1] if parts[-1] in {"mod", "lib"} else parts] = text
    return found


def branches(tree: str) -> Iterator[str]:
    """The paths that a use-declaration names."""
    prefix, brace, rest = tree.partition("{")
    if not brace:
        yield tree.split(" as ", maxsplit=1)[0].strip()
        return
    depth, begin, body = 0, 0, rest[: rest.rindex("}")]
    for at, letter in enumerate(body + ","):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            if body[begin:at].strip():
                yield from (prefix.strip() + branch for branch in branches(body[begin:at].strip()))
            begin = at + 1


class Graph:
    """Which file of a crate uses which: re-exports are followed to where a name is defined."""

    def __init__(self, crate: str) -> None:
        self._texts = sources(crate)
        self._exports: dict[tuple[tuple[str, ...], str], tuple[tuple[str, ...], str]] = {}
        for module, text in self._texts.items():
            for tree in re.findall(r"(?m)^\s*pub(?:\([^)]*\))?\s+use\s+([^;]+);", text):
                for path in branches(tree):
                    found = self._walk(module, path, keep_last=True)
                    if found is not None and found[1] is not None:
                        self._exports[module, found[1]] = found[0], found[1]
        self.uses = {module: set(self._used(module)) - {module} for module in self._texts}

    def _walk(
        self, module: tuple[str, ...], path: str, *, keep_last: bool = False
    ) -> tuple[tuple[str, ...], str | None] | None:
        first, *rest = path.split("::")
        if first == "crate":
            at: tuple[str, ...] = ()
        elif first == "super":
            at = module[:-1]
        elif first == "self":
            at = module
        elif (*module, first) in self._texts:
            at = (*module, first)
        else:
            return None
        while rest and rest[0] == "super":
            at, rest = at[:-1], rest[1:]
        while len(rest) > keep_last and (*at, rest[0]) in self._texts:
            at, rest = (*at, rest[0]), rest[1:]
        return at, rest[0] if rest else None

    def _used(self, module: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        text = self._texts[module]
        trees = re.findall(r"(?m)^\s*use\s+([^;]+);", text)
        paths = [path for tree in trees for path in branches(tree)]
        paths += re.findall(r"\b(?:crate|super|self)(?:::\w+)+", re.sub(r"(?m)^\s*(?:pub.*)?use\s+[^;]+;", "", text))
        for path in paths:
            found = self._walk(module, path)
            seen = set()
            while found is not None and found[1] is not None and (found[0], found[1]) in self._exports:
                if (found[0], found[1]) in seen:
                    break
                seen.add((found[0], found[1]))
                found = self._exports[found[0], found[1]]
            if found is not None:
                yield found[0]

    def cycles(self) -> list[list[str]]:
        """The files of each cycle of imports, largest first."""
        reach = {module: self._reached(module) for module in self.uses}
        left, found = set(self.uses), []
        while left:
            module = left.pop()
            cycle = {other for other in reach[module] if module in reach[other]} | {module}
            left -= cycle
            if len(cycle) > 1:
                found.append(sorted("/".join(of) or "lib" for of in cycle))
        return sorted(found, key=len, reverse=True)

    def _reached(self, module: tuple[str, ...]) -> set[tuple[str, ...]]:
        seen, left = set(), [module]
        while left:
            for used in self.uses.get(left.pop(), ()):
                if used not in seen:
                    seen.add(used)
                    left.append(used)
        return seen


@pytest.mark.parametrize("crate", ["penstock", "penstock-python"])
def test_no_cycle_of_imports_has_more_than_four_files(crate: str) -> None:
    graph = Graph(crate)
    assert any(graph.uses.values())
    assert [cycle for cycle in graph.cycles() if len(cycle) > 4] == []


STATIONS = [
    {"error", "closest"},
    {"memory", "threads"},
    {"manifest"},
    {"device", "store"},
    {"checkpoint", "config"},
    {"plan", "tune"},
    {"stats"},
    {"trace"},
    {"pipeline", "pull", "save"},
]
"""Rooms of the core: each uses those of earlier lines, and itself. ``lib`` hands all of them on."""


def test_stations_use_those_before_them() -> None:
    uses = Graph("penstock").uses
    order = {name: number for number, names in enumerate(STATIONS) for name in names}
    assert {module[0] for module in uses if module} == order.keys()
    upwards = {
        ("/".join(module), "/".join(used))
        for module, of in uses.items()
        for used in of
        if module and used and module[0] != used[0] and order[used[0]] >= order[module[0]]
    }
    # How a path is written for people.
    assert upwards == {("error", "store/local/path")}


REMOTE = ["settings", "request", "http", "provider", "objects"]
"""Rooms of store/remote: each uses those before it, and itself. The hub and ``web`` stand above all of them."""


def test_rooms_of_the_remote_store_use_those_below_them() -> None:
    base = ("store", "remote")
    above = ["hub", "web", "mod"]
    order = {name: number for number, name in enumerate([*REMOTE, *above])}
    uses = Graph("penstock").uses
    inside = [module for module in uses if module[:2] == base and len(module) > 3 and module[2] in REMOTE]
    assert len(inside) > 20
    upwards = {
        ("/".join(module[2:]), "/".join(used[2:]))
        for module in inside
        for used in uses[module]
        if used[:2] == base and order[used[2] if len(used) > 2 else "mod"] > order[module[2]]
    }
    assert upwards == set()


# Private names

FOREIGN = {
    ("frameworks.torch", "_version"),
    ("pool.bound", "_version"),
    ("integrations.vllm.loader", "_prepare_weights"),
}
"""Torch's and vLLM's private names that one of our modules has too."""


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names(tree: ast.AST) -> tuple[set[str], set[str]]:
    """Private names that a module defines, as its own or of its classes, and those that it uses of other objects."""
    defined, used = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            defined.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
        elif isinstance(node, ast.Attribute):
            is_own = isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}
            if is_own and isinstance(node.ctx, ast.Store):
                defined.add(node.attr)
            elif not is_own and not (isinstance(node.value, ast.Name) and node.value.id == "penstock"):
                used.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("penstock"):
            # ``penstock._native`` is a module, not a name of one.
            used.update(name.name for name in node.names if name.name != "_native")
    return set(filter(private, defined)), set(filter(private, used))


def test_no_module_uses_private_names_of_another() -> None:
    found = {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts): private_names(ast.parse(path.read_text()))
        for _, path in rooms()
    }
    ours = set().union(*(defined for defined, _ in found.values()))
    reaches = {(module, name) for module, (defined, used) in found.items() for name in (used & ours) - defined}
    assert reaches == FOREIGN
