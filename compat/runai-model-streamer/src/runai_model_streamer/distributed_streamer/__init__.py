"""Streaming by several processes."""

from runai_model_streamer.distributed_streamer.distributed_streamer import DistributedStreamer

__all__ = ["DistributedStreamer"]
