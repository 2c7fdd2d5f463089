"""Ways to have models take turns on a device: each brings a model's components there, and says when each could be used.

``turns`` runs one of them in a process of its own. An arm gets modules with weights on the CPU, by model, and room
on the device in bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .models import nbytes

OURS = "penstock"
Models = dict[str, dict[str, Any]]
Done = Callable[[], None]


class Arm:
    """One way."""

    def __init__(self, models: Models, device: str, room: int, directory: Path) -> None:
        self.models, self.device, self.room, self.directory = models, device, room, directory

    def bring(self, name: str, done: Done) -> list[float]:
        """Brings a model to the device. Returns when each component could be used, by ``time.perf_counter``."""
        at = []
        for module in self.models[name].values():
            self.move(module)
            done()
            at.append(time.perf_counter())
        return at

    def move(self, module: Any) -> None:
        """Brings one module to the device."""
        raise NotImplementedError

    def check(self, name: str, of: Callable[[dict[str, Any]], Any]) -> Any:
        """What ``of`` says of a model's modules on the device."""
        return of(self.models[name])

    def figures(self) -> dict[str, Any]:
        """What else it has to report."""
        return {}


class Pool(Arm):
    """Penstock's."""

    def __init__(self, models: Models, device: str, room: int, directory: Path) -> None:
        from penstock import ModelPool

        super().__init__({}, device, room, directory)
        total = sum(nbytes(module) for modules in models.values() for module in modules.values())
        self.pool = ModelPool(device, host_budget=2 * total, device_budget=room + (1 << 20))
        for name, modules in models.items():
            self.pool.adopt(name, type("Pipeline", (), {"components": modules}))
        self._began = 0

    def bring(self, name: str, done: Done) -> list[float]:
        self._began = self.pool.stats().copied_bytes
        at = []
        with self.pool.use(name) as lease:
            for component in lease:
                lease[component]
                done()
                at.append(time.perf_counter())
        return at

    def check(self, name: str, of: Callable[[dict[str, Any]], Any]) -> Any:
        with self.pool.use(name) as lease:
            return of(dict(lease.items()))

    def figures(self) -> dict[str, Any]:
        return {"copied_last": self.pool.stats().copied_bytes - self._began}


class To(Arm):
    """``module.to``, both ways."""

    def __init__(self, models: Models, device: str, room: int, directory: Path) -> None:
        super().__init__(models, device, room, directory)
        self._fits = room >= sum(nbytes(module) for modules in models.values() for module in modules.values())

    def bring(self, name: str, done: Done) -> list[float]:
        for other, modules in self.models.items():
            if other != name and not self._fits:
                for module in modules.values():
                    module.to("cpu")
        return super().bring(name, done)

    def move(self, module: Any) -> None:
        module.to(self.device)


class Accelerate(Arm):
    """``cpu_offload_with_hook``, which diffusers' ``enable_model_cpu_offload`` is made of."""

    def __init__(self, models: Models, device: str, room: int, directory: Path) -> None:
        from accelerate import cpu_offload_with_hook

        super().__init__(models, device, room, directory)
        self._offloads = {
            name: [cpu_offload_with_hook(module, device)[1] for module in modules.values()]
            for name, modules in models.items()
        }

    def bring(self, name: str, done: Done) -> list[float]:
        for other, hooks in self._offloads.items():
            if other != name:
                for hook in hooks:
                    hook.offload()
        return super().bring(name, done)

    def move(self, module: Any) -> None:
        module._hf_hook.pre_forward(module)


class Components(Arm):
    """diffusers' ``ComponentsManager.enable_auto_cpu_offload``, told to leave free what is not room for the models."""

    def __init__(self, models: Models, device: str, room: int, directory: Path) -> None:
        import torch
        from diffusers import ComponentsManager

        super().__init__(models, device, room, directory)
        manager = ComponentsManager()
        for name, modules in models.items():
            for component, module in modules.items():
                manager.add(f"{name}-{component}", module)
        margin = max(torch.cuda.mem_get_info(device)[0] - room, 0)
        manager.enable_auto_cpu_offload(device, memory_reserve_margin=f"{margin // 1000}KB")
        self._manager = manager

    def move(self, module: Any) -> None:
        module._hf_hook.pre_forward(module)


class Thaw(Arm):
    """thaw-vllm's hot swap: a snapshot of each model, pinned once, copied over the parameters of one module.

    So the models must have one architecture, as two fine-tunes of Llama have.
    """

    def __init__(self, models: Models, device: str, room: int, directory: Path) -> None:
        from thaw_common.snapshot import freeze_model_pipelined, make_pinned_mmap, restore_model_from_pinned_mmap

        super().__init__({}, device, room, directory)
        self._pinned, self._restore = {}, restore_model_from_pinned_mmap
        for name, modules in models.items():
            self._names, (module,) = list(modules), list(modules.values())
            freeze_model_pipelined(module.to(device), str(directory / "model.thaw"))
            self._pinned[name] = make_pinned_mmap(str(directory / "model.thaw"))
            (directory / "model.thaw").unlink()
            modules.clear()  # its weights on the device go with the next model's
            self._module = module

    def bring(self, name: str, done: Done) -> list[float]:
        self._restore(self._module, self._pinned[name])
        done()
        return [time.perf_counter()]

    def check(self, name: str, of: Callable[[dict[str, Any]], Any]) -> Any:
        self._restore(self._module, self._pinned[name])
        return of(dict.fromkeys(self._names, self._module))


ARMS: dict[str, type[Arm]] = {
    OURS: Pool, "to": To, "accelerate": Accelerate, "components-manager": Components, "thaw": Thaw
}  # fmt: skip
PACKAGES = {"to": "torch", "accelerate": "accelerate", "components-manager": "diffusers", "thaw": "thaw-vllm"}
"""What each arm needs, by distribution."""
