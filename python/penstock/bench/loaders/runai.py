"""runai-model-streamer, from files and from S3."""

from __future__ import annotations

from . import Load, Loader, Tensors, Use


def stream(use: Use) -> Load:
    from runai_model_streamer import SafetensorsStreamer

    def load(files: list[str]) -> Tensors:
        with SafetensorsStreamer() as streamer:
            streamer.stream_files(files, device=use.device)
            tensors: Tensors = {}
            for name, tensor in streamer.get_tensors():
                tensors[name] = tensor
                use.arrived()
            return tensors

    return load


READERS = "RUNAI_STREAMER_CONCURRENCY"
BUFFERED = {"RUNAI_STREAMER_FS_STRATEGY": "sync_buffered"}
LOADERS = {
    "runai": Loader("runai-model-streamer", stream, readers=READERS),
    "runai-buffered": Loader("runai-model-streamer", stream, BUFFERED, readers=READERS),
}
