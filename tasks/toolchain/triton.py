"""Triton servers on this machine: find or set up an installation; start, observe and end servers.

The parts: `triton_installation` (what can be started), `triton_setup` (making one), `triton_server` (one that outlives
us), `triton_record` (how it is known again), `triton_staging` (one for a test), and `triton_client` (asking one).
"""

from __future__ import annotations

from tasks.toolchain.processes import find_free_ports
from tasks.toolchain.triton_installation import TritonInstallation, default_folder, find_installation
from tasks.toolchain.triton_record import ServerRecord, lives, observe, read_record
from tasks.toolchain.triton_server import server_is_live, start, stop, wait_ready
from tasks.toolchain.triton_setup import setup
from tasks.toolchain.triton_staging import staging

__all__ = [
    "ServerRecord",
    "TritonInstallation",
    "default_folder",
    "find_free_ports",
    "find_installation",
    "lives",
    "observe",
    "read_record",
    "server_is_live",
    "setup",
    "staging",
    "start",
    "stop",
    "wait_ready",
]
