"""What a Python program that is watched imports first: ``sitecustomize``, found by way of PYTHONPATH."""
