"""Run a command as on a host of another name, and with a clock that may be ahead: host.py NAME AHEAD COMMAND..."""

import ctypes
import os
import signal
import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.nodes.hosts import unshare_time

if __name__ == "__main__":
    new_uts = 0x04000000
    ctypes.CDLL(None).unshare(new_uts)
    socket.sethostname(sys.argv[1])
    if float(sys.argv[2]):
        unshare_time(float(sys.argv[2]))
    child = os.fork()
    if not child:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        os.execvp(sys.argv[3], sys.argv[3:])
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 255)
