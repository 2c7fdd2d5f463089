"""Tensors of safetensors files."""
