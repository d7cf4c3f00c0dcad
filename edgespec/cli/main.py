"""The ``edgespec`` command: finds subcommands lazily, and turns errors into one line and an exit code."""

from __future__ import annotations

import collections.abc as abc
import contextlib
import importlib
import io
import logging
import os
import signal
import sys
import threading

import click

from edgespec.errors import EdgespecError, FileAccessError, MemoryBudgetError
from edgespec.owner import NAME as OWNER

# name -> (module, attribute, line in the overview); the module is imported only when the command runs
COMMANDS = {
    "run": ("edgespec.cli.run", "run", "Answer one prompt, or chat in the terminal."),
    "calibrate": ("edgespec.cli.calibrate", "calibrate", "Measure what rounds cost on this box, once."),
    "doctor": ("edgespec.cli.doctor", "doctor", "Say whether a run would go as configured, and what mends it."),
    "quantize": ("edgespec.cli.quantize", "quantize", "Make the files a device should run, and say what they cost."),
    "distill": ("edgespec.cli.distill", "distill", "Train a draft model for a verifier of yours."),
    "models": ("edgespec.cli.models", "models", "List, check and download pairs."),
    "profiles": ("edgespec.cli.profiles", "profiles", "What devices can do; which one this is."),
    "bench": ("edgespec.cli.bench", "bench", "Compare the modes, on another device by simulation."),
    "worker": ("edgespec.cli.worker", "worker", "Lend this box's devices to a verifier elsewhere."),
}
INTERRUPTED = 130
_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
_BY_SIGNAL = {INTERRUPTED, *(128 + number for number in _SIGNALS)}
CANNOT_WRITE = FileAccessError.exit_code


class LazyGroup(click.Group):
    """A group whose commands are imported when they are asked for, so that --help loads neither backend."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, _, summary) in COMMANDS.items()])


@click.group(
    cls=LazyGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="edgespec")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Speculative decoding on one box: a small draft model proposes, the verifier checks all of it at once.

    The answer goes to standard output, everything else to standard error.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main() -> None:
    """Entry point of the console script."""
    _tolerate_encodings()
    _end_on_signals()
    with _log_to_stderr():
        code = _run()
    if code is not None and code in _BY_SIGNAL and any(thread.name == OWNER for thread in threading.enumerate()):
        # A model is still being loaded, which nothing can interrupt; there is nothing to save either.
        _flush()
        os._exit(code)
    sys.exit(code)


def _run() -> int | None:
    try:
        code: int | None = cli.main(prog_name="edgespec", standalone_mode=False)
        _flush()
    except MemoryBudgetError as error:
        click.echo("".join(f"{line}\n" for line in error.plan), nl=False, err=True)
        return _fail(str(error), error.exit_code)
    except EdgespecError as error:
        return INTERRUPTED if _interrupted(error) else _fail(str(error), error.exit_code)
    except ImportError as error:
        if not _interrupted(error):
            raise
        return INTERRUPTED
    except click.ClickException as error:
        return _fail(error.format_message(), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except _Terminated as error:
        return int(error.code)
    except OSError as error:
        return _fail_os(error)
    return code


def _fail_os(error: OSError) -> int:
    """An operating system's error nobody foresaw: of a file, or of standard output, which has no name."""
    reason = error.strerror or error
    if error.filename is not None:
        return _fail(f"{os.fsdecode(error.filename)}: {reason}; check the path and its permissions", CANNOT_WRITE)
    # Python would complain once more when it flushes at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if isinstance(error, BrokenPipeError):
        return 1  # the reader of our output has gone, and knows it
    return _fail(f"cannot write the output: {reason}; free space or write elsewhere", CANNOT_WRITE)


def _interrupted(error: BaseException | None) -> bool:
    """Whether Ctrl-C came before it: the import of compiled code makes an ImportError of that."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


class _Terminated(SystemExit):
    """The process was asked to end; ``code`` says by which signal."""

    code: int


def _end_on_signals() -> None:
    """``kill`` and a closed terminal end a command as Ctrl-C does: nothing half made stays behind."""
    for number in _SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:  # not where the caller wants it ignored, as nohup does
            signal.signal(number, _terminate)


def _terminate(number: int, _: object) -> None:
    signal.signal(number, signal.SIG_DFL)  # a second one does not wait for anybody
    raise _Terminated(128 + number)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


def _tolerate_encodings() -> None:
    """A terminal that cannot show a character gets a question mark, not a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _fail(message: str, exit_code: int) -> int:
    click.echo(f"Error: {' '.join(message.split())}", err=True)
    return exit_code


@contextlib.contextmanager
def _log_to_stderr() -> abc.Iterator[None]:
    """What the library has to say, a line each."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("edgespec: %(message)s"))
    logger = logging.getLogger("edgespec")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
