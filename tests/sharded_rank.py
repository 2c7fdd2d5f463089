"""One rank of modules that torch shards, as a process: for ``test_sharded.py``.

    python sharded_rank.py RANK RANKS STORE DEVICE CHECKPOINT

Fills modules of every kind with ``load_into`` and compares what this rank holds with what torch's
``set_model_state_dict(full_state_dict=True)`` gives. Prints a line of JSON for each case.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
from torch import distributed, nn
from torch.distributed._tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import penstock

SHAPES = {
    # Where columns are cut, the pieces of rows lie further apart than what a load reads with what is between them.
    "up.weight": (32, 65536),
    "up.bias": (32,),
    "down.weight": (16, 65536),
    "down.bias": (16,),
    "odd.weight": (1001, 515),
    "odd.bias": (1001,),
    "few.weight": (3, 8),
    "few.bias": (3,),
    "experts": (6, 80, 512),
    "vector": (5,),
}
"""Even and uneven sizes, and fewer rows than ranks."""


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        for name in ("up", "down", "odd", "few"):
            rows, columns = SHAPES[f"{name}.weight"]
            setattr(self, name, nn.Linear(columns, rows, dtype=dtype, device=device))
        self.experts = nn.Parameter(torch.empty(SHAPES["experts"], dtype=dtype, device=device))
        self.vector = nn.Parameter(torch.empty(SHAPES["vector"], dtype=dtype, device=device), requires_grad=False)
        self.register_buffer("counts", torch.zeros(7, dtype=torch.int64, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.odd(x).sum() + self.experts.sum()


def tensors() -> dict[str, torch.Tensor]:
    """The checkpoint, alike in all processes."""
    random = torch.Generator().manual_seed(3)
    made = {name: torch.randn(shape, generator=random) for name, shape in SHAPES.items()}
    return {**made, "counts": torch.arange(7)}


def local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def versions_of(tensor: torch.Tensor) -> list[int]:
    return [tensor._version, *([tensor._local_tensor._version] if isinstance(tensor, DTensor) else [])]


def memory_of(tensor: torch.Tensor) -> tuple[str, int]:
    """Device and address of what this rank holds."""
    return str(local(tensor).device), local(tensor).data_ptr()


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = local(one).cpu().contiguous(), local(other).cpu().contiguous()
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and (one.numel() == 0 or torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8)))
    )


class Rank:
    def __init__(self, device: str, path: str) -> None:
        self.device = device
        self.ckpt = penstock.open(path)
        self.ranks = distributed.get_world_size()
        self.stored = penstock.load_file(path)

    def mesh(self, *sizes: int) -> DeviceMesh:
        return init_device_mesh(self.device, sizes, mesh_dim_names=("a", "b", "c")[: len(sizes)])

    # Modules

    def model(
        self,
        shard: Callable[[Model], Any],
        dtype: torch.dtype = torch.float32,
        shard_expected: Callable[[Model], Any] | None = None,
        **named: Any,
    ) -> dict[str, Any]:
        """Fills a module, and compares it with one that torch filled.

        Args:
            shard_expected: shards torch's module, where torch cannot fill one that is sharded by ``shard``.
        """
        filled, expected = Model(dtype, self.device), Model(dtype, self.device)
        for module, cut in ((filled, shard), (expected, shard_expected or shard)):
            with torch.no_grad():
                for tensor in [*module.parameters(), *module.buffers()]:
                    tensor.fill_(1)
            cut(module)
        # `assign=False`: as load_state_dict, by copy_.
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(expected, {n: t.clone() for n, t in self.stored.items()}, options=options)
        return self.compare(filled, expected, **named)

    def compare(self, filled: nn.Module, expected: nn.Module, **named: Any) -> dict[str, Any]:
        before = filled.state_dict(keep_vars=True)
        versions = {name: versions_of(tensor) for name, tensor in before.items()}
        memory = {name: memory_of(tensor) for name, tensor in before.items()}
        loads = self.figures_of(lambda: self.ckpt.load_into(filled, **named))
        got, wanted = filled.state_dict(keep_vars=True), expected.state_dict(keep_vars=True)
        wrong = [name for name in wanted if not same(got[name], wanted[name])]
        there = {name: versions_of(tensor) for name, tensor in got.items() if local(tensor).numel()}
        stale = [name for name, now in there.items() if any(a <= b for a, b in zip(now, versions[name], strict=True))]
        moved = [name for name, tensor in got.items() if memory_of(tensor) != memory[name]]
        placements = {name: repr(getattr(tensor, "placements", None)) for name, tensor in got.items()}
        cut_otherwise = [n for n, t in wanted.items() if placements[n] != repr(getattr(t, "placements", None))]
        share = sum(local(got[name]).numel() * tensor.element_size() for name, tensor in self.stored.items())
        return {
            "wrong": wrong,
            "stale": stale,
            "moved": moved,
            "cut otherwise": cut_otherwise,
            "share": share,
            "bytes": sum(stats.bytes for stats in loads),
            "read": sum(stats.read_bytes for stats in loads),
            "placements": placements,
            "leaves": all(p.is_leaf for p in filled.parameters()),
        }

    def figures_of(self, load: Callable[[], Any]) -> list[Any]:
        """The figures of each load: there is one for each device."""
        figures: list[Any] = []
        with mock.patch.object(self.ckpt, "_done", figures.append):
            load()
        return figures

    def fsdp(self, model: Model, **named: Any) -> None:
        for part in (model.up, model.down, model.odd, model.few):
            fully_shard(part, **named)
        fully_shard(model, **named)

    def parallel(self, model: Model, mesh: DeviceMesh) -> None:
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    def cases(self) -> dict[str, Callable[[], dict[str, Any]]]:
        n, half = self.ranks, self.ranks // 2
        whole = self.mesh(n)

        def by_columns(parameter: nn.Parameter) -> Shard | None:
            return Shard(1) if parameter.dim() > 1 and parameter.shape[1] % n == 0 else None

        def two_dimensional(model: Model) -> None:
            mesh = self.mesh(half, 2)
            self.parallel(model, mesh["b"])
            self.fsdp(model, mesh=mesh["a"])

        def other_way(model: Model) -> None:
            mesh = self.mesh(2, half)
            self.parallel(model, mesh["b"])
            self.fsdp(model, mesh=mesh["a"])

        def replicated(model: Model) -> None:
            distribute_module(model, whole)

        def offload(model: Model) -> None:
            self.fsdp(model, mesh=whole, offload_policy=CPUOffloadPolicy(pin_memory=self.device == "cuda"))
            # The buffers stay: parameters and buffers are on two devices where the device is a GPU.
            assert {local(parameter).device.type for parameter in model.parameters()} == {"cpu"}
            assert {buffer.device.type for buffer in model.buffers()} == {self.device}

        def mixed(model: Model) -> None:
            self.fsdp(model, mesh=whole, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))

        return {
            "fully_shard": lambda: self.model(lambda model: self.fsdp(model, mesh=whole)),
            "fully_shard, a window of a MiB": lambda: self.model(
                lambda model: self.fsdp(model, mesh=whole),
                torch.float16,
                options=penstock.LoadOptions(block_bytes=1 << 16, window_bytes=1 << 20, readers=2),
            ),
            "fully_shard to bfloat16": lambda: self.model(lambda m: self.fsdp(m, mesh=whole), torch.bfloat16),
            "fully_shard to float64": lambda: self.model(lambda m: self.fsdp(m, mesh=whole), torch.float64),
            "fully_shard by columns": lambda: self.model(
                lambda model: self.fsdp(model, mesh=whole, shard_placement_fn=by_columns)
            ),
            "hybrid": lambda: self.model(lambda model: self.fsdp(model, mesh=self.mesh(2, half))),
            "tensor parallel": lambda: self.model(lambda model: self.parallel(model, whole)),
            "fully_shard and tensor parallel": lambda: self.model(two_dimensional),
            "fully_shard and tensor parallel, the other way": lambda: self.model(other_way),
            "fully_shard and tensor parallel to bfloat16": lambda: self.model(two_dimensional, torch.bfloat16),
            "replicated": lambda: self.model(replicated),
            # `set_model_state_dict` with a full state dict takes no module of two devices ("Multiple devices found").
            # It fills one that is sharded alike and not offloaded: what a rank holds is the same.
            "offloaded": lambda: self.model(offload, shard_expected=lambda model: self.fsdp(model, mesh=whole)),
            "mixed precision": lambda: self.model(mixed),
            "from the meta device": self.from_meta,
            "used before and after": self.used,
            "distributed tensors": self.tensors,
            "refused": self.refused,
        }

    def from_meta(self) -> dict[str, Any]:
        filled, expected = Model(torch.float32, "meta"), Model(torch.float32, self.device)
        for module in (filled, expected):
            self.fsdp(module, mesh=self.mesh(self.ranks))
        try:
            self.ckpt.load_into(filled)
        except penstock.DestinationError as error:
            refused = str(error)
        filled.to_empty(device=self.device)
        set_model_state_dict(
            expected, {n: t.clone() for n, t in self.stored.items()}, options=StateDictOptions(full_state_dict=True)
        )
        return {**self.compare(filled, expected), "refused": {"meta": refused}}

    def used(self) -> dict[str, Any]:
        """A module that has computed with other weights computes with the new ones."""
        plain, filled = Model(torch.float32, self.device), Model(torch.float32, self.device)
        plain.load_state_dict(self.stored)
        with torch.no_grad():
            for tensor in filled.parameters():
                tensor.fill_(1)
        self.fsdp(filled, mesh=self.mesh(self.ranks))
        x = torch.ones(2, SHAPES["odd.weight"][1], device=self.device)
        filled(x).backward()
        filled.reshard()
        self.ckpt.load_into(filled)
        return {"wrong": [] if torch.allclose(filled(x), plain(x), rtol=1e-4) else ["forward"]}

    # Tensors

    def tensors(self) -> dict[str, Any]:
        """Every placement that ``distribute_tensor`` takes, of every tensor, against the whole tensor cut by torch."""
        meshes = [self.mesh(self.ranks), self.mesh(self.ranks // 2, 2), self.mesh(2, self.ranks // 2)]
        wrong, read, share, count = [], 0, 0, 0
        for mesh in meshes:
            kinds: list[Any] = [Replicate(), Shard(0), Shard(1), Shard(2)]
            sets = [[kind] for kind in kinds] if mesh.ndim == 1 else [[a, b] for a in kinds for b in kinds]
            for placements in sets:
                fits = {
                    name: tensor
                    for name, tensor in self.stored.items()
                    if name not in {"up.weight", "down.weight"}
                    and all(getattr(kind, "dim", 0) < tensor.dim() for kind in placements)
                }
                expected = {n: distribute_tensor(t.to(self.device), mesh, placements) for n, t in fits.items()}
                into = {n: distribute_tensor(torch.zeros_like(t, device=self.device), mesh, placements)
                        for n, t in fits.items()}  # fmt: skip
                self.ckpt.load_into(into, names=list(into))
                assert self.ckpt.stats is not None
                share += sum(local(tensor).nbytes for tensor in into.values())
                read += self.ckpt.stats.bytes
                count += 1
                wrong += [f"{name} {placements}" for name in into if not same(into[name], expected[name])]
                whole = into["experts"].full_tensor()
                if not same(whole, self.stored["experts"]):
                    wrong.append(f"full_tensor {placements}")
        return {"wrong": wrong, "share": share, "bytes": read, "count": count}

    def refused(self) -> dict[str, Any]:
        mesh = self.mesh(self.ranks)
        partial = DTensor.from_local(torch.zeros(SHAPES["vector"], device=self.device), mesh, [Partial()])
        model = Model(torch.float32, self.device)
        self.fsdp(model, mesh=mesh)
        model.down.unshard()
        inside = model.down.weight
        before = inside.detach().clone()
        found = {}
        for what, into in (("partial", {"vector": partial}), ("unsharded", model)):
            try:
                self.ckpt.load_into(into, strict=False)
                found[what] = "nothing"
            except penstock.DestinationError as error:  # noqa: PERF203
                found[what] = str(error)
        wrong = [] if model.down.weight is inside and torch.equal(inside, before) else ["it was changed"]

        def build() -> nn.Module:
            built = Model(torch.float32, "meta")
            self.fsdp(built, mesh=mesh)
            return built

        flat = Model(torch.float32, self.device)
        flat.down = FullyShardedDataParallel(flat.down, device_id=torch.device(self.device))
        for what, load in (
            ("built on meta", lambda: penstock.load_model(build, self.ckpt, self.device)),
            ("flattened", lambda: self.ckpt.load_into(flat, strict=False)),
        ):
            try:
                load()
                found[what] = "nothing"
            except penstock.DestinationError as error:  # noqa: PERF203
                found[what] = str(error)
        model.down.reshard()
        self.ckpt.load_into(model)
        if not same(model.down.weight.full_tensor(), self.stored["down.weight"]):
            wrong.append("after reshard")
        return {"wrong": wrong, "refused": found}


def main() -> None:
    rank, ranks, store, device, path = sys.argv[1:]
    if device == "cuda":
        torch.cuda.set_device(int(rank))
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        store=distributed.FileStore(store, int(ranks)),
        rank=int(rank),
        world_size=int(ranks),
        timeout=timedelta(seconds=120),
    )
    for name, case in Rank(device, path).cases().items():
        try:
            found = case()
        except Exception:  # noqa: BLE001 - it is what the test looks at
            found = {"error": traceback.format_exc()}
        print(json.dumps({"case": name, **found}), flush=True)
    distributed.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
