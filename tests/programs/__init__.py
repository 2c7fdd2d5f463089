"""Random loading programs: what a recorded load leaves in memory must be, bit by bit, what an eager load leaves.

A program is data: how its destinations are made, and a list of operations on numbered tensors. It is run twice, with
ordinary tensors and with lazy ones, and everything that can be seen is compared: values read on the way, exceptions,
and at the end every tensor that is still there.

    python -m tests.programs --programs 100000 --seed 1 --processes 2
    python -m tests.programs --replay '{"seed": …}'
"""
