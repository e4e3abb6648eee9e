# SPDX-License-Identifier: Apache-2.0
"""`accelerate monitor RUN`: a page on localhost, or the terminal, that shows recorded runs while they go on."""

from __future__ import annotations

import contextlib
import sys
import threading

from ..core import messages
from ..core.errors import ConfigurationError
from .parser import Parser, exit_on


def parser() -> Parser:
    """Return the parser of `accelerate monitor`."""
    made = Parser(
        prog="accelerate monitor",
        description="Show recorded runs on a local web page: curves, the step time of each rank, "
        "phases, memory and events. The page updates while a run trains.",
    )
    made.add_argument(
        "runs", nargs="+", metavar="RUN", help="Folder of a run. Several runs are compared."
    )
    made.add_argument(
        "--port", type=int, help="Port of the page. Default: the first free port, starting at 6606."
    )
    made.add_argument(
        "--host",
        help="Address to listen on, such as 0.0.0.0 for all addresses of this machine. The URL "
        "then contains a secret token. Default: 127.0.0.1, which only this machine can "
        "reach.",
    )
    made.add_argument("--tui", action="store_true", help="Show the run in the terminal instead.")
    made.add_argument(
        "--json",
        action="store_true",
        help="Print the state of the run as JSON instead: one line for each change until the run "
        "ends.",
    )
    made.add_argument(
        "--once", action="store_true", help="With --json: print the current state and exit."
    )
    return made


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the command. Exits with 1 if a run or the port cannot be used, with 2 for wrong arguments."""
    made = parser()
    options = made.parse_args(arguments)
    if options.tui or options.json:
        if options.port is not None or options.host is not None or len(options.runs) > 1:
            made.error(
                f"{'--tui' if options.tui else '--json'} shows a single run and cannot be used "
                "with --port or --host"
            )
        if options.tui and options.json:
            made.error("--tui and --json exclude each other")
    if options.once and not options.json:
        made.error("--once needs --json")
    if options.port is not None and not 0 <= options.port < 65536:
        made.error(f"--port {options.port}: use a number from 0 to 65535")
    with exit_on(ConfigurationError, code=1):
        from ..monitor.run import open_runs

        runs = open_runs(options.runs, may_be_absent=True, are_partial=options.json)
        absent = [str(run.folder) for run in runs if not run.folder.is_dir()]
        if absent and not options.once:
            messages.show(f"waiting for {', '.join(absent)} (press Ctrl-C to stop)")
        if options.json or options.tui:
            from ..monitor.current import print_states
            from ..monitor.terminal import show

            with contextlib.suppress(KeyboardInterrupt):
                print_states(runs[0], options.once) if options.json else show(runs[0])
            return
        from ..monitor.server import Server

        server = Server(runs, options.host, options.port)
    # A long run is read while the browser opens.
    threading.Thread(target=lambda: [run.refresh() for run in runs], daemon=True).start()
    print(f"{messages.PREFIX}{server.url}  (Ctrl-C ends it)", flush=True)
    with server:
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print(file=sys.stderr)
