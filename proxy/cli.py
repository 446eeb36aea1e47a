"""`tallygate`: every command, and how each ends.

Exit code 0: done · 1: the answer is no · 2: wrongly asked or set up.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import typer

from proxy.commands import (
    configuration,
    finance,
    journal,
    keys,
    months,
    prices,
    quotas,
    report,
    roles,
    routes,
    serve,
    suspense,
    teams,
    tokens,
    usage,
    webhooks,
)
from proxy.logs import configure_logging

EXAMPLE = "Example: tallygate "


def build_cli() -> typer.Typer:
    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        help="An OpenAI-compatible gateway with speculative decoding and a bill that is provably right.",
    )
    app.command("serve", epilog=EXAMPLE + "serve --config tallygate.yaml --port 8000")(serve.serve)
    app.command("gateway", epilog=EXAMPLE + "gateway --slot 0 --port 8000", rich_help_panel="Roles")(roles.gateway)
    app.command("poster", epilog=EXAMPLE + "poster --data-dir /srv/tallygate", rich_help_panel="Roles")(roles.poster)
    app.command("backend", epilog=EXAMPLE + "backend --port 8001", rich_help_panel="Roles")(roles.backend)
    app.command("migrate", epilog=EXAMPLE + "migrate --config tallygate.yaml", rich_help_panel="Roles")(roles.migrate)
    app.add_typer(teams.team, name="team")
    app.add_typer(keys.key, name="key")
    app.add_typer(quotas.quota, name="quota")
    amounts: dict[str, Any] = {"context_settings": {"ignore_unknown_options": True}}  # "-5" is an amount, a wrong one
    app.command("topup", epilog=EXAMPLE + "topup 100 --team demo --reference bank-2026-0001", **amounts)(teams.topup)
    app.command("grant", epilog=EXAMPLE + "grant 5 --team demo --reference welcome --expires 2027-01-01", **amounts)(
        teams.grant
    )
    app.command("refund", epilog=EXAMPLE + "refund 20 --team demo --reference bank-2026-0002", **amounts)(teams.refund)
    app.command("balance", epilog=EXAMPLE + "balance --team demo")(teams.balance)
    app.command("usage", epilog=EXAMPLE + "usage --team demo --group-by model,day")(usage.usage)
    app.command("request", epilog=EXAMPLE + "request 01a22d85-c718-7000-bc30-c16c7a5de7a7")(usage.request)
    app.add_typer(report.report, name="report")
    app.add_typer(months.month, name="month")
    app.add_typer(routes.route, name="route")
    app.add_typer(finance.invoice, name="invoice")
    app.command("verify", epilog=EXAMPLE + "verify --month 2026-11")(finance.verify)
    app.add_typer(journal.journal, name="journal", rich_help_panel="Roles")
    app.add_typer(suspense.suspense, name="suspense", rich_help_panel="Roles")
    app.add_typer(webhooks.webhook, name="webhook", rich_help_panel="Roles")
    app.add_typer(tokens.admin_token, name="admin-token")
    app.command("audit", epilog=EXAMPLE + "audit --team team_demo --limit 20")(tokens.audit)
    app.add_typer(prices.price, name="price")
    app.add_typer(prices.fx, name="fx")
    app.add_typer(configuration.app, name="config")
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point. An error is one line on standard error; TALLYGATE_TRACEBACK=1 shows where it came from.

    arguments: for callers within Python, who keep their own logging. None: those of this process.
    """
    if arguments is None:
        _open_closed_streams()
        configure_logging(logging.WARNING)  # roles ask for more; whatever is logged must not mix with --json
    try:
        code = build_cli()(args=arguments, standalone_mode=False, prog_name="tallygate")
    except Exception as error:
        if os.environ.get("TALLYGATE_TRACEBACK"):
            traceback.print_exc()
        code = _explain(error)
    sys.stdout.flush()
    sys.exit(code if isinstance(code, int) else 0)


def _open_closed_streams() -> None:
    """Whoever starts us may have closed them (`>&-`, a daemon). What is said then goes nowhere; and the first file that
    we open must not get their numbers."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number: this one
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


def _explain(error: Exception) -> int:
    """Write one line for `error` (one for each problem of a configuration); the exit code."""
    if isinstance(error, typer.BadParameter) or hasattr(error, "format_message"):
        _write(f"{error.format_message()} (see --help)")
        return 2
    from ledger.errors import Invalid, LedgerError, LedgerUnavailable
    from ledger.migrations import NotMigrated
    from ledger.money import MoneyError
    from proxy.commands.options import Fail
    from proxy.preflight import StartRefused
    from proxy.settings import SettingsError

    if isinstance(error, SettingsError):
        sys.stderr.write("\n".join(error.lines) + "\n")  # "file:line: …", as editors read it
        return 2
    if isinstance(error, Fail):
        _write(str(error))
        return error.code
    if isinstance(error, StartRefused | Invalid | LedgerUnavailable | NotMigrated | MoneyError):
        _write(str(error))
        return 2
    if isinstance(error, LedgerError):
        _write(str(error))
        return 1
    if isinstance(error, typer.Abort):
        _write("stopped")
        return 1
    if isinstance(error, BrokenPipeError):
        return 1
    text = " ".join(str(error).split())
    _write(f"{type(error).__name__}: {text}; set TALLYGATE_TRACEBACK=1 to see where")
    return 1


def _write(line: str) -> None:
    sys.stderr.write(f"tallygate: {line}\n")


if __name__ == "__main__":
    main()
