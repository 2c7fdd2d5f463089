"""Where a model is: its small files (configurations, tokenizers) on the local disk, its weights wherever they are.

Libraries read small files by path, so those have to be local; weights are opened where they lie. What may be given is
what the libraries take (a directory, the name of a model on the Hub) and what ``penstock.open`` takes. Small files from
a URL are fetched (``small_files``), folder by folder, as they are needed. Of a model on the Hub they are fetched first,
to huggingface_hub's cache, and weights only when they are opened: the files that the library would load, no others.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock._native import LoadOptions, shown
from penstock.arguments import described, is_url, joined
from penstock.errors import ConfigError, LocationNotFoundError
from penstock.integrations.shared.small_files import NO_SMALL_FILES, SMALL, fetch, fresh_directory
from penstock.pulling import pull
from penstock.storage_options import core_options

if TYPE_CHECKING:
    from penstock.arguments import AnyPath
    from penstock.checkpoint import Checkpoint
    from penstock.trust.opening import Guard


class HubModel(NamedTuple):
    """A model on the Hub, at one commit, in huggingface_hub's cache."""

    name: str
    snapshot: str
    """The directory of the commit, whose name is the commit's."""
    options: dict[str, Any]
    """Other arguments of ``snapshot_download``."""

    def fetch(self, patterns: list[str], ignored: list[str] | None = None) -> None:
        """Has what matches on the local disk, of the same commit. There may be nothing that does.

        Raises:
            LocationNotFoundError: the Hub does not answer as it should.
        """
        _download(self.name, Path(self.snapshot).name, patterns, ignored, self.options)


class Place(NamedTuple):
    """A model's directory."""

    local: str
    """A directory on the local disk that has the small files."""
    weights: str
    """Where the weights are: the same directory, or a URL."""
    hub: HubModel | None = None
    """The model on the Hub whose cache this is in: weights come there when they are fetched."""
    storage_options: Mapping[str, Any] | None = None
    """Credentials and settings of the store that the URL leads to."""
    guard: Guard | None = None
    """What makes sure of files that a library reads by path, where they have to be signed."""
    folder: str = ""
    """The folder of the signed directory that this is."""

    def inside(self, folder: str) -> Place:
        """The place of a folder in there, which need not exist."""
        if not folder:
            return self
        below = f"{self.folder}/{folder}" if self.folder else folder
        found = self._replace(local=str(Path(self.local, folder)), weights=joined(self.weights, folder), folder=below)
        if is_url(found.weights) and not Path(found.local).exists():
            fetch(found.weights, found.local, self.storage_options)
            found.check()
        return found

    def check(self, names: Iterable[str] = ()) -> None:
        """Makes sure of the small files on the local disk, and of others of these names, where they have to be signed.

        Raises:
            SignatureError: one is not the signed one.
        """
        if self.guard is not None:
            self.guard.check_copy(self.local, self.folder, names)

    def check_all(self) -> None:
        """Makes sure of all files on the local disk, before a library reads weights of them by itself.

        Raises:
            SignatureError: one is not the signed one.
        """
        if self.guard is not None:
            below = (path for path in Path(self.local).rglob("*") if path.is_file())
            self.check([str(path.relative_to(self.local)) for path in below])

    def bring(self, folders: Iterable[str]) -> None:
        """Has the small files of folders in there on the local disk, all at once."""
        if is_url(self.weights):
            with ThreadPoolExecutor(16) as pool:
                list(pool.map(self.inside, folders))

    def fetch(self, names: Iterable[str]) -> None:
        """Of a model on the Hub, has files of these names on the local disk, as far as there are such."""
        wanted = [name for name in names if not Path(self.local, name).exists()]
        if self.hub is not None and wanted:
            self.hub.fetch([escape(f"{self._folder()}{name}") for name in wanted])
            self.check()

    def fetch_weights(self, variant: str | None = None) -> None:
        """Has this folder's safetensors files on the local disk, for a library's own loader, and makes sure of them.

        Those of a model on the Hub are fetched: without copies in other formats (``consolidated``), and of variants
        that which is asked for.
        """
        if self.hub is not None:
            folder = escape(self._folder())
            ignored = [f"{folder}*/*", f"{folder}consolidated*"]
            if variant is None:
                ignored.append(f"{folder}*.*.safetensors")
            self.hub.fetch([f"{folder}*.safetensors"], ignored)
        self.check_all()

    def bring_file(self, name: str) -> None:
        """Has a file on the local disk, if there is one of that name, for a library's own loader."""
        self.fetch([name])
        if is_url(self.weights):
            with suppress(LocationNotFoundError):
                pull(joined(self.weights, name), self.local, storage_options=self.storage_options)
        self.check([name])

    def _folder(self) -> str:
        """The folder within the model on the Hub, with a slash at its end, or nothing."""
        inside = os.path.relpath(self.local, self.hub.snapshot) if self.hub is not None else "."
        return "" if inside == "." else f"{inside}/"

    def holds(self, name: str) -> bool:
        """Whether there is a small file of that name."""
        return Path(self.local, name).is_file()


def called(path: AnyPath) -> str:
    """What a model that was found is called by: a path or a name as it was written, a URL without its secrets.

    A path of a model that lies on this machine is not for ``shown``, which takes an ``@`` in it for a password's end.
    """
    return shown(path) if is_url(path) else os.fsdecode(path)


def hub_options(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keywords that a library hands on to the Hub, taken out of ``kwargs``. For ``locate``."""
    names = ("token", "cache_dir", "local_files_only", "force_download")
    return {name: kwargs.pop(name) for name in names if name in kwargs}


def check_order(call: str, what: str, given: object, path: object, *, names: tuple[str, ...] = ()) -> None:
    """Refuses two arguments of which the first is no ``what``, or the second no path: they may be swapped.

    Args:
        call: the function, as the user wrote it.
        what: what comes before the path: ``"the class of a model"``.
        names: texts that stand for such a thing.

    Raises:
        ConfigError: saying which is which.
    """

    def is_path(argument: object) -> bool:
        return isinstance(argument, (str, bytes, os.PathLike)) and argument not in names

    if is_path(path) and not is_path(given):
        return
    cause = f"{call} takes {what}, then its path or URL; given were {described(given)} and {described(path)}"
    swapped = is_path(given) and not is_path(path)
    remedy = "Swap the two" if swapped else f"Give {what} first, its path or URL second"
    raise ConfigError(cause=cause, remedy=remedy)


def refuse_options(name: str, storage_options: Mapping[str, Any] | None) -> None:
    """Refuses storage options for the name of something on the Hub, which huggingface_hub looks for.

    Raises:
        ConfigError: saying what to write instead.
    """
    if storage_options:
        cause = "storage_options are for URLs, and this is a name on the Hub"
        raise ConfigError(location=name, cause=cause, remedy=f"Give token= instead, or write hf://{name}")


def locate(
    path: AnyPath,
    *,
    subfolder: str = "",
    revision: str | None = None,
    download: bool = True,
    storage_options: Mapping[str, Any] | None = None,
    trust: Any = None,
    **hub: Any,
) -> Place:
    """Where the model called ``path`` is.

    Args:
        path: a directory, one of its files, a model of a Hugging Face cache (``models--org--name``), a URL, or the
            name of a model on the Hub (``org/name``), which huggingface_hub then finds in its cache or fetches.
        subfolder: the folder of the model in there.
        revision: of a model on the Hub.
        download: whether names of models on the Hub are looked for there, or are an error.
        storage_options: of the store that a URL leads to, as for ``penstock.open``.
        trust: whose signatures are trusted, as for ``penstock.open``. The small files that are found are signed then.
        hub: other arguments of ``huggingface_hub.snapshot_download`` (``token``, ``cache_dir``, ``local_files_only``).

    Raises:
        LocationNotFoundError: nothing is there.
        SignatureError: with ``trust``: there is no signature that is trusted, or small files are not those of it.
        ConfigError: storage options with the name of a model on the Hub.
        PenstockError: what a store reports.
    """
    text = os.fsdecode(path)
    if is_url(text):
        url = joined(text, subfolder) if subfolder else text
        guard = guard_of(text, trust, storage_options)
        place = Place(fresh_directory(), url, storage_options=storage_options, guard=guard, folder=subfolder)
        if not fetch(url, place.local, storage_options):
            raise LocationNotFoundError(location=shown(url), cause=NO_SMALL_FILES)
        place.check()
        return place
    directory = Path(text.removeprefix("file://")).expanduser()
    on_hub: HubModel | None = None
    if directory.is_file():
        directory = directory.parent
    if directory.is_dir():
        found = str(_snapshot(directory))
    elif download and _is_hub_name(text):
        refuse_options(text, storage_options)
        on_hub = _from_hub(text, subfolder, revision, hub)
        found = on_hub.snapshot
    else:
        cause = "there is no such directory, and it is no name of a model on the Hub (org/name)"
        raise LocationNotFoundError(location=shown(text), cause=cause)
    guard = guard_of(found, trust, is_partial=on_hub is not None)
    inside = Place(found, found, on_hub, guard=guard).inside(subfolder)
    if not Path(inside.local).is_dir():
        raise LocationNotFoundError(f"{shown(text)}: there is no folder {subfolder!r} in it", location=inside.local)
    return inside


def local_files(
    path: AnyPath,
    *,
    subfolder: str = "",
    revision: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    trust: Any = None,
    **hub: Any,
) -> str:
    """A local directory that has a model's small files: for tokenizers, processors and configurations.

    ::

        tokenizer = AutoTokenizer.from_pretrained(local_files("s3://bucket/model/"))

    No weights are fetched. Args and exceptions are those of ``locate``. What was fetched from a URL is removed when the
    process ends.
    """
    place = locate(path, subfolder=subfolder, revision=revision, storage_options=storage_options, trust=trust, **hub)
    return place.local


def guard_of(
    root: str, trust: Any, storage_options: Mapping[str, Any] | None = None, *, is_partial: bool = False
) -> Guard | None:
    """What makes sure of files of the directory at ``root``; None where nothing has to be signed. See ``Guard.of``."""
    from penstock.checkpoint import is_trust_asked

    if not is_trust_asked(trust):
        return None
    from penstock.trust.opening import Guard

    return Guard.of(root, trust, core_options(storage_options), is_partial=is_partial)


def open_weights(
    place: Place,
    stem: str,
    variant: str | None = None,
    options: LoadOptions | None = None,
    *,
    named: str | None = None,
) -> Checkpoint:
    """Opens the weights of a model as its library names them: sharded or one file, of a variant or not.

    A directory may hold other checkpoints beside (variants, adapters, consolidated copies), so its names decide. Of
    one file and shards, both without a variant, that is taken which the library prefers.

    Args:
        place: the model's.
        stem: the library's name for weights: ``"model"``, ``"diffusion_pytorch_model"``.
        variant: such as ``"fp16"``.
        named: the file or index that the model's configuration names instead.

    Raises:
        LocationNotFoundError: naming what was looked for.
        PenstockError: see ``penstock.open``.
    """
    from penstock.checkpoint import open

    index = f"{stem}.safetensors.index.json"
    names = [index, f"{stem}.safetensors"]
    if stem == "model" and not is_url(place.weights):
        # transformers takes the one file. Of a URL the order stays, which saves large models a request.
        names.reverse()
    if named is not None:
        names = [_own_file(place, named)]
    elif variant:
        names = [f"{stem}.safetensors.index.{variant}.json", f"{stem}.{variant}.safetensors"]
        names.append(f"{stem}.safetensors.{variant}.index.json")  # as older diffusers wrote it
    for name in names:
        path = joined(place.weights, name)
        place.fetch([name])
        if is_url(path) or Path(path).exists():
            if place.hub is not None:
                place.fetch(_shards(path))
            try:
                trust = None if place.guard is None else place.guard.policy
                return open(path, storage_options=place.storage_options, trust=trust, options=options)
            except LocationNotFoundError:
                if not is_url(path):
                    raise  # a shard that is missing
    pickled = [name for name in ("pytorch_model.bin", f"{stem}.bin") if place.holds(name)]
    hint = f"; {pickled[0]} is a pickle, which Penstock does not read: save the model as safetensors" if pickled else ""
    cause = f"there is neither {' nor '.join(names)}{hint}"
    raise LocationNotFoundError(location=shown(place.weights), cause=cause)


def _shards(path: str) -> list[str]:
    """The files that a shard index names; none for what is no index. ``penstock.open`` says what is wrong with it."""
    if not path.endswith(".json"):
        return []
    try:
        return sorted(set(json.loads(Path(path).read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        return []


def _own_file(place: Place, name: str) -> str:
    """A file's name that a configuration gives, which has to be one of the model's own."""
    if (
        name.startswith("/")
        or ".." in name.split("/")
        or not name.endswith((".safetensors", ".safetensors.index.json"))
    ):
        cause = f"the configuration names {name!r} as its weights, which is no safetensors file in there"
        raise ConfigError(location=shown(place.weights), cause=cause)
    return name


def _snapshot(directory: Path) -> Path:
    """The snapshot of a model of a Hugging Face cache; any other directory as it is."""
    snapshots = directory / "snapshots"
    if not directory.name.startswith("models--") or not snapshots.is_dir():
        return directory
    head = directory / "refs" / "main"
    if head.is_file():
        return snapshots / head.read_text().strip()
    found = sorted(snapshots.iterdir())
    if len(found) != 1:
        cause = f"refs/main is missing and there are {len(found)} snapshots"
        raise LocationNotFoundError(location=str(directory), cause=cause, remedy="Name one of them")
    return found[0]


def _is_hub_name(text: str) -> bool:
    return bool(re.fullmatch(r"[\w.-]+(/[\w.-]+)?", text)) and not text.startswith(".")


def _from_hub(name: str, subfolder: str, revision: str | None, options: dict[str, Any]) -> HubModel:
    """A model on the Hub, of which the small files are on the local disk."""
    # Copies of weights in their authors' own formats have small files too.
    ignored = None if subfolder.startswith("original") else ["original/*"]
    return HubModel(name, _download(name, revision, SMALL, ignored, options), options)


def _download(
    name: str, revision: str | None, patterns: list[str], ignored: list[str] | None, options: dict[str, Any]
) -> str:
    import huggingface_hub

    try:
        found: str = huggingface_hub.snapshot_download(
            name, revision=revision, allow_patterns=patterns, ignore_patterns=ignored, **options
        )
    except (OSError, ValueError) as error:
        cause = f"there is no such directory, and the Hub gave no model of that name: {error}"
        raise LocationNotFoundError(location=name, cause=cause) from error
    return found
