"""`python -m tests.upstream --port N [--log FILE]`."""

from __future__ import annotations

import argparse

import uvloop

from tests.upstream.server import serve

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="tests.upstream", description="a fake OpenAI-compatible provider")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--log", help="JSON lines: what was produced for each request")
    arguments = parser.parse_args()
    uvloop.run(serve(arguments.port, arguments.log, arguments.host))
