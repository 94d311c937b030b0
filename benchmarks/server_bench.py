"""CPU time of the server process per streamed token: a scripted engine on one side, raw sockets that only count on the other.

``python benchmarks/server_bench.py --streams 32 --tokens 500 --json``

The engine steps at a fixed pace, so the figure is the server's own work (receive, detokenise, frame, write), not throughput.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


async def stream(port: int, path: str, body: dict[str, object]) -> tuple[int, bool]:
    """(chunks with text, whether the stream ended in full)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    content = json.dumps(body).encode()
    writer.write(
        b"POST %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        % (path.encode(), len(content))
        + content
    )
    chunks, data = 0, b""
    while piece := await reader.read(1 << 16):
        chunks += piece.count(b'"finish_reason":null')
        data = (data + piece)[-100:]
    writer.close()
    return chunks, b"[DONE]" in data


async def run(port: int, pid: int, args: argparse.Namespace) -> dict[str, object]:
    chat = args.route == "chat"
    body: dict[str, object] = {"max_tokens": args.tokens, "stream": True}
    body |= {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": "hi"}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    await stream(port, path, {**body, "max_tokens": 20})
    before, begin = cpu_seconds(pid), time.monotonic()
    done = await asyncio.gather(*(stream(port, path, body) for _ in range(args.streams)))
    used, wall = cpu_seconds(pid) - before, time.monotonic() - begin
    tokens = args.streams * args.tokens
    return {
        "route": args.route,
        "streams": args.streams,
        "tokens": tokens,
        "complete": sum(ended for _, ended in done),
        "chunks": sum(chunks for chunks, _ in done),
        "cpu_us_per_token": round(used / tokens * 1e6, 1),
        "server_cpu_share": round(used / wall, 3),
        "tokens_per_s": round(tokens / wall),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--route", choices=("chat", "completions"), default="chat")
    parser.add_argument("--step-ms", type=float, default=10.0, help="pace of the scripted engine")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    args = parser.parse_args()
    command = [sys.executable, "-m", "tokenspeed.testing.serve_fake", "--step-ms", str(args.step_ms)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert server.stdout is not None
    try:
        port = json.loads(server.stdout.readline())["port"]
        result = asyncio.run(run(port, server.pid, args))
    finally:
        server.terminate()
        server.wait(20)
    if args.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:18} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
