"""What integrations share.

* ``plugin``, ``extra_config``, ``filling``: of the inference engines, vLLM and SGLang.
* ``files``, ``small_files``, ``objects``: the small files beside weights, on the local disk.
"""
