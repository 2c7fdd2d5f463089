"""Making things fail for real: a library between a process and its C library, and filters of system calls."""
