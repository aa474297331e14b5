"""Errors of a command: one sentence on standard error, and an exit status."""

from __future__ import annotations

import os
import re
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from nemo_rod.commands.text import printable
from nemo_rod.signals import Stopped


def leave(sentence: str, *, status: int = 2) -> NoReturn:
    """Ends the process with a sentence on standard error."""
    with suppress(BrokenPipeError):  # the reader has left
        print(f"nemo-rod: {printable(' '.join(sentence.split()))}", file=sys.stderr)
    raise SystemExit(status)


@contextmanager
def errors_in_one_sentence() -> Iterator[None]:
    """Calls `leave` for stops and for errors that a user can correct.

    A closed output pipe, as in `nemo-rod status RUN_DIR | head`, ends a command without a message.
    """
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:  # a process may be started without stdout
                sys.stdout.flush()
    except BrokenPipeError as error:
        poll = select.poll()
        for output in (1, 2):  # not a pipe inside of a run
            poll.register(output, 0)
        if not (closed := poll.poll(0)):
            leave(str(error))
        for output, _ in closed:
            os.dup2(os.open(os.devnull, os.O_WRONLY), output)
        raise SystemExit(128 + signal.SIGPIPE) from None  # the code that shells report
    except ModuleNotFoundError as error:
        leave(f"{error}: {_installation(str(error.name))}")
    except OSError as error:
        if isinstance(error, FileNotFoundError) and error.filename is None:  # from `Path.cwd()`
            leave("The working folder has been removed: change to another one, with cd.")
        if error.filename is None:
            leave(str(error))
        leave(f"{error.filename}: {error.strerror}; name another place, or change what is there.")
    except ValueError as error:
        leave(str(error))
    except RuntimeError as error:  # a job that failed; its log has the details
        leave(str(error), status=1)
    except Stopped as stop:
        leave(str(stop), status=Stopped.exit_status)
    except KeyboardInterrupt:
        leave("stopped by Ctrl-C", status=128 + signal.SIGINT)


def _installation(module: str) -> str:
    """Returns the command that installs a missing module: with its smallest extra, if any."""
    from importlib.metadata import PackageNotFoundError, requires

    from nemo_rod.installation import pip_install

    if module.startswith("nemo_rod"):
        return "nemo-rod was changed while it ran, or is not whole: run it or install it again."
    module = module.replace("_", "-").replace(".", "-")
    requirements: list[str] = []
    with suppress(PackageNotFoundError):  # run from a checkout
        requirements = requires("nemo-rod") or []
    found = re.findall(r"^([\w-]+).*extra == [\"']([\w-]+)", "\n".join(requirements), re.MULTILINE)
    sizes = [extra for _, extra in found]
    for name in (module, module.partition("-")[0]):
        if extras := [extra for package, extra in found if package == name]:
            return f"{pip_install(min(extras, key=sizes.count))} brings it."
    return "install it into the environment of this command."
