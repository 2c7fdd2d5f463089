"""Thousands of operations on a pool in any order: after each, the books are exact and every byte is right."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import penstock
from penstock.errors import PoolError
from penstock.pool import ModelPool
from pool_books import check_books

WIDTHS = [16, 32, 64, 32, 48, 64]
"""Of the layers in the files; a component has as many squared numbers."""
MODELS = {"a": [0], "b": [1, 2], "c": [2, 3], "d": [4], "e": [0, 4], "f": [5]}
"""Files by model: some are shared, and the last one has the bytes of another."""
VALUES = [1.0, 2.0, 3.0, 4.0, 5.0, 3.0]


def layer(width: int) -> Any:
    return lambda: torch.nn.Linear(width, width, bias=False)


def nbytes(file: int) -> int:
    return 4 * WIDTHS[file] ** 2


@pytest.fixture(scope="module", autouse=True)
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("pool")
    for file, width in enumerate(WIDTHS):
        value = torch.full((width, width), VALUES[file])
        safetensors_torch.save_file({"weight": value}, made / f"{file}.safetensors")
    for of, width in {**{str(file): width for file, width in enumerate(WIDTHS)}, "8": 8, "40": 40}.items():
        # Adds its weight to every element.
        ones = {"lora_A.weight": torch.ones(1, width), "lora_B.weight": torch.ones(width, 1)}
        component = "model" if int(of) >= len(WIDTHS) else of
        safetensors_torch.save_file({f"{component}.{k}": v for k, v in ones.items()}, made / f"lora{of}.safetensors")
    Pool.directory = made
    return made


class SomeName:
    """Data that draws a name that is known."""

    def __init__(self, name: str) -> None:
        self._name = name

    def draw(self, strategy: Any) -> str:
        return self._name


class Pool(RuleBasedStateMachine):
    """A pool beside a model of it: the value that each weight must have."""

    directory: Path

    def __init__(self) -> None:
        super().__init__()
        self.pool = ModelPool("cpu", host_budget=20_000, device_budget=24_000)
        self.values: dict[str, list[float]] = {}
        self.added: dict[str, float] = {}
        """What an adapter adds to each element of the first component."""
        self.leases: list[Any] = []
        self.adopted: set[str] = set()
        self.pinned: list[str] = []

    names = st.sampled_from(sorted(MODELS))

    @rule(name=names)
    def register(self, name: str) -> None:
        files = MODELS[name]
        arguments = (
            {str(file): self.directory / f"{file}.safetensors" for file in files},
            {str(file): layer(WIDTHS[file]) for file in files},
        )
        if name in self.values:
            with pytest.raises(penstock.ConfigError):
                self.pool.register(name, arguments[0], build=arguments[1])
        else:
            self.pool.register(name, arguments[0], build=arguments[1])
            self.values[name] = [VALUES[file] for file in files]
            self.pool.load_adapter(name, self.directory / f"lora{files[0]}.safetensors", name="x")

    @rule(width=st.sampled_from([8, 40]))
    def adopt(self, width: int) -> None:
        name = f"adopted {width}"
        if name in self.values:
            return
        module = layer(width)()
        with torch.no_grad():
            module.weight.fill_(width)
        try:
            self.pool.adopt(name, module)
        except penstock.InsufficientMemoryError:
            assert module.weight[0, 0] == width
        else:
            self.values[name] = [float(width)]
            self.adopted.add(name)
            self.pool.load_adapter(name, self.directory / f"lora{width}.safetensors", name="x")

    @precondition(lambda self: self.values)
    @rule(data=st.data(), workspace=st.sampled_from([0, 0, 2_000]))
    def use(self, data: st.DataObject, workspace: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.values)))
        try:
            lease = self.pool.use(name, workspace=workspace)
        except (penstock.InsufficientMemoryError, PoolError):
            return
        self.leases.append(lease)
        self.check(name, lease)

    def check(self, name: str, lease: Any) -> None:
        """That modules give what their weights and adapters must give."""
        added = self.added.get(name, 0.0)
        for module, value in zip(lease.values(), self.values[name], strict=True):
            width = module.weight.shape[0]
            with torch.no_grad():
                assert torch.equal(module(torch.ones(1, width)), torch.full((1, width), width * (value + added)))
            if not self.is_merged(name):
                assert torch.equal(module.weight, torch.full_like(module.weight, value))
            added = 0.0

    def is_merged(self, name: str) -> bool:
        return self.pool._models[name].modules[0].component.overlay is not None

    @precondition(lambda self: self.values)
    @rule(data=st.data(), weight=st.integers(-3, 3), merge=st.booleans())
    def set_adapters(self, data: st.DataObject, weight: int, merge: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.values)))
        try:
            self.pool.set_adapters(name, {"x": weight} if weight != 3 else {}, merge=merge)
        except penstock.InsufficientMemoryError:
            pass
        else:
            self.added[name] = 0.0 if weight == 3 else float(weight)
        for lease in self.leases:
            if lease.model.name == name:
                self.check(name, lease)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1))).close()

    @precondition(lambda self: self.leases)
    @rule(value=st.integers(50, 99))
    def write(self, value: int) -> None:
        """Writes to the newest lease's model and ends it, if nobody else uses it."""
        lease = self.leases[-1]
        users = [other for other in self.leases if set(other.model.components) & set(lease.model.components)]
        if len(users) > 1:
            return
        module = next(iter(lease.values()))
        with torch.no_grad():
            module.weight.fill_(value)
        if self.is_merged(lease.model.name):
            # It is part of the weights from here on.
            self.added[lease.model.name] = 0.0
        self.leases.pop().close()
        self.values[lease.model.name][0] = float(value)

    @precondition(lambda self: self.values)
    @rule(data=st.data(), to=st.sampled_from(["host", "device"]))
    def prefetch(self, data: st.DataObject, to: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.values)))
        try:
            future = self.pool.prefetch(name, to=to)
        except penstock.InsufficientMemoryError:
            return
        if not future.cancel():
            try:
                future.result(10)
            except penstock.InsufficientMemoryError:
                assert to == "host"

    @precondition(lambda self: self.values)
    @rule(data=st.data(), level=st.sampled_from([1, 2]))
    def sleep(self, data: st.DataObject, level: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.values)))
        used = name in self.pinned or any(lease.model.name == name for lease in self.leases)
        if used or (level == 2 and name in self.adopted):
            with pytest.raises(penstock.ConfigError):
                self.pool.sleep(name, level)
        else:
            self.pool.sleep(name, level)

    @precondition(lambda self: self.values)
    @rule(data=st.data())
    def unload(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.values)))
        if name in self.pinned or any(lease.model.name == name for lease in self.leases):
            with pytest.raises(penstock.ConfigError):
                self.pool.unload(name)
            return
        self.pool.unload(name)
        del self.values[name]
        self.added.pop(name, None)
        self.adopted.discard(name)

    @precondition(lambda self: self.values)
    @rule(data=st.data(), how=st.sampled_from(["switch", "pin"]))
    def bring(self, data: st.DataObject, how: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.values)))
        try:
            getattr(self.pool, how)(name)
        except (penstock.InsufficientMemoryError, PoolError):
            return
        if how == "pin":
            self.pinned.append(name)

    @precondition(lambda self: self.pinned)
    @rule()
    def unpin(self) -> None:
        self.pool.unpin(self.pinned.pop())

    @precondition(lambda self: self.values)
    @rule(data=st.data(), value=st.integers(100, 150))
    def write_outside(self, data: st.DataObject, value: int) -> None:
        """Writes to a model that nobody leases, as far as it has memory."""
        name = data.draw(st.sampled_from(sorted(self.values)))
        bound = self.pool._models[name].modules[0]
        sharing = [lease for lease in self.leases if bound.component in lease.model.components]
        if bound.leases or bound.home is None or (bound.home == "device" and sharing):
            return
        if bound.home == "device" and self.is_merged(name):
            self.added[name] = 0.0
        for other, model in self.pool._models.items():
            for number, one in enumerate(model.modules):
                if one.component is bound.component and one.home == bound.home and one.is_changed():
                    # Of two that write to one master before anyone asks, both have what it holds.
                    self.values[other][number] = float(value)
        with torch.no_grad():
            bound.module.weight.fill_(value)
        # The next request finds it; until then, all who share the master see it.
        self.values[name][0] = float(value)
        self.use(SomeName(name), 0)

    @rule(host=st.integers(0, 40_000), device=st.integers(0, 40_000))
    def resize(self, host: int, device: int) -> None:
        self.pool.resize(host=host, device=device)

    @invariant()
    def books_are_exact(self) -> None:
        check_books(self.pool)

    def teardown(self) -> None:
        for lease in self.leases:
            lease.close()
        self.pool.close()
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("penstock-pool")]


Pool.TestCase.settings = settings(max_examples=30, stateful_step_count=50, deadline=None)
TestPool = Pool.TestCase


def test_threads_that_switch_between_models_get_the_right_bytes(directory: Path) -> None:
    with ModelPool("cpu", host_budget=30_000, device_budget=34_000) as pool:
        for name, files in MODELS.items():
            pool.register(
                name,
                {str(file): directory / f"{file}.safetensors" for file in files},
                build={str(file): layer(WIDTHS[file]) for file in files},
            )
        wrong: list[Any] = []

        def work(seed: int) -> None:
            names = sorted(MODELS)
            for turn in range(60):
                name = names[(seed * 7 + turn * (seed + 1)) % len(names)]
                with pool.use(name) as model:
                    for file, module in model.items():
                        if not torch.equal(module.weight, torch.full_like(module.weight, VALUES[int(file)])):
                            wrong.append((name, file))

        threads = [threading.Thread(target=work, args=[seed]) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        assert not wrong
        check_books(pool)
