"""The process that the Mooncake library runs in: ``python -m tokenspeed_plugin_kvstore_mooncake.worker FD BYTES``.

In a process of its own because the library keeps the interpreter's lock while it sets itself up, which stops every thread of an engine for as long as a master
hangs, and because a process can be ended. Frames lie in memory that the two share and that is registered here; requests and answers are JSON behind a length
of four bytes, on stdin and stdout.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import struct
import sys
from typing import Any, BinaryIO

__all__ = ["LENGTH", "main", "receive", "send"]

LENGTH = struct.Struct("<I")
#: Memory of the client for what does not come from registered memory: nothing of ours.
_LOCAL_BUFFER = 1 << 20
_PR_SET_PDEATHSIG = 1


def send(stream: BinaryIO, message: Any) -> None:
    """Write one message."""
    data = json.dumps(message).encode()
    stream.write(LENGTH.pack(len(data)) + data)
    stream.flush()


def receive(stream: BinaryIO) -> Any:
    """Read one message. Raises ``EOFError`` at the end."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        raise EOFError("the other end is gone")
    return json.loads(stream.read(*LENGTH.unpack(head)))


def main(descriptor: int, size: int) -> int:
    """Set the client up, say how that went, and carry out requests until stdin ends."""
    # Whatever the library does at the end of the engine: this process ends with it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The library may write to stdout; answers have a descriptor of their own.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    memory = mmap.mmap(descriptor, size)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    try:
        client = _set_up(receive(sys.stdin.buffer), base, size)
    except ImportError as error:
        send(answers, {"missing": str(error)})
        return 1
    except OSError as error:
        send(answers, {"error": str(error)})
        return 1
    send(answers, {})
    while True:
        try:
            request = receive(sys.stdin.buffer)
        except EOFError:
            break
        send(answers, {"result": _carry_out(client, base, **request)})
    client.close()
    return 0


def _set_up(options: dict[str, Any], base: int, size: int) -> Any:
    from mooncake.store import MooncakeDistributedStore

    client = MooncakeDistributedStore()
    status = client.setup(
        options["hostname"],
        options["metadata"],
        options["segment_mb"] << 20,
        _LOCAL_BUFFER,
        options["protocol"],
        options["devices"],
        options["master"],
    )
    if status:
        raise ConnectionError(f"setting up with master {options['master']} failed with status {status}")
    if status := client.register_buffer(base, size):
        raise OSError(f"{size} bytes of memory could not be registered: status {status}")
    return client


def _carry_out(client: Any, base: int, call: str, names: list[str], offsets: list[int], sizes: list[int]) -> Any:
    """The library's own answer; ``offsets`` and ``sizes`` are of the frames in shared memory."""
    if call == "exists":
        return client.batch_is_exist(names)
    if call == "delete":
        return client.remove_by_regex(names[0], True)
    addresses = [base + offset for offset in offsets]
    if call == "get":
        return client.batch_get_into(names, addresses, sizes)
    # put leaves an object as it is where it exists; upsert replaces it.
    return client.batch_upsert_from(names, addresses, sizes)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
