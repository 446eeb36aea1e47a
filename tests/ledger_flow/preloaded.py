"""What the fork server of `killable` imports once, for all the processes that it starts."""

import asyncpg
import uvicorn
import uvloop

import ledger.posting
import proxy.app
import proxy.cli
import proxy.commands.roles
import proxy.http_server
import proxy.logs

__all__ = ["asyncpg", "ledger", "proxy", "uvicorn", "uvloop"]
